"""Rows of made-up problems in the form of LiveCodeBench's files."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUM = (("2\n1 2\n", "3\n"), ("1\n5\n", "5"))
SCALE = (("[1, 2]\n3", "[3, 6]"), ("[]\n2", "[]"))
STARTER = "class Solution:\n    def scale(self, xs: List[int], k: int) -> List[int]:\n        "


def packed(text: str, protocol: int = 4) -> str:
    """As the files have private tests: base64 of zlib of the pickled text."""
    return base64.b64encode(zlib.compress(pickle.dumps(text, protocol))).decode()


def row(
    question_id: str,
    day: str = "2024-10-05",
    tests: Sequence[tuple[str, str]] = SUM,
    function: str = "",
    private: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A row whose first test is public and whose others are private."""
    kind = "functional" if function else "stdin"
    cases = [{"input": given, "output": expected, "testtype": kind} for given, expected in tests]
    values = {
        "question_title": f"Problem {question_id}",
        "question_content": "Print the sum." if not function else "Scale the list.",
        "platform": "leetcode" if function else "atcoder",
        "question_id": question_id,
        "contest_id": "made-up-1",
        "contest_date": f"{day}T00:00:00",
        "starter_code": STARTER if function else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": packed(json.dumps(cases[1:])) if private is None else private,
        "metadata": json.dumps({"func_name": function} if function else {}),
    }
    return {**values, **changes}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path
