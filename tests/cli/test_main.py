"""The command: exit statuses, what each command calls, and that nothing heavy is loaded early."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo.cli import main
from gspo.errors import DataError, EngineError


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for gspo.launch: what the commands hand over."""
    calls: dict[str, Any] = {}

    def train(recipe: Any, *, run_dir: Path | None, command: list[str]) -> dict[str, Any]:
        calls["train"] = (recipe, run_dir, command)
        return {"after": 0.5, "run_dir": str(run_dir or "runs/none")}

    def sft(recipe: Any, *, run_dir: Path | None, command: list[str]) -> dict[str, Any]:
        calls["sft"] = (recipe, run_dir, command)
        return {"loss": 0.5}

    def evaluate(recipe: Any, *, model: str | None, output: Path | None) -> dict[str, Any]:
        calls["eval"] = (recipe, model, output)
        return {"pass@1": 0.25}

    module = types.ModuleType("gspo.launch")
    for function in (train, sft, evaluate):
        setattr(module, function.__name__, function)
    install(monkeypatch, module)
    return calls


def install(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "gspo.launch", module)
    monkeypatch.setattr(gspo, "launch", module, raising=False)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def train(*args: Any, **options: Any) -> None:
        raise error

    module = types.ModuleType("gspo.launch")
    module.train = train  # type: ignore[attr-defined]
    install(monkeypatch, module)


def test_train_hands_over_recipe_directory_and_line(
    launched: dict[str, Any], recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["train", str(recipe_file), "--train.num_steps", "3", "--run-dir", "runs/a", "--eval.k=[1, 2]"]
    assert main(line) == 0
    recipe, run_dir, command = launched["train"]
    assert (recipe.train.num_steps, recipe.eval.k) == (3, (1, 2))
    assert run_dir == Path("runs/a")
    assert command == ["gspo", *line]
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1]) == {"after": 0.5, "run_dir": "runs/a"}
    assert "no report: " in shown.err  # nothing ran, so there is nothing to draw; the run itself succeeded


def test_sft_and_eval(launched: dict[str, Any], recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", str(recipe_file), "--sft.task", "arithmetic:addition"]) == 0
    assert launched["sft"][0].sft.task == "arithmetic:addition"
    assert launched["sft"][1] is None
    capsys.readouterr()
    assert main(["eval", str(recipe_file), "--model", "runs/a/final", "--run-dir", "runs/a"]) == 0
    assert launched["eval"][1:] == ("runs/a/final", Path("runs/a/evaluation.json"))
    assert json.loads(capsys.readouterr().out) == {"pass@1": 0.25}
    assert main(["eval", str(recipe_file), "--output", "x.json"]) == 0
    assert launched["eval"][1:] == (None, Path("x.json"))
    assert main(["eval", str(recipe_file), "--output", "x.json", "--run-dir", "a"]) == 2


def test_sft_without_its_section_launches_nothing(
    launched: dict[str, Any], recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", str(recipe_file)]) == 2
    assert "[sft]" in capsys.readouterr().err
    assert launched == {}


def test_warnings_go_to_stderr_and_the_run_starts(
    launched: dict[str, Any], recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe_file), "--objective.name", "ppo"]) == 0
    assert capsys.readouterr().err.startswith("warning: objective.name: ppo trains no critic")
    assert "train" in launched


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (DataError("d.jsonl:3: no column 'prompt'"), 2, "error: d.jsonl:3: no column 'prompt'\n"),
        (EngineError("the sampler failed"), 1, "error: the sampler failed\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_statuses(
    monkeypatch: pytest.MonkeyPatch,
    recipe_file: Path,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    text: str,
) -> None:
    failing(monkeypatch, error)
    assert main(["train", str(recipe_file)]) == status
    assert capsys.readouterr().err == text


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, recipe_file: Path) -> None:
    failing(monkeypatch, ZeroDivisionError("a fault of ours"))
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        main(["train", str(recipe_file)])


def test_report_and_conformance_call_their_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, cases = types.ModuleType("gspo.report.html"), types.ModuleType("gspo.cli.conformance")
    html.write_report = lambda runs, output: output  # type: ignore[attr-defined]
    seen: list[Any] = []
    cases.conformance = lambda files, out: seen.append((files, out)) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gspo.report.html", html)
    monkeypatch.setitem(sys.modules, "gspo.cli.conformance", cases)
    assert main(["report", "runs/a", "runs/b"]) == 0
    assert capsys.readouterr().out == "runs/a/report.html\n"
    assert main(["report", "runs/a", "--output", "x.html"]) == 0
    assert capsys.readouterr().out == "x.html\n"
    assert main(["conformance", "a.json", "b.json"]) == 1
    assert seen[0][0] == [Path("a.json"), Path("b.json")]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (["report"], "at least one run directory"),
        (["conformance"], "at least one file"),
        (["report", "runs/a", "--train.num_steps", "3"], "gspo report has no option --train.num_steps"),
        (["chek", "a.toml"], "did you mean gspo check?"),
        (["frobnicate"], "there are train, sft, eval, report, check, conformance"),
        (["train", "a.toml", "--run-dri", "x"], "did you mean --run-dir?"),
        (["train"], "RECIPE.toml"),
        (["train", "a.toml", "b.toml"], "b.toml"),
    ],
)
def test_wrong_lines(line: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("line", [["--help"], []])
def test_help_names_every_command(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 0
    text = capsys.readouterr().out
    for command in ("train", "sft", "eval", "report", "check", "conformance", "--version", "Exit status"):
        assert command in text


@pytest.mark.parametrize("command", ["train", "sft", "eval", "check"])
def test_help_of_a_command_shows_how_to_override(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "RECIPE.toml" in text
    if command != "check":
        assert "overridden" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gspo {version('gspo')}\n" == f"gspo {gspo.__version__}\n"


HEAVY = ("torch", "transformers", "plotly", "numpy", "pyarrow", "math_verify", "reasoning_gym")
LOADED = f"import sys; print(sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)"


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["gspo", "gspo.config", "gspo.cli", "gspo.config.document"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    done = run_python(f"import {module}; {LOADED}")
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_wrong_recipe_is_found_before_torch_is_loaded(recipe_file: Path) -> None:
    code = f"from gspo.cli import main; status = main(); {LOADED}; sys.exit(status)"
    done = run_python(code, "train", str(recipe_file), "--rollout.group_size", "1")
    assert done.returncode == 2
    assert "a group needs at least 2 completions" in done.stderr
    assert done.stderr.endswith("\n[]\n")


def test_checking_a_model_directory_never_loads_torch(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 11}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    code = f"from gspo.cli import main; status = main(); {LOADED}; sys.exit(status)"
    words = ["--model.tiny", "none", "--model.path", str(tmp_path / "model")]
    done = run_python(code, "check", str(recipe_file), *words)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_python_m_gspo_is_the_command(recipe_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "check", str(recipe_file), "--objective.clip_target", "0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    fault = 'objective.clip_target: 0.1 has no effect unless objective.clip = "calibrated"'
    assert done.stderr == f"error: --objective.clip_target: {fault}\n"


def test_public_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in gspo.__all__:
        assert getattr(gspo, name) is not None
    assert set(gspo.__all__) <= set(dir(gspo))
    with pytest.raises(AttributeError, match="no attribute 'GSOP'"):
        _ = gspo.GSOP


def test_split_keeps_values_that_look_like_paths(recipe_file: Path, split: Callable[..., Any]) -> None:
    own, overrides = split(["r.toml", "--a.b", "-1", "--run_dir=x", "--c.d=--e", "--run-dir", "y"])
    assert own == ["r.toml", "--run_dir=x", "--run-dir", "y"]
    assert overrides == ["--a.b", "-1", "--c.d=--e"]


@pytest.fixture
def split() -> Callable[..., Any]:
    from gspo.cli.arguments import Train, split_overrides

    return lambda words: split_overrides(words, Train)
