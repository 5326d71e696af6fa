"""``gspo eval --benchmark`` and ``gspo eval compare`` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import main
from gspo.evals.frame import GRADES, RESULT, SAMPLES

RECIPE = """
[model]
tiny = "qwen3"
tiny_config = { num_hidden_layers = 1, hidden_size = 32 }
[data]
task = "arithmetic:addition"
num_prompts = 4
[rollout]
prompts_per_step = 4
group_size = 4
max_new_tokens = 8
[eval]
num_samples = 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows = [{"id": f"sum-{i}", "prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(5)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def samples(path: Path, right: int) -> Path:
    """Four responses to each sum, ``right`` of them right."""
    rows = [{"id": f"sum-{i}", "responses": [str(2 * i)] * right + ["77"] * (4 - right)} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


CUSTOM = ("eval", "--benchmark", "custom", "--data", "sums.jsonl", "--verifier", "integer")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def test_a_model_is_evaluated_continued_and_judged_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*CUSTOM, "recipe.toml", "--num-samples", "4", "--max-new-tokens", "6", "--k", "2", "--out", "out")
    status, out, err = said(capsys, *words)
    assert status == 0, err
    assert "Custom: 5 problems x 4 samples, qwen3" in out
    assert "pass@1 " in out
    assert "pass@2 " in out
    assert "95 % over problems; bootstrap [" in out
    assert "prompt from 'prompt', gold from 'answer', id from 'id'" in err
    assert "custom, judging: 20 of 20 responses" in err
    assert {path.name for path in (here / "out").iterdir()} == {RESULT, SAMPLES, GRADES, "report.html"}
    result = json.loads((here / "out" / RESULT).read_text())
    assert result["protocol"] | {"num_samples": 4, "max_new_tokens": 6, "temperature": 1.0} == result["protocol"]
    assert result["files"][0]["name"] == "sums.jsonl"

    first = (here / "out" / RESULT).read_bytes()
    lines = (here / "out" / SAMPLES).read_bytes().splitlines(keepends=True)
    (here / "out" / SAMPLES).write_bytes(b"".join(lines[:3]) + lines[3][:30])
    (here / "out" / RESULT).unlink()
    status, _, err = said(capsys, *words)
    assert status == 0
    assert "samples.jsonl, line 4: cut off or damaged" in err
    assert "sampling: 8 of 20 responses were done before" in err
    assert (here / "out" / RESULT).read_bytes() == first

    status, out, _ = said(capsys, *CUSTOM, "--samples", "out/samples.jsonl", "--out", "again")
    assert status == 0
    assert json.loads((here / "again" / RESULT).read_text())["problems"] == result["problems"]


def test_without_a_recipe_the_model_is_enough_and_the_directory_is_named_after_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gspo.policy.causal_lm import load_policy

    load_policy(tiny="qwen3", tiny_config={"num_hidden_layers": 1, "hidden_size": 32}).save(here / "tiny")
    short = ("--num-samples", "1", "--max-new-tokens", "2", "--device", "cpu")
    status, out, err = said(capsys, *CUSTOM, "--model", "tiny", *short)
    assert status == 0, err
    assert "result: runs/eval-custom-tiny/evaluation.json" in out
    status, _, err = said(capsys, *CUSTOM, "--model", "tiny", *short, "--seed", "1")
    assert status == 2
    assert "belongs to an evaluation with another protocol" in err
    status, _, err = said(capsys, *CUSTOM, "--model", "tiny", "--dtype", "float8")
    assert (status, "--dtype is 'float8'" in err) == (2, True)


def test_evaluations_are_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, right in (("a", 1), ("b", 3), ("c", 1)):
        assert main([*CUSTOM, "--samples", str(samples(here / "s.jsonl", right)), "--out", name]) == 0
    capsys.readouterr()
    status, out, _ = said(capsys, "eval", "compare", "a", "b", "c", "--output", "compare.json")
    assert status == 0
    # five problems, each +2/4: both extreme patterns of 2^5 count
    assert "b: +50.0 points" in out
    assert "p = 0.0625, Holm over 2: 0.125, 5 problems" in out
    assert "c: +0.0 points" in out
    rows = json.loads((here / "compare.json").read_text())["comparisons"]
    assert [row["difference"] for row in rows] == [0.5, 0.0]
    status, out, _ = said(capsys, "report", "a", "b")
    assert (status, out.strip()) == (0, "a/report.html")
    status, _, err = said(capsys, "eval", "compare", "a")
    assert (status, "at least two evaluations" in err) == (2, True)


def test_held_out_evaluations_can_be_compared_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "xy":
        status, out, err = said(capsys, "eval", "recipe.toml", "--output", f"{name}.json")
        assert status == 0, err
        assert json.loads(out)["num_samples"] == 2
    status, out, err = said(capsys, "eval", "compare", "x.json", "y.json")
    assert status == 0, err
    assert "y.json: +0.0 points" in out


def test_a_signal_stops_after_what_is_done_is_safe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "judge.py").write_text(
        "import os, signal\n"
        "def once(completions, **columns):\n"
        "    if not os.path.exists('asked'):\n"
        "        open('asked', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [1.0 for _ in completions]\n"
    )
    rows = [{"id": f"sum-{i}", "prompt": "p", "answer": "1"} for i in range(12)]
    (here / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (here / "s.jsonl").write_text("\n".join(json.dumps({"id": row["id"], "response": "x"}) for row in rows))
    words = ("eval", "--benchmark", "custom", "--data", "many.jsonl", "--verifier", "judge.py:once")
    status, _, err = said(capsys, *words, "--samples", "s.jsonl", "--out", "out")
    assert status == 3
    assert "stopped by SIGTERM; the same command continues, out has what is done" in err
    assert not (here / "out" / RESULT).exists()
    status, _, err = said(capsys, *words, "--samples", "s.jsonl", "--out", "out")
    assert status == 0
    assert "judging: 8 of 12 responses were done before" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval"], "needs RECIPE.toml (its held-out prompts), or --benchmark NAME"),
        (["eval", "--benchmark", "aime"], "did you mean 'aime24'?"),
        (["eval", "--benchmark", "aime24"], "needs RECIPE.toml, --model DIR, or --samples FILE"),
        (["eval", "--benchmark", "aime24", "--model", "m"], "benchmark 'aime24' needs its data: --data FILE"),
        (["eval", "recipe.toml", "--data", "sums.jsonl"], "--data is for --benchmark"),
        (
            ["eval", "recipe.toml", "--num-samples", "4"],
            "--num-samples is for --benchmark; on a recipe's prompts it is",
        ),
        ([*CUSTOM, "recipe.toml", "--output", "x.json"], "say --out DIR instead"),
        (
            [*CUSTOM, "--samples", "s.jsonl", "--temperature", "0"],
            "--temperature is for sampling, and --samples samples",
        ),
        ([*CUSTOM, "--samples", "s.jsonl", "--model", "m"], "leave out the recipe and --model"),
        ([*CUSTOM, "--samples", "nowhere.jsonl"], "there is no data file"),
        ([*CUSTOM, "--model", "m", "--eval.k", "[1]"], "no RECIPE.toml is given"),
        ([*CUSTOM, "recipe.toml", "--device", "cpu"], "say --model.dtype and --run.device"),
        ([*CUSTOM, "--option", "x", "--model", "m"], "--option x: write --option NAME=VALUE"),
        ([*CUSTOM, "--option", "verifier=math", "--model", "m"], "--option verifier is given twice"),
        ([*CUSTOM, "recipe.toml", "--num-samples", "2", "--k", "4"], "pass@4 needs at least 4 samples"),
        ([*CUSTOM, "recipe.toml", "--max-new-tokens", "1000000"], "lower --max-new-tokens to at most"),
        ([*CUSTOM, "--num-sample", "3"], "did you mean --num-samples?"),
        (["report", "sums.jsonl", "x.json"], "runs and evaluations"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    samples(here / "s.jsonl", 1)
    status, _, err = said(capsys, *words)
    assert (status, sentence in err) == (2, True), err
    assert not list(here.glob("**/evaluation.json"))


def test_the_shares_of_the_summary_are_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = samples(here / "s.jsonl", 2)
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()][:4]
    rows[0]["responses"][3] = "I do not know"
    path.write_text("\n".join(map(json.dumps, rows)))
    status, out, _ = said(capsys, *CUSTOM, "--samples", str(path), "--out", "out")
    assert status == 0
    assert "responses: unanswered 6.2 %, unscored 0.0 %, missing 20.0 %" in out  # 1 of 16; 4 of 20
    assert "cells without a verdict: 40.0 % if all are wrong, 60.0 % if all are right" in out  # 8 and 12 of 20
