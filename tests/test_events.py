"""The run directory: what the writer accepts, what a reader gets back, who may write."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import DataError, RunDirectoryError
from gspo.events import EVENT_TYPES, METRICS, EventWriter, RunDirectory, find_metric, read_event_log, read_events

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"

STEP: dict[str, Any] = {"step": 1, "num_updates": 4, "policy_version": 4, "seconds": {"total": 1.5}}


def written(path: Path, kind: str, **fields: Any) -> dict[str, Any]:
    """The event as a reader of the file gets it."""
    with EventWriter(path) as events:
        returned = events.write(kind, **fields)
    assert read_events(path)[-1] == returned
    return returned


def test_an_event_comes_back_as_it_went_in(tmp_path: Path) -> None:
    event = written(tmp_path / "e", "step", **STEP, metrics={"reward/mean": 0.25, "length/max": 18})
    assert event["type"] == "step"
    assert event["metrics"] == {"reward/mean": 0.25, "length/max": 18}
    assert event["seconds"] == {"total": 1.5}
    assert "non_finite" not in event


def test_each_event_is_one_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "e"
    with EventWriter(path) as events:
        for count in (1, 2, 3):
            events.write("warning", message="two\nlines")
            assert path.read_text().count("\n") == count  # the writer is still open


def test_non_finite_numbers_become_null_and_are_named(tmp_path: Path) -> None:
    event = written(
        tmp_path / "e",
        "update",
        step=1,
        update=2,
        mini_batch=1,
        metrics={"loss": math.nan, "grad_norm": math.inf, "learning_rate": 1e-3},
        extra=[1.0, -math.inf],
    )
    assert event["metrics"] == {"loss": None, "grad_norm": None, "learning_rate": 1e-3}
    assert event["non_finite"] == {"metrics.loss": "nan", "metrics.grad_norm": "inf", "extra.1": "-inf"}
    json.loads((tmp_path / "e").read_text(), parse_constant=pytest.fail)  # strict JSON: no NaN in the file


def test_scalars_of_numpy_and_torch_become_numbers(tmp_path: Path) -> None:
    import torch

    metrics = {"reward/mean": np.float32(0.5), "length/max": np.int64(7), "entropy": torch.tensor(0.25)}
    event = written(tmp_path / "e", "step", **STEP, metrics=metrics | {"reward/std": torch.tensor(math.nan)})
    assert event["metrics"] == {"reward/mean": 0.5, "length/max": 7, "entropy": 0.25, "reward/std": None}
    assert event["non_finite"] == {"metrics.reward/std": "nan"}


def test_text_that_is_no_unicode_does_not_stop_the_run(tmp_path: Path) -> None:
    sample = {"answer": "half a pair \ud83d, \x00, \u2028"}
    event = written(tmp_path / "e", "samples", step=1, samples=[sample])
    assert event["samples"][0]["answer"] == "half a pair \\ud83d, \x00, \u2028"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(value=JSON)
def test_any_json_value_comes_back(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    surrogates = re.compile("[\ud800-\udfff]")
    if not surrogates.search(json.dumps(value, ensure_ascii=False)):
        assert written(tmp_path_factory.mktemp("e") / "e", "warning", message="", value=value)["value"] == value


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        ("stepp", {}, "unknown event type 'stepp'"),
        ("checkpoint", {"step": 1}, "lacks path"),
        ("warning", {"message": "", "time": 0.0}, "the writer itself fills in time"),
        ("warning", {"message": "", "thing": object()}, "thing is a object"),
        ("step", {**STEP, "metrics": {"reward_mean": 1.0}}, "metric 'reward_mean' is not registered"),
        ("step", {**STEP, "metrics": {"reward/": 1.0}}, "metric 'reward/' is not registered"),
        ("step", {**STEP, "metrics": {"reward/*": 1.0}}, "metric 'reward/*' is not registered"),
        ("step", {**STEP, "metrics": {"pass@1": 1.0}}, "belongs to evaluation events, not to 'step'"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused(
    kind: str, fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with EventWriter(tmp_path / "e") as events, pytest.raises(ValueError, match=re.escape(sentence)):
        events.write(kind, **fields)
    assert (tmp_path / "e").read_text() == ""


def test_prefix_patterns_take_any_ending_and_full_names_come_first() -> None:
    assert find_metric("reward/my_module:score") is METRICS["reward/*"]
    assert find_metric("pass@16") is METRICS["pass@*"]
    assert find_metric("pass@1") is METRICS["pass@1"]
    assert find_metric("log_ratio/q50") is METRICS["log_ratio/q50"]
    assert find_metric("rewards") is None


def test_every_event_type_says_what_it_holds() -> None:
    assert all(kind.__doc__ or kind.__annotations__ for kind in EVENT_TYPES.values())


# Reading ------------------------------------------------------------------------------------------------------------


def two_events(path: Path) -> bytes:
    with EventWriter(path) as events:
        events.write("warning", message="eins")
        events.write("warning", message="zwei: ä")
    return path.read_bytes()


def test_a_file_cut_anywhere_keeps_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "e"
    whole = two_events(path)
    first = whole.index(b"\n") + 1
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        log = read_event_log(path)
        # A line is whole with or without its newline; a cut inside it is reported, an empty rest is not.
        assert len(log.events) == (length >= first - 1) + (length >= len(whole) - 1)
        assert (log.torn is not None) == (0 < length < first - 1 or first < length < len(whole) - 1)


def test_read_events_warns_of_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_bytes(two_events(path)[:-5])
    with pytest.warns(UserWarning, match=r"e:2: the last line was cut off"):
        assert [event["message"] for event in read_events(path)] == ["eins"]


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b'{"time": 1}', b"\xff", b"\x00\x00", b""])
def test_any_other_broken_line_is_an_error_with_its_number(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "e"
    whole = two_events(path)
    path.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(DataError, match=r"/e:3: not a"):
        read_event_log(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        read_events(tmp_path / "nowhere")


# The directory -------------------------------------------------------------------------------------------------------


def test_a_new_run_directory_tells_how_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunDirectory.create(
        path, command=["gspo", "train", "r.toml"], config_text="[run]\n", versions={"gspo": "x"}, seed=7, host={"a": 1}
    ) as run:
        run.write_summary({"after": 0.5, "before": math.nan})
        assert run.checkpoint_path(10) == path / "checkpoints" / "step-000010"
        assert read_events(run.events_path) == []
    info = json.loads((path / "run.json").read_text())
    assert info["command"] == ["gspo", "train", "r.toml"]
    assert info["seed"] == 7
    assert info["versions"]["gspo"] == "x"
    assert {"python", "torch", "transformers"} <= info["versions"].keys()
    assert info["host"]["num_cpus"] >= 1
    assert info["host"]["a"] == 1
    assert (path / "recipe.toml").read_text() == "[run]\n"
    assert json.loads((path / "summary.json").read_text()) == {"after": 0.5, "before": None}
    assert not list(path.glob("*.tmp"))


def test_another_process_is_told_who_uses_the_directory(tmp_path: Path) -> None:
    program = (
        "import sys; from gspo.events import RunDirectory\n"
        "run = RunDirectory.create(sys.argv[1])\n"
        "run.event_writer().write('checkpoint', step=1, path='checkpoints/step-000001')\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunDirectoryError, match=rf"in use by pid {process.pid}.*another --run-dir"):
            RunDirectory.create(tmp_path)
        process.kill()
    # The lock died with its owner; what it left is a run that did not end.
    with pytest.raises(RunDirectoryError, match=r"a run that did not reach its end; continue it .*--run-dir"):
        RunDirectory.create(tmp_path)


def test_the_lock_is_given_back_and_names_its_holder(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path):
        assert (tmp_path / "run.lock").read_text() == str(os.getpid())
        with pytest.raises(RunDirectoryError, match=f"in use by pid {os.getpid()}"):
            RunDirectory.create(tmp_path)
    RunDirectory.create(tmp_path).close()  # free again


def test_a_run_that_failed_before_it_did_anything_does_not_hold_its_directory(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, config_text="first") as run, run.event_writer() as events:
        events.write("start", name="a")
        events.write("end", status="failed", seconds=0.1)
    with RunDirectory.create(tmp_path, config_text="second") as run:
        assert run.recipe_path.read_text() == "second"
        assert read_events(run.events_path) == []


def test_a_finished_run_is_never_overwritten(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, config_text="old") as run, run.event_writer() as events:
        events.write("sft", update=1, metrics={"loss": 1.0})
        events.write("end", status="finished", seconds=1.0)
    with pytest.raises(RunDirectoryError, match="already holds a run with status 'finished'"):
        RunDirectory.create(tmp_path, config_text="new")
    assert (tmp_path / "recipe.toml").read_text() == "old"


def test_files_that_no_run_wrote_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirectoryError, match=r"holds other files \(thesis.tex\)"):
        RunDirectory.create(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create(tmp_path / "thesis.tex")
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        RunDirectory.create(tmp_path / "thesis.tex" / "run")


def test_a_run_that_died_before_it_was_described_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("1234")
    (tmp_path / "recipe.toml").write_text("half")
    with RunDirectory.create(tmp_path, config_text="whole") as run:
        assert run.recipe_path.read_text() == "whole"


def test_events_need_neither_torch_nor_numpy() -> None:
    program = "import sys, gspo.events; print({'torch', 'numpy', 'rich', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


# The documentation ----------------------------------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, str]]:
    """Name -> (unit, levels) of every row of the tables in docs/metrics.md."""
    rows = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            rows[cells[0].strip("`")] = (cells[2], cells[3])
            assert len(cells) == 5, line
            assert all(cells), line
    return rows


def test_docs_and_registry_have_the_same_names_units_and_levels() -> None:
    assert documented() == {name: (info.unit, ", ".join(info.levels)) for name, info in METRICS.items()}
