"""The page of evaluations, and the progress of one."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gspo.errors import DataError
from gspo.report.evaluation import is_evaluation, load_evaluation, render_evaluations, write_evaluation_page
from gspo.report.progress import EvaluationProgress
from tests.report.test_html import data_of

HOSTILE = "</pre><script>alert(1)</script>"


def write(directory: Path, passed: tuple[int, ...] = (4, 1, 0), **changes: Any) -> Path:
    directory.mkdir()
    problems = [
        {"id": f"q{i}", "place": "", "date": "2024-10-05", "num_scored": 4 if c >= 0 else 0, "num_passed": max(c, 0),
         "num_unscored": 0, "num_missing": 0, "num_truncated": 1, "verdicts": {"right": c, "wrong": 4 - c}}
        for i, c in enumerate(passed)
    ]  # fmt: skip
    metrics = {
        "pass@1": 0.4167, "pass@1/low": 0.1, "pass@1/high": 0.8, "pass@4": 0.6667, "pass@1/standard_error": 0.3,
        "pass@1/measurement_error": 0.07, "pass@1/bootstrap_low": 0.083, "pass@1/bootstrap_high": 0.912,
        "unscored_fraction": 0.0, "missing_fraction": 0.25, "unanswered_fraction": 0.0625,
        "pass@1/if_unscored_wrong": 0.31, "pass@1/if_unscored_right": 0.56, "compat/pass@1": 0.5,
        "compat/pass@1/low": 0.2, "compat/pass@1/high": 0.9,
    }  # fmt: skip
    fields = {
        "format": 1, "kind": "benchmark", "name": "b", "title": f"A benchmark {HOSTILE}", "confidence": 0.95,
        "num_prompts": len(passed), "num_samples": 4, "metrics": metrics, "problems": problems,
        "figures": [{"name": "rating", "text": "1234", "note": "1100 to 1300"}],
        "tables": [{"title": "Contests", "note": "by hand", "columns": ["contest", "R"], "rows": [[HOSTILE, 1500.0]]}],
        "notes": [f"layout x {HOSTILE}"], "identity": {"data": "d"}, "model": {"name": "m", "digest": "0"},
        "protocol": {"num_samples": 4, "temperature": 0.6, "max_new_tokens": 99},
    }  # fmt: skip
    (directory / "evaluation.json").write_text(json.dumps(fields | changes))
    answers = [
        {"text": f"yes {HOSTILE}", "num_tokens": 5, "stop_reason": "eos"},
        {"text": "x" * 9000, "num_tokens": None},
    ]
    grades = [{"value": 1.0, "verdict": "right", "reason": ""}, {"value": 0.0, "verdict": "wrong", "reason": HOSTILE}]
    for name, key, rows in (("samples", "answers", answers), ("grades", "grades", grades)):
        lines = [json.dumps({"identity": {}}), json.dumps({"id": "q0", key: rows}), '{"id": "q1", "cut off']
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    return directory


def page_of(*paths: Path) -> str:
    return render_evaluations([load_evaluation(path) for path in paths], "/* plotly */")


class Scripts(HTMLParser):
    """Counts elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def test_numbers_tables_and_responses_are_on_the_page(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "e"))
    for text in (
        "41.7 %", "10.0 % to 80.0 %, 95 % over problems", "pass@1, compat", "66.7 %", "30.0 points",
        "with the problems fixed 7.0 points", "8.3 % to 91.2 %", "31.0 % to 56.0 %", "25.0 %", "1234", "1100 to 1300",
        "Contests", "1500", "m · 3 problems × 4 responses · temperature 0.6 · at most 99 tokens", "2024-10-05",
        "q0 · right · eos · 5 tokens", "[cut: 9000 characters]", "right 4, wrong 0",
    ):  # fmt: skip
        assert text in page, text
    charts = {chart["id"]: chart["figure"]["traces"][0] for chart in data_of(page)["charts"]}
    assert (charts["rates"]["x"], charts["rates"]["y"]) == (["q0", "q1", "q2"], [1.0, 0.25, 0.0])
    assert dict(zip(charts["verdicts"]["x"], charts["verdicts"]["y"], strict=True)) == {"right": 5, "wrong": 7}


def test_what_models_and_files_wrote_is_text(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "e"))
    assert HOSTILE not in page
    assert Scripts(page).tags.count("script") == 3  # data, plotly, ours


def test_several_evaluations_stand_side_by_side(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", (0, 1, -1), identity={"data": "other"})
    page = page_of(one, two)
    assert "2 evaluations side by side" in page
    assert "These evaluations are not of the same problems" in page
    (rates,) = (chart["figure"]["traces"] for chart in data_of(page)["charts"])
    assert [(trace["meta"]["run"], trace["y"]) for trace in rates] == [
        ("one", [1.0, 0.25, 0.0]),
        ("two", [0.0, 0.25, None]),
    ]


def test_an_evaluation_on_held_out_prompts_has_a_page_too(tmp_path: Path) -> None:
    fields = {"model": "m", "name": "held_out", "num_prompts": 2, "num_samples": 4, "confidence": 0.95,
              "metrics": {"pass@1": 0.5, "pass@1/low": 0.1, "pass@1/high": 0.9},
              "outcomes": [[4, 4], [4, 0]]}  # fmt: skip
    path = tmp_path / "e.json"
    path.write_text(json.dumps(fields))
    page = page_of(path)
    assert "50.0 %" in page
    assert data_of(page)["charts"][0]["figure"]["traces"][0]["y"] == [1.0, 0.0]


def test_kinds_are_told_and_what_is_none_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "e")
    assert is_evaluation(directory)
    assert is_evaluation(directory / "evaluation.json")
    (directory / "events.jsonl").touch()
    assert not is_evaluation(directory)  # a run that was evaluated into its own directory
    assert not is_evaluation(tmp_path)
    (tmp_path / "x.json").write_text("[]")
    for name in ("x.json", "nowhere.json"):
        with pytest.raises(DataError, match="is not an evaluation"):
            load_evaluation(tmp_path / name)


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    output = write_evaluation_page([write(tmp_path / "e")], tmp_path / "new" / "page.html")
    text = output.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "plotly" in text


# Progress.


def test_lines_say_how_far_and_how_long() -> None:
    now = [0.0]
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=200)
    with EvaluationProgress("b", console, clock=lambda: now[0]) as progress:
        progress.begin("sampling", 100, 20)
        assert progress.seconds_left() is None
        for _ in range(80):
            now[0] += 1.0
            progress.advance()
        progress.begin("judging", 100, 100)
    lines = out.getvalue().splitlines()
    assert lines[0] == "b, sampling: 20 of 100 responses were done before"
    assert lines[1] == "b, sampling: 25 of 100 responses, left 1 min 15 s"  # 5 in 5 s, 75 to come
    assert lines[-2] == "b, sampling: 100 of 100 responses"
    assert lines[-1] == "b, judging: 100 of 100 responses were done before"
    assert len(lines) <= 22


def test_a_terminal_has_a_bar_and_nothing_stays_of_it() -> None:
    out = io.StringIO()
    with EvaluationProgress("b", Console(file=out, force_terminal=True, width=100)) as progress:
        progress.begin("sampling", 3, 0)
        for _ in range(3):
            progress.advance()
        progress.begin("judging", 3, 0)
        progress.advance(3)
    assert "b, sampling" in out.getvalue()
    assert "3/3" in out.getvalue()
