"""``gspo doctor`` on runs that ended in each way, all made by hand: what it says, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import main
from gspo.events import RunDirectory

STEP = {"num_updates": 2, "policy_version": 2, "seconds": {"total": 1.0}}


def make_run(path: Path, *events: tuple[str, dict[str, Any]], num_steps: int = 30) -> Path:
    with RunDirectory.create(path, command=["gspo", "train"]) as run, run.event_writer() as writer:
        writer.write("start", name="run", num_steps=num_steps)
        for kind, fields in events:
            writer.write(kind, **fields)
    return path


def step(number: int, **metrics: float) -> tuple[str, dict[str, Any]]:
    return "step", {"step": number, **STEP, "metrics": {name.replace("__", "/"): v for name, v in metrics.items()}}


def end(status: str, message: str | None = None) -> tuple[str, dict[str, Any]]:
    return "end", {"status": status, "seconds": 3.0, **({} if message is None else {"message": message})}


def said(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["doctor", str(path)])
    return status, capsys.readouterr().out


def test_a_finished_run_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", step(1, reward__mean=0.5), end("finished"), num_steps=1)
    status, text = said(path, capsys)
    assert status == 0
    assert f"{path}: finished after 1 of 1 steps" in text
    assert "nothing is wrong" in text


@pytest.mark.parametrize(
    ("message", "cause", "remedy"),
    [
        ("NumericalError: step 3: the gradient norm is nan", "a number was not finite", "train.learning_rate"),
        ("OutOfMemoryError: CUDA out of memory", "the device ran out of memory", "train.micro_batch_tokens"),
        ("CheckpointError: the checkpoint x could not be written", "a checkpoint could not be written", "--resume"),
        ("RewardError: reward 'x' raised KeyError", "a reward function failed", "the responses are in the journal"),
        ("CollapseError: stopped after step 3", "a detector of the guard stopped it", "model.path"),
        ("ZeroDivisionError: division by zero", "an error ended it", "see the message"),
    ],
)
def test_a_failed_run_is_told_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], message: str, cause: str, remedy: str
) -> None:
    status, text = said(make_run(tmp_path / "run", step(1), end("failed", message)), capsys)
    assert status == 1
    assert f"the run failed: {cause}" in text
    assert f"evidence: {message}" in text
    assert remedy in text


def test_a_run_that_died_is_told_from_one_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", step(1), step(2))
    with (path / "events.jsonl").open("a") as file:
        file.write('{"type": "step", "ti')
    status, text = said(path, capsys)
    assert status == 1
    assert f"{path}: died after 2 of 30 steps" in text
    assert "killed, or the machine stopped" in text
    assert "the last line was cut off" in text
    assert f"gspo train --resume {path}" in text
    with RunDirectory.reopen(path):
        status, text = said(path, capsys)
        assert f"{path}: still going after 2 of 30 steps" in text
        assert status == 0


def test_a_stopped_run_is_told_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", step(1), end("interrupted", "stopped by SIGTERM"))
    with RunDirectory.reopen(path) as run:
        run.note_resume(checkpoint="step-000001")
    _, text = said(path, capsys)
    assert "interrupted after 1 of 30 steps, continued 1 times" in text
    assert "evidence: stopped by SIGTERM" in text


def test_collapse_numbers_and_verdicts_are_told_with_their_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        step(
            n,
            reward__mean=0.8 if n <= 12 else 0.1,
            grad_norm=400.0 if n == 20 else 1.0,
            skipped_updates__non_finite=float(n == 7),
            rows__non_finite=2.0 * (n == 9),
            reward__unscored=3.0,
            reward__timeouts=1.0,
        )
        for n in range(1, 26)
    ]
    status, text = said(make_run(tmp_path / "run", *steps, end("finished")), capsys)
    assert status == 1
    assert "reward drop at step 1" in text  # between 13 and 17
    assert "reward fell from 0.8 (steps 1 to 5)" in text
    assert "grad norm spike at step 20" in text
    assert "grad_norm is 400, usual before was 1" in text
    assert "updates were skipped because a number was not finite\n  evidence: 1, the first in step 7" in text
    assert "responses were left out because a log-prob was not finite\n  evidence: 2, the first in step 9" in text
    assert "75 unscored responses, 25 time-outs over 25 steps" in text  # 25 steps of 3 and 1
    assert text.count("usually helps: ") == 5


def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", step(1), end("finished"))
    (path / "checkpoints" / "step-000001").mkdir(parents=True)
    (path / "checkpoints" / ".step-000002.writing").mkdir()
    status, text = said(path, capsys)
    assert status == 1
    assert "checkpoint step-000001 is damaged" in text
    assert "step-000002" not in text


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_it_needs_no_torch(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", step(1), end("finished"))
    code = (
        "import sys; from gspo.cli import main; "
        f"status = main(['doctor', {str(path)!r}]); sys.exit(status or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
