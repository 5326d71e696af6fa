"""Studies that are really run, in worker processes: kept, broken off, mixed, failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import main
from gspo.config.source import toml_value
from gspo.errors import ConfigError, RunError
from gspo.study.collect import collect
from gspo.study.load import load_study
from gspo.study.run import run_study
from tests.study.builders import TREE

TINY = (
    "{ hidden_size = 16, num_hidden_layers = 1, moe_intermediate_size = 8, num_attention_heads = 2, "
    "num_key_value_heads = 1, head_dim = 8, num_experts = 4, num_experts_per_tok = 2 }"
)
TRAINED = f"""
name = "trained"
title = "Trained"
claim = "c"
regime = "r"
seeds = [0]
[paper]
says = "s"
source = "s"
[recipe]
model = {{ tiny = "qwen3_moe", tiny_config = {TINY} }}
data = {{ task = "arithmetic:addition", num_prompts = 40, eval = {{ num_prompts = 2 }} }}
sft = {{ task = "arithmetic:addition", num_pairs = 20, num_steps = 2, batch_size = 4 }}
rollout = {{ prompts_per_step = 2, group_size = 2, max_new_tokens = 4 }}
reward = {{ num_workers = 1 }}
train = {{ num_steps = 1, num_mini_batches = 2, learning_rate = 1e-3 }}
eval = {{ num_samples = 1 }}
[[arms]]
name = "gspo"
label = "GSPO"
[[arms]]
name = "grpo"
label = "GRPO"
overrides = {{ "objective.name" = "grpo" }}
[[measures]]
name = "length"
function = "metric"
options = {{ metric = "length/mean" }}
label = "length"
[[contrasts]]
name = "same-start"
says = "both arms begin with the same responses"
measure = "length"
arm = "gspo"
against = "grpo"
alternative = "equivalent"
margin = 0.1
[verdict]
needs = ["same-start"]
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(**changes: Any) -> str:
        path = tmp_path / "made-up.toml"
        tree = {**TREE, "seeds": [0], **changes}
        path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in tree.items()))
        return str(path)

    return write


def make(name: str, directory: Path, **how: Any) -> list[str]:
    said: list[str] = []
    run_study(load_study(name), directory, **{"jobs": 2, "quick": False, "explore": False, "say": said.append, **how})
    return said


def test_runs_are_made_once_and_measured(write, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    name, directory = write(), tmp_path / "studies" / "made-up"
    said = make(name, directory)
    assert said[0] == "5 runs to make, 2 at a time"
    found = collect(load_study(name), directory, quick=False)
    scores = {(run.cell.arm, *run.cell.levels.values()): run.scalars["score"] for run in found.runs}
    assert scores == {("a", "1"): 2.0, ("a", "4"): 4.0, ("b", "1"): 1.0, ("b", "4"): 2.0, ("plain",): 0.0}
    assert found.runs[0].series["path"].y == (2.0, None)

    broken = directory / "runs" / "a+size=4+seed=0"
    (broken / "done.json").unlink()
    (broken / "records.json").write_text("{")  # half of an earlier attempt
    assert make(name, directory)[0] == "1 run to make, 2 at a time"
    assert collect(load_study(name), directory, quick=False) == found.model_copy(
        update={"runs": collect(load_study(name), directory, quick=False).runs}
    )

    changed = write(alpha=0.01)
    with pytest.raises(ConfigError, match="runs of two versions are not mixed"):
        make(changed, directory)
    with pytest.raises(ConfigError, match="another version"):
        collect(load_study(changed), directory, quick=False)


def test_a_run_that_goes_wrong_is_a_result_and_a_worker_that_dies_is_not(write, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    arms = [
        {"name": "a", "label": "A", "options": {"fails": True}},
        {"name": "b", "label": "B", "options": {"dies": True}},
        {"name": "plain", "label": "C"},
    ]
    name, directory = write(arms=arms, slopes=[], figures=[]), tmp_path / "studies" / "made-up"
    with pytest.raises(RunError, match=r"b\+seed=0 died with status 1; see .*log\.txt"):
        make(name, directory, jobs=1)
    assert "ZeroDivisionError" in (directory / "runs" / "b+seed=0" / "log.txt").read_text()
    found = collect(load_study(name), directory, quick=False)
    assert [(run.cell.arm, run.status) for run in found.runs] == [("a", "failed"), ("plain", "finished")]
    assert "it went wrong" in found.runs[0].message


def test_an_executor_that_does_not_exist_is_refused(write, tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make(write(executor="tests.study.builders:nothing"), tmp_path / "studies" / "made-up", jobs=1)


def test_a_study_is_trained_from_one_cold_start_a_seed_and_its_page_written(tmp_path, capfd):
    path, directory = tmp_path / "trained.toml", tmp_path / "studies" / "trained"
    path.write_text(TRAINED)
    assert main(["study", "run", str(path), "--dir", str(directory), "--jobs", "1"]) == 0
    said = capfd.readouterr().out
    assert "1 cold start to make" in said
    assert "2 runs to make" in said
    assert (directory / "report.html").stat().st_size > 1000
    results = json.loads((directory / "trained" / "results.json").read_text())
    lengths = {run["cell"]["arm"]: run["scalars"]["length"] for run in results["runs"]}
    assert lengths["gspo"] == lengths["grpo"]  # one step from the same weights with the same seed
    assert not list((directory / "runs").glob("*/run/checkpoints"))

    other = tmp_path / "taken.toml"
    taken = TRAINED.replace('"trained"', '"taken"').replace(
        'label = "GRPO"', 'label = "GRPO"\nsame_as = "trained/grpo"'
    )
    other.write_text(taken)
    said = make(str(other), tmp_path / "studies" / "taken", jobs=1)
    assert "grpo+seed=0: taken over from trained/grpo" in said
    assert "1 run to make, 1 at a time" in said
    other.write_text(taken.replace('"trained/grpo"', '"trained/gspo"'))
    with pytest.raises(ConfigError, match="their recipes differ"):
        make(str(other), tmp_path / "elsewhere" / ".." / "studies" / "other")


def test_the_command_line_says_what_is_missing(tmp_path, capsys):
    assert main(["study", "list"]) == 0
    assert "stability" in capsys.readouterr().out
    assert main(["study", "run"]) == 2
    assert "needs the NAME" in capsys.readouterr().err
    assert main(["study", "run", "stability", "--jobs", "0"]) == 2
    assert main(["study", "run", "stability", "--results", "x.json"]) == 2
    assert main(["study", "report", "stability", "--dir", str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err
