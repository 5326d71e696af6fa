"""AIME 2024: the known layouts, and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import ConfigError, DataError
from gspo.evals.aime import AIME24, INSTRUCTION
from gspo.evals.benchmark import Imported
from tests.evals.test_tables import parquet

Row = dict[str, Any]


def h4(i: int) -> Row:
    url = (
        f"https://artofproblemsolving.com/wiki/index.php/2024_AIME_{'I' * (1 + i // 15)}_Problems/Problem_{i % 15 + 1}"
    )
    return {"id": 60 + i, "problem": f"Find {i}.", "solution": "..", "answer": f"{i:03d}", "url": url, "year": "2024"}


def maxwell(i: int) -> Row:
    name = f"2024-{'I' * (1 + i // 15)}-{i % 15 + 1}"
    return {"ID": name, "Problem": f"Find {i}.", "Solution": "..", "Answer": i}


def matharena(i: int) -> Row:
    return {"problem_idx": i % 15 + 1, "problem": f"Find {i}.", "answer": i}


def nemo(i: int) -> Row:
    return {"id": f"aime24-{i}", "problem": f"Find {i}.", "expected_answer": str(i), "reference_solution": ".."}


def verl(i: int) -> Row:
    return {
        "data_source": "aime",
        "prompt": [{"role": "user", "content": f"Find {i}. Answer last."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i), "style": "rule"},
        "extra_info": {"index": i},
    }


LAYOUTS: dict[str, tuple[Callable[[int], Row], str]] = {
    "HuggingFaceH4": (h4, "60"),
    "Maxwell-Jia": (maxwell, "2024-I-1"),
    "NeMo-Skills": (nemo, "aime24-0"),
    "verl": (verl, "1"),
}


def jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def load(*paths: Path, **options: str) -> Imported:
    return AIME24.load(list(paths), options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_layouts_are_known_and_said(tmp_path: Path, layout: str, form: str) -> None:
    make, first_id = LAYOUTS[layout]
    rows = [make(i) for i in range(30)]
    path = tmp_path / f"aime.{form}"
    if form == "parquet":
        parquet(path, rows)
    elif form == "json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        jsonl(path, rows)
    found = load(path)
    assert found.layout == layout
    assert found.notes[0].startswith(f"layout {layout}: problem from ")
    assert found.problems[0].id == first_id
    assert [problem.gold for problem in found.problems] == [str(i) for i in range(30)]
    expected = ({"role": "user", "content": "Find 7. Answer last."},) if layout == "verl" else "Find 7."
    assert found.problems[7].prompt == expected


def test_csv_of_the_same_columns_is_read(tmp_path: Path) -> None:
    path = tmp_path / "aime.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(maxwell(0)))
        writer.writeheader()
        writer.writerows(maxwell(i) for i in range(30))
    assert [problem.gold for problem in load(path).problems] == [str(i) for i in range(30)]


def test_the_same_problems_have_the_same_digest_whatever_the_form(tmp_path: Path) -> None:
    rows = [nemo(i) for i in range(30)]
    one, two = jsonl(tmp_path / "a.jsonl", rows), parquet(tmp_path / "b.parquet", rows)
    assert load(one).digest == load(two).digest
    rows[3]["expected_answer"] = "999"
    assert load(jsonl(tmp_path / "c.jsonl", rows)).digest != load(one).digest


def test_repeated_rows_are_problems_once_and_that_is_said(tmp_path: Path) -> None:
    rows = [verl(i) for _ in range(32) for i in range(30)]
    found = load(jsonl(tmp_path / "a.jsonl", rows))
    assert len(found.problems) == 30
    assert "960 rows are 30 problems, each 32 times; every problem is kept once" in found.notes
    uneven = load(jsonl(tmp_path / "b.jsonl", [*rows, verl(4)]))
    assert "961 rows are 30 problems, 32 to 33 times each; every problem is kept once" in uneven.notes


def test_one_problem_with_two_answers_is_refused_with_both_places(tmp_path: Path) -> None:
    rows = [nemo(i) for i in range(30)]
    rows.append(rows[4] | {"id": "again", "expected_answer": "17"})
    with pytest.raises(DataError, match=r"a\.jsonl, line 31: has the same problem as a\.jsonl, line 5 .*17 and 4"):
        load(jsonl(tmp_path / "a.jsonl", rows))


def test_two_contests_in_two_files_are_told_apart(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "I.jsonl", [matharena(i) for i in range(15)])
    two = jsonl(tmp_path / "II.jsonl", [matharena(i) for i in range(15, 30)])
    found = load(one, two)
    assert found.layout == "MathArena"
    assert [p.id for p in found.problems] == [f"1/{i}" for i in range(1, 16)] + [f"2/{i}" for i in range(1, 16)]
    with pytest.raises(DataError, match=r"hold 15 problems and AIME 2024 has 30; 15 is one of its two contests"):
        load(one)
    allowed = load(one, num_problems="15")
    assert [p.id for p in allowed.problems] == [str(i) for i in range(1, 16)]


@pytest.mark.parametrize(
    ("count", "sentence"), [(90, "90 is the set of AIME 2022 to 2024"), (29, "num_problems=29"), (60, "two years")]
)
def test_other_counts_are_refused_and_explained(tmp_path: Path, count: int, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        load(jsonl(tmp_path / "a.jsonl", [nemo(i) for i in range(count)]))


def test_the_named_count_must_be_right_too(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [nemo(i) for i in range(29)])
    assert len(load(path, num_problems="29").problems) == 29
    with pytest.raises(DataError, match="hold 29 problems, and --option num_problems says 28"):
        load(path, num_problems="28")
    with pytest.raises(ConfigError, match="num_problems=few: a whole number"):
        load(path, num_problems="few")
    with pytest.raises(ConfigError, match=r"no option 'num_problem'; did you mean 'num_problems'\?"):
        load(path, num_problem="28")


@pytest.mark.parametrize("answer", ["1000", "-1", "33.5", "33/2", "x", True, "", None, [3], 33.5])
def test_answers_that_are_no_integers_up_to_999_are_refused(tmp_path: Path, answer: object) -> None:
    rows = [nemo(i) for i in range(30)]
    rows[11]["expected_answer"] = answer
    with pytest.raises(DataError, match=r"a\.jsonl, line 12(: has no column|, column) 'expected_answer'"):
        load(jsonl(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize(("answer", "gold"), [("025", "25"), (25, "25"), (25.0, "25"), ("000", "0"), (" 7 ", "7")])
def test_leading_zeros_and_whole_floats_are_integers(tmp_path: Path, answer: object, gold: str) -> None:
    rows = [nemo(i) for i in range(30)]
    rows[11]["expected_answer"] = answer
    assert load(jsonl(tmp_path / "a.jsonl", rows)).problems[11].gold == gold


def test_rows_of_other_years_are_refused(tmp_path: Path) -> None:
    rows = [h4(i) for i in range(30)]
    rows[2]["year"] = "2023"
    with pytest.raises(DataError, match=r"a\.jsonl, line 3, column 'year': is of 2023"):
        load(jsonl(tmp_path / "a.jsonl", rows))
    rows = [h4(i) for i in range(30)]
    for row in rows:
        del row["year"]  # as in the set it was taken from; the address tells the year
    rows[5]["url"] = rows[5]["url"].replace("2024", "2022")
    with pytest.raises(DataError, match=r"a\.jsonl, line 6, column 'url': is of 2022"):
        load(jsonl(tmp_path / "a.jsonl", rows))


def test_unknown_layouts_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"line 1: the columns 'question', 'solution' are of no known layout.*MathArena"
    ):
        load(jsonl(tmp_path / "a.jsonl", [{"question": "q", "solution": "s"}]))


def test_a_row_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    rows = [nemo(i) for i in range(30)]
    del rows[8]["problem"]
    with pytest.raises(DataError, match=r"a\.jsonl, line 9: has no column 'problem'"):
        load(jsonl(tmp_path / "a.jsonl", rows))


def test_the_protocol_is_the_paper_s() -> None:
    assert AIME24.protocol.num_samples == 32
    assert AIME24.protocol.instruction == INSTRUCTION
    assert "\\boxed{}" in INSTRUCTION
    with pytest.raises(ConfigError, match="needs its data: --data FILE"):
        load()
