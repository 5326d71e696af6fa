"""Problems with known faults in their tests.

Source: ERRATA.md of github.com/LiveCodeBench/LiveCodeBench (commit 6ebcdda4d51ed492e89fd8cad60defa912465309), which
names contest problems by their slug. In the data a problem has ``question_title`` and ``question_id``: AtCoder's slugs
are the ids, LeetCode's are the titles in lower case with hyphens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

SOURCE: Final = "github.com/LiveCodeBench/LiveCodeBench, ERRATA.md, commit 6ebcdda4"
_SEVERAL = "several outputs are right, the tests accept one"
_INTERACTIVE = "interactive; no program can pass"
#: Slug to fault.
ERRATA: Final[Mapping[str, str]] = {
    "abc311_c": _SEVERAL,
    "abc326_d": _SEVERAL,
    "abc327_b": _SEVERAL,
    "abc333_e": _SEVERAL,
    "abc343_e": _SEVERAL,
    "abc362_c": _SEVERAL,
    "find-words-containing-character": _SEVERAL,
    "find-the-peaks": _SEVERAL,
    "generate-binary-strings-without-adjacent-zeros": _SEVERAL,
    "abc337_e": _INTERACTIVE,
    "abc355_e": _INTERACTIVE,
    "abc350_c": "wrong tests",
    "apply-operations-to-make-string-empty": "a test with an empty string",
    "most-frequent-ids": "a test outside the constraints",
}


def fault_of(question_id: str, title: str) -> str:
    """What is known to be wrong with the tests of a problem; empty if nothing is.

    >>> fault_of("abc350_c", "Sort"), fault_of("3227", "Find the Peaks"), fault_of("abc350_d", "New Friends")
    ('wrong tests', 'several outputs are right, the tests accept one', '')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return ERRATA.get(question_id) or ERRATA.get(slug, "")
