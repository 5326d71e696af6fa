"""The pages of a study, and judging again from results.json alone."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from gspo.errors import DataError
from gspo.study.collect import read_results, results_text
from gspo.study.figures import draw
from gspo.study.judge import judge
from gspo.study.load import LoadedStudy
from gspo.study.page import html_page, markdown, publish_pages
from gspo.study.schema import Curve, Results
from gspo.study.svg import linear_ticks, number, svg
from tests.study.builders import results, run, study

SEEDS = range(6)


@pytest.fixture
def found() -> Results:
    runs = [
        run(arm, seed, level * float(size) ** 0.5 + seed / 100, size)
        for seed in SEEDS
        for arm, level in (("a", 2.0), ("b", 1.0))
        for size in ("1", "4")
    ]
    runs = [r.model_copy(update={"series": {"path": Curve(x=(1.0, 2.0), y=(r.scalars["score"], None))}}) for r in runs]
    return results([*runs, *(run("plain", seed, 0.1) for seed in SEEDS)])


def test_the_markdown_says_claim_verdict_numbers_controls_and_how_to_run_it(found):
    one = study()
    text = markdown(one, found, judge(one, found), [])
    assert "**Verdict: supported**" in text
    assert "arXiv" not in text  # only what the file says
    assert "1.5 [1.5, 1.5]" in text  # a - b is sqrt(1) and sqrt(4) on every seed
    assert "0.016 (0.016)" in text  # 1 / 64
    assert "6 of 6" in text
    assert "the control is low: 0.1, at most 0.5 needed: passed" in text
    assert "gspo study run made-up" in text
    rows = [line for line in text.splitlines() if line.startswith("| arm A")]
    assert [row.split(" | ")[:2] for row in rows] == [["| arm A, size 1", "6"], ["| arm A, size 4", "6"]]
    assert [float(row.split(" | ")[2]) for row in rows] == pytest.approx([2.025, 4.025], abs=0.0051)
    assert text.index("sizes 1 to 4 were tried") > text.index("Run it again")


def test_every_figure_is_drawn_as_xml_with_all_its_values_inside(found):
    one = study()
    for figure in one.figures:
        root = ET.fromstring(svg(draw(one, found, figure, {})))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        places = [
            (float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter("{http://www.w3.org/2000/svg}circle")
        ]
        assert places
        assert all(0 < x < width and 0 < y < height for x, y in places)


def test_points_are_means_over_seeds_at_the_levels(found):
    one = study()
    points = next(figure for figure in one.figures if figure.id == "points")
    first, second = draw(one, found, points, {}).lines
    assert [x for x, _ in first.points] == [1.0, 4.0]
    assert [y for _, y in first.points] == pytest.approx([2.025, 4.025])  # seeds add 0 to 0.05
    assert [y for _, y in second.points] == pytest.approx([1.025, 2.025])
    assert all(low < y < high for (_, y), (low, high) in zip(first.points, first.bars, strict=True))


def test_a_measure_on_the_x_axis_joins_the_levels_of_an_arm(found):
    [figure] = [figure for figure in study().figures if figure.id == "points"]
    lines = draw(study(), found, figure.model_copy(update={"x": "score", "log_x": False}), {}).lines
    assert [line.label for line in lines] == ["arm A", "arm B"]
    # Arm A has 2 * sqrt(1) and 2 * sqrt(4), each plus the mean of 0 ... 0.05 over seeds; x and y are the same here.
    assert [point for line in lines for point in line.points] == [
        (pytest.approx(y), pytest.approx(y)) for y in (2.025, 4.025, 1.025, 2.025)
    ]


def test_excluded_seeds_are_not_drawn(found):
    one = study()
    strip = next(figure for figure in one.figures if figure.id == "strip")
    with_all, without = draw(one, found, strip, {}), draw(one, found, strip, {5: "reason"})
    assert sum(len(line.dots) for line in with_all.lines) == 30
    assert sum(len(line.dots) for line in without.lines) == 25


def test_the_same_results_give_the_same_bytes(found):
    one = study()
    figure = one.figures[1]
    assert svg(draw(one, found, figure, {})) == svg(draw(one, found, figure, {}))
    assert markdown(one, found, judge(one, found), []) == markdown(one, found, judge(one, found), [])


def test_a_log_axis_leaves_out_what_has_no_place_on_it(found):
    one = study(figures=[{**study().figures[0].model_dump(), "log_y": True}])
    zero = found.model_copy(update={"runs": (run("a", 0, 0.0, "1"), *found.runs[1:])})
    assert sum(len(line.dots) for line in draw(one, zero, one.figures[0], {}).lines) == 29


def test_ticks_are_round_and_few():
    assert linear_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert linear_ticks(-3.0, 14.0) == [0.0, 5.0, 10.0]
    assert [number(v) for v in (0.0, 3e-4, -2.5, 12345.0)] == ["0", "3e-4", "-2.5", "12345"]


def test_the_html_page_is_whole_and_runs_nothing_foreign(found):
    page = html_page(study(), found)
    assert page.count("<h1>") == 1
    assert "supported" in page
    assert "script-src 'sha256-" in page
    assert not re.search(r'(src|href)="https?:', page.partition("<script>")[0])  # plotly's source has addresses
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', page).group(1))
    assert [chart["id"] for chart in data["charts"]] == ["strip", "points", "path"]


def test_published_results_are_judged_again_to_the_same_verdict(found, tmp_path):
    one = study()
    page = publish_pages(one, found, tmp_path)
    assert page.read_text().startswith("# A made-up study")
    assert {path.name for path in (tmp_path / "made-up").iterdir()} == {
        "strip.svg",
        "points.svg",
        "path.svg",
        "results.json",
    }
    loaded = LoadedStudy(one, tmp_path / "made-up.toml", "d")
    again = read_results(tmp_path / "made-up" / "results.json", loaded)
    assert markdown(one, again, judge(one, again), []) == markdown(one, found, judge(one, found), [])


def test_results_of_another_version_of_the_file_are_refused(found, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(results_text(found))
    with pytest.raises(DataError, match="must be judged by the file"):
        read_results(path, LoadedStudy(study(), tmp_path / "made-up.toml", "another"))
    path.write_text("{}")
    with pytest.raises(DataError, match="cannot be read as results"):
        read_results(path, LoadedStudy(study(), tmp_path / "made-up.toml", "d"))


def test_infinite_ends_of_an_interval_are_shown_as_unknown():
    lone = results([run("a", 0, 2.0, "1"), run("b", 0, 1.0, "1"), run("plain", 0, 0.0)])
    assert "1 [?, ?]" in markdown(study(seeds=[0]), lone, judge(study(seeds=[0]), lone), [])
