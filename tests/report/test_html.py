"""The page: what is in it, that nothing can be run or fetched, and how Chromium shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import InputError, RunDirectoryError
from gspo.report import headline
from gspo.report.html import MAX_SAMPLE_EVENTS, render, write_report
from gspo.report.series import load_run, load_runs
from gspo.report.traces import COLOURS
from tests.report.synthetic import HOSTILE, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def page_of(*runs: Path) -> str:
    """The page without the plotting library."""
    return render(load_runs(list(runs)), "/* plotly */")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found.group(1)))


def test_final_numbers_are_those_of_the_evaluations(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", num_steps=4)
    first, *_, last = load_run(path).main_evaluation()
    page = page_of(path)
    for event in (first, last):
        assert f"{100 * event['metrics']['pass@1']:.1f} %" in page
        assert f"{100 * event['metrics']['pass@1/low']:.1f} to {100 * event['metrics']['pass@1/high']:.1f}" in page
    assert "ratio in [1 − 0.003, 1 + 0.004]" in page
    assert "32 prompts × 8 responses per step, 4 updates" in page
    assert "4 of 4" in page


def test_a_paired_interval_is_shown_where_the_run_has_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", num_steps=4, ended=False)
    events = (path / "events.jsonl").read_text().splitlines()
    last = json.loads(next(line for line in reversed(events) if '"evaluation"' in line))
    last["metrics"] |= {"difference/low": 0.123, "difference/high": 0.456, "difference/p_value": 0.00021}
    (path / "events.jsonl").write_text("\n".join([*events, json.dumps(last)]) + "\n")
    assert headline.change(load_run(path)).note == "+12.3 to +45.6, p = 0.00021"


def test_several_runs_are_compared_in_a_table(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a", name="A"), write_run(tmp_path / "b", name="B", objective="grpo"))
    table = page[page.index('<table id="comparison"') : page.index("</table>")]
    assert table.count("<tr>") == 3
    for index, name in enumerate("AB"):
        assert f'style="background:{COLOURS[index]}"></span>{name}</td>' in table


def test_nothing_of_a_model_can_become_markup(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", name=HOSTILE, num_steps=2)
    with (path / "recipe.toml").open("a") as recipe:
        recipe.write(HOSTILE)
    page = page_of(path)
    assert "<img" not in page
    # Only the page's own scripts: data, plotly, and the page's; each closed once.
    assert page.count("<script") == page.count("</script") == 3
    assert data_of(page)["samples"][0][0]["samples"][1]["answer"].endswith(HOSTILE)


def test_the_policy_lets_exactly_the_page_s_own_scripts_run(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "r"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy.group(1) == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    assert not re.search(r"""(src|href)\s*=\s*["']?https?:|url\(|@import""", page)


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    with_nothing = write_run(tmp_path / "r", num_steps=0)
    lines = (with_nothing / "events.jsonl").read_text().splitlines(keepends=True)
    (with_nothing / "events.jsonl").write_text(lines[0])
    page = page_of(with_nothing)
    assert "No step has been finished yet" in page
    assert data_of(page) == {"charts": [], "samples": [[]]}
    assert "configuration and versions" in page


def test_a_supervised_run_shows_its_loss(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "r", num_steps=0, num_sft=40))
    assert '<p class="lead">supervised</p>' in page
    charts = [chart["id"] for chart in data_of(page)["charts"]]
    assert "sft_loss" in charts
    assert "reward" not in charts


def test_warnings_findings_and_ends_are_told_once_each(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", num_steps=1, ended=False)
    with (path / "events.jsonl").open("a") as events:
        for _ in range(3):
            events.write(json.dumps({"type": "warning", "time": 0.0, "message": "bounds <never> bind"}) + "\n")
        events.write(json.dumps({"type": "audit", "time": 0.0, "findings": ["junk is paid"]}) + "\n")
        events.write(
            json.dumps({"type": "end", "time": 1.0, "status": "failed", "seconds": 1, "message": "disk"}) + "\n"
        )
        events.write('{"type": "st')
    page = page_of(path)
    assert page.count("bounds &lt;never&gt; bind (3 times)") == 1
    assert "<li>junk is paid</li>" in page
    assert "<li>ended as failed. disk</li>" in page
    assert "the last line was cut off" in page


def test_samples_are_thinned_evenly_and_the_last_stays(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", num_steps=1, ended=False)
    with (path / "events.jsonl").open("a") as events:
        for step in range(2, 1001):
            events.write(json.dumps({"type": "samples", "time": 0.0, "step": step, "samples": []}) + "\n")
    steps = [event["step"] for event in data_of(page_of(path))["samples"][0]]
    assert len(steps) == MAX_SAMPLE_EVENTS
    assert (steps[0], steps[-1]) == (1, 1000)
    gaps = [b - a for a, b in pairwise(steps)]
    assert set(gaps) <= {5, 6}  # 999 / 199 = 5.02


def test_no_run_and_no_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run directory was given"):
        write_report([], tmp_path / "x.html")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_report([tmp_path], tmp_path / "x.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot write the report"):
        write_report([write_run(tmp_path / "r", num_steps=0)], tmp_path / "file" / "x.html")


def test_without_plotly_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"pip install 'gspo\[report\]'"):
        write_report([write_run(tmp_path / "r", num_steps=0)], tmp_path / "x.html")


def test_reports_need_no_torch() -> None:
    program = "import sys, gspo.report.html, gspo.report.terminal; print({'torch', 'plotly'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


# In a browser --------------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    profile = tmp_path_factory.mktemp("profile")

    def call(page: Path, *options: str) -> str:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += ["--hide-scrollbars", "--window-size=1366,4400", "--virtual-time-budget=10000"]
        command += [f"--user-data-dir={profile}", *options, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return call


def plots(dom: str) -> dict[str, str]:
    """The part of the document that belongs to each plot."""
    parts = re.split(r'<div class="plot[^"]*" id="plot-(\w+)"', dom)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@needs_browser
def test_chromium_draws_every_curve_and_runs_nothing_of_the_model_s(tmp_path: Path, browse: Callable[..., str]) -> None:
    runs = [
        write_run(tmp_path / "a", name="A", num_steps=8, num_sft=40),
        write_run(tmp_path / "b", name="B", num_steps=8, objective="grpo", seed=1),
    ]
    page = write_report(runs, tmp_path / "out" / "report.html")
    dom = browse(page, "--dump-dom")
    figures = {chart["id"]: chart["figure"]["traces"] for chart in data_of(page.read_text(encoding="utf-8"))["charts"]}
    drawn = plots(dom)
    assert drawn.keys() == figures.keys()
    for name, traces in figures.items():
        curves = [trace for trace in traces if trace["type"] == "scatter" and any(y is not None for y in trace["y"])]
        assert len(re.findall(r'class="trace scatter', drawn[name])) == len(curves), name
        bars = [trace for trace in traces if trace["type"] == "bar"]
        assert len(re.findall(r'class="trace bars', drawn[name])) == len(bars), name
        lines = [trace for trace in curves if trace["line"]["width"]]
        assert len(
            re.findall(r'class="js-line"[^>]* d="M[^"]+L|class="js-line"[^>]* d="M[^"]+[HVC]', drawn[name])
        ) >= len([trace for trace in lines if "lines" in trace["mode"]]), name
    assert "<title>A, B</title>" in dom  # the sample's script would have changed it
    cards = dom[dom.index('id="sample-cards"') :]
    assert cards.count("<article") == 2
    assert "&lt;script&gt;document.title" in cards
    assert "<img" not in cards
    assert "step 8</output>" in dom


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_screenshot_has_the_curves(dark: bool, tmp_path: Path, browse: Callable[..., str]) -> None:
    image = pytest.importorskip("PIL.Image")
    numpy = pytest.importorskip("numpy")
    page = write_report([write_run(tmp_path / "r", num_steps=30)], tmp_path / "report.html")
    browse(
        page, f"--screenshot={tmp_path / 'page.png'}", *(["--blink-settings=preferredColorScheme=0"] if dark else [])
    )
    pixels = numpy.asarray(image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    background = pixels[5, 5].mean()
    assert background < 60 if dark else background > 200
    # Curves reach over the width of both columns, on several charts each. Bars, at the bottom, have the colour too.
    wanted = [int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)]
    near = (numpy.abs(pixels - wanted).max(axis=2) <= 24)[:2600]
    for left, right in ((140, 640), (760, 1280)):
        assert near[:, left:right].any(axis=0).mean() > 0.9
        rows = near[:, left:right].sum(axis=1) > 0
        assert rows.sum() > 150
