"""Broken data files: ``gspo check`` names each broken row, exit status 2. What is unusual but right is left alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gspo.cli import main
from gspo.config.data_files import MAX_NAMED

GOOD = b'{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'
#: Line 4 is the key that names the file; the reward is put in.
RECIPE = """[model]
tiny = "qwen3"
[data]
path = "{file}"
[rollout]
prompts_per_step = 2
[[reward.functions]]
name = "{reward}"
"""


class Broken(NamedTuple):
    """A file and what is said of it: each part in one sentence of the report, in order."""

    name: str
    content: bytes
    parts: list[str]
    reward: str = "number"
    file: str = "d.jsonl"
    more: str = ""  # at the end of the recipe
    key: str = "data.path"
    line: int = 4


def rows(*values: dict[str, object]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def problem(tests: object, number: int = 0) -> dict[str, object]:
    return {"prompt": f"Write program {number}.", "answer": {"tests": tests}}


BROKEN = [
    Broken("last line cut off", GOOD + b'{"prompt": "3+', ["d.jsonl, line 3", "the last line seems to be cut off"]),
    Broken("NUL bytes", GOOD + b'{"prompt": "\x00\x00"}\n', ["d.jsonl, line 3: holds a NUL byte at column 13"]),
    Broken("not UTF-8", GOOD + '{"prompt": "né", "answer": "1"}\n'.encode("latin-1"),
           ["line 3: is not UTF-8 (byte 14"]),
    Broken("UTF-16", GOOD.decode().encode("utf-16"), ["d.jsonl is not text in UTF-8 but UTF-16"]),
    Broken("gzip with the name of text", gzip.compress(GOOD), ["compressed (gzip); unpack it first"]),
    Broken("gzip by its name", gzip.compress(GOOD), ["unknown suffix '.gz'", "unpack it first"], file="d.jsonl.gz"),
    Broken("Parquet with the name of text", b"PAR1" + bytes(40), ["a Parquet file; name it .parquet"]),
    Broken("damaged Parquet", b"PAR1" + bytes(40) + b"PAR1", ["not a readable Parquet file"], file="d.parquet"),
    Broken("text with the name of Parquet", GOOD, ["not a readable Parquet file"], file="d.parquet"),
    Broken("empty", b"", ["d.jsonl has no rows"]),
    Broken("blank lines only", b"\n \r\n\n", ["d.jsonl has no rows"]),
    Broken("CSV", b"prompt,answer\n1+1=,2\n", ["unknown suffix '.csv'"], file="d.csv"),
    Broken("one array", b"[\n" + GOOD + b"]\n", ["is one JSON array; write one object per line"]),
    Broken("a list where an object is wanted", GOOD + b'["3+3=", "6"]\n', ["line 3: holds a JSON list"]),
    Broken("single quotes", GOOD + b"{'prompt': '3+3='}\n", ["line 3, column 2: is not JSON"]),
    Broken("a column twice in a row", GOOD + b'{"prompt": "1", "answer": "1", "answer": "2"}\n',
           ["names 'answer' twice"]),
    Broken("ids twice", rows({"id": 7, "prompt": "1+1=", "answer": "2"}, {"id": 7, "prompt": "2+2=", "answer": "4"}),
           ["d.jsonl:2: the id 7 is that of d.jsonl:1 too"]),
    Broken("no prompt in one row", GOOD + rows({"promt": "3+3=", "answer": "6"}),
           ["d.jsonl:3 has no column 'prompt'", "did you mean 'promt'"]),
    Broken("no prompt in any row", rows({"question": "3+3=", "answer": "6"}, {"question": "1", "answer": "6"}),
           ["d.jsonl has no column 'prompt' (it has 'question', 'answer')"], key="data.prompt_column", line=3),
    Broken("an empty prompt", GOOD + rows({"prompt": " ", "answer": "6"}), ["d.jsonl:3: the column 'prompt' is empty"]),
    Broken("a prompt that is a number", GOOD + rows({"prompt": 12, "answer": "6"}), ["d.jsonl:3", "is a int"]),
    Broken("messages that end with the answer", GOOD + rows({"prompt": [{"role": "assistant", "content": "6"}],
                                                             "answer": "6"}), ["d.jsonl:3: the messages end with"]),
    Broken("messages without content", GOOD + rows({"prompt": [{"role": "user"}], "answer": "6"}),
           ["d.jsonl:3: message 0 is not"]),
    Broken("a huge prompt", GOOD + rows({"prompt": "x" * 3_000_000, "answer": "6"}),
           ["d.jsonl:3: the prompt has 3000005 tokens, and at most 1792 leave room"]),
    Broken("no gold in one row", GOOD + rows({"prompt": "3+3="}), ["d.jsonl:3: there is no gold answer"]),
    Broken("no gold in any row", rows({"prompt": "3", "gold": "6"}, {"prompt": "4", "gold": "7"}),
           ["d.jsonl has no column 'answer' (it has 'prompt', 'gold')"], key="reward.answer_column", line=0),
    Broken("an empty gold", GOOD + rows({"prompt": "3+3=", "answer": "  "}), ["d.jsonl:3: there is no gold answer"]),
    Broken("a gold that is a list", GOOD + rows({"prompt": "3+3=", "answer": ["6"]}), ["d.jsonl:3", "is a list"]),
    Broken("a gold without a number", GOOD + rows({"prompt": "3+3=", "answer": "six"}),
           ["d.jsonl:3: the gold answer 'six' holds no number"]),
    Broken("a gold that cannot be read", GOOD + rows({"prompt": "3+3=", "answer": "\\frac{1}{"}),
           ["d.jsonl:3: the gold answer '\\\\frac{1}{' cannot be read"], reward="math"),
    Broken("a gold that its verifier rejects", GOOD + rows({"prompt": "1/0?", "answer": "\\boxed{a} or \\boxed{b}"}),
           ["d.jsonl:3: exact_match does not accept the gold answer"], reward="exact_match"),
    Broken("a problem without tests", rows(problem([["1", "2"]]), problem([], 1)),
           ["d.jsonl:2: the problem has no tests"], reward="code"),
    Broken("tests that are not pairs", rows(problem([["1", "2"]]), problem([["1"]], 1)),
           ["d.jsonl:2: 'tests' must be a list of pairs"], reward="code"),
    Broken("tests that are text, not JSON", rows(problem([["1", "2"]]), {"prompt": "b", "answer": "assert f(1) == 2"}),
           ["d.jsonl:2: the tests are not JSON"], reward="code"),
    Broken("a held-out prompt that is trained on", GOOD, ["e.jsonl:2", "d.jsonl:1 of d.jsonl is the same"],
           more='[data.eval]\npath = "e.jsonl"\n', key="data.eval.path", line=10),
    Broken("a held-out prompt that is learnt in the cold start", GOOD,
           ["e.jsonl:1", "p.jsonl:1 of p.jsonl is the same"],
           more='[data.eval]\npath = "e.jsonl"\nnum_prompts = 1\n[sft]\npath = "p.jsonl"\n', key="sft.path", line=13),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_file_is_named_with_its_row(case: Broken, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / case.file).write_bytes(case.content)
    # The first prompt of d.jsonl, laid out in another way, as a message.
    again = {"prompt": [{"role": "user", "content": "  1 + 1 = ?"}], "answer": "2"}
    other = [{"prompt": "5+5=", "answer": "10"}, again]
    (place / "e.jsonl").write_bytes(rows(*(other if "cold start" not in case.name else other[:1])))
    (place / "p.jsonl").write_bytes(rows({"prompt": "$5 + 5 =$", "response": "10"}))
    (place / "r.toml").write_text(RECIPE.format(file=case.file, reward=case.reward) + case.more)
    assert main(["check", "r.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    where = f"r.toml:{case.line}" if case.line else "r.toml"
    assert err.startswith(f"error: {where}: {case.key}: "), err
    assert err.count("\n") == 1, err
    for part in case.parts:
        assert part in err


def test_every_row_is_named_up_to_a_limit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = 30
    (place / "d.jsonl").write_bytes(GOOD + rows(*({"prompt": f"{n}+1=", "answer": "?"} for n in range(many)))
                                    + b"{\n" * 3)  # fmt: skip
    (place / "r.toml").write_text(RECIPE.format(file="d.jsonl", reward="number"))
    assert main(["check", "r.toml"]) == 2
    sentences = capsys.readouterr().err.splitlines()[1:]
    assert [f"line {number}" in text for number, text in zip((33, 34, 35), sentences[:3], strict=True)] == [True] * 3
    assert "cut off" not in sentences[2]  # the file ends with a whole line
    # Gold answers that are the same are judged once.
    assert [text.split(": ")[2] for text in sentences[3:]] == ["d.jsonl:3"]


def test_more_faults_than_are_shown_are_counted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "d.jsonl").write_bytes(GOOD + b"{\n" * 30)
    (place / "r.toml").write_text(RECIPE.format(file="d.jsonl", reward="number"))
    assert main(["check", "r.toml"]) == 2
    *named, last = capsys.readouterr().err.splitlines()[1:]
    assert len(named) == MAX_NAMED
    assert f"and {30 - MAX_NAMED} more" in last


def test_the_same_file_for_training_and_evaluation_is_read_once(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "d.jsonl").write_bytes(GOOD + b"{\n" + GOOD)
    more = '[data.eval]\npath = "./d.jsonl"\nnum_prompts = 1\n'
    (place / "r.toml").write_text(RECIPE.format(file="d.jsonl", reward="number") + more)
    assert main(["check", "r.toml"]) == 2
    found = capsys.readouterr().err
    assert "d.jsonl, line 3" in found
    assert "trained on" not in found  # those that are held out are left out of training


GOOD_FILES: dict[str, Callable[[], bytes]] = {
    "byte order mark": lambda: b"\xef\xbb\xbf" + GOOD,
    "Windows line ends": lambda: GOOD.replace(b"\n", b"\r\n"),
    "blank lines": lambda: b"\n\n" + GOOD.replace(b"\n", b"\n \n"),
    "no line end at the end": lambda: GOOD.rstrip(),
    "numbers as gold": lambda: rows({"prompt": "a", "answer": 2}, {"prompt": "b", "answer": 2.5}),
    "other columns in some rows": lambda: rows({"prompt": "a", "answer": "1", "note": "x"},
                                               {"prompt": "b", "answer": "2"}),
    "verl's form": lambda: rows(*({"prompt": [{"role": "user", "content": f"{n}?"}],
                                   "reward_model": {"ground_truth": str(n)}} for n in range(2))),
    "text and messages": lambda: rows({"prompt": "a", "answer": "1"},
                                      {"prompt": [{"role": "user", "content": "b"}], "answer": "2"}),
    "prompts twice": lambda: GOOD + GOOD,
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD_FILES)
def test_what_is_unusual_but_right_is_left_alone(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "d.jsonl").write_bytes(GOOD_FILES[name]())
    (place / "r.toml").write_text(RECIPE.format(file="d.jsonl", reward="number"))
    assert main(["check", "r.toml"]) == 0, capsys.readouterr().err
    assert "2 prompts x 8 responses" in capsys.readouterr().out


def test_a_directory_in_place_of_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "d.jsonl").mkdir()
    (place / "r.toml").write_text(RECIPE.format(file="d.jsonl", reward="number"))
    assert main(["check", "r.toml"]) == 2
    assert "r.toml:4: data.path: the directory d.jsonl holds no data" in capsys.readouterr().err


@pytest.mark.parametrize(("script", "part"), [
    (b'{"prompt_id": "d.jsonl:1", "completions": ["2"]}\n', "no completion for the prompt d.jsonl:2"),
    (b'{"prompt_id": "d.jsonl:1", "completions": []}\n', "s.jsonl:1: needs"),
    (b'{"prompt_id": "d.jsonl:1"', "s.jsonl, line 1"),
])  # fmt: skip
def test_scripts_are_read_too(script: bytes, part: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "d.jsonl").write_bytes(GOOD)
    (place / "s.jsonl").write_bytes(script)
    text = RECIPE.format(file="d.jsonl", reward="number")
    text = text.replace("[rollout]\n", '[rollout]\nengine = "scripted"\nscript = "s.jsonl"\n')
    (place / "r.toml").write_text(text)
    assert main(["check", "r.toml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: r.toml:7: rollout.script: ")
    assert part in err
