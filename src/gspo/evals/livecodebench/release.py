"""Releases of LiveCodeBench, date windows, and how many problems each has.

``release_vN`` is ``test.jsonl`` and ``test2.jsonl`` to ``testN.jsonl`` together. A later release does not only go on
where an earlier one ended: v6 has problems of months that v5 had finished with, so the same window has other problems.

Windows are whole days, both ends included, by the date of ``contest_date``; its time of day is not looked at. A month
stands for all its days: ``2024-10`` to ``2025-02`` is 2024-10-01 to 2025-02-28.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass
from datetime import date

from gspo.errors import ConfigError

#: Problems in each release (README of github.com/LiveCodeBench/LiveCodeBench), and so in the file it adds.
RELEASES = {"v1": 400, "v2": 511, "v3": 612, "v4": 713, "v5": 880, "v6": 1055}
#: Problems in windows that results are published for: (release, first month, last month). The counts of NeMo-Skills'
#: data preparation (nemo_skills/dataset/livecodebench/prepare.py) and of redlite's.
WINDOWS = {
    ("v5", "2024-07", "2024-12"): 315,
    ("v5", "2024-08", "2025-02"): 279,
    ("v5", "2024-10", "2025-02"): 166,
    ("v5", "2024-10", "2025-04"): 166,
    ("v6", "2024-08", "2025-02"): 374,
    ("v6", "2024-08", "2025-05"): 454,
    ("v6", "2024-10", "2025-02"): 261,
    ("v6", "2024-10", "2025-04"): 341,
}
DEFAULT_RELEASE, DEFAULT_FIRST, DEFAULT_LAST = "v5", "2024-10", "2025-02"
_DAY = re.compile(r"(\d{4})-(\d{2})(?:-(\d{2}))?")


@dataclass(frozen=True)
class Window:
    """Days from ``first`` to ``last``, both included.

    >>> str(make_window("2024-10", "2025-02"))
    '2024-10-01 to 2025-02-28'
    """

    first: date
    last: date

    def holds(self, day: date) -> bool:
        return self.first <= day <= self.last

    def __str__(self) -> str:
        return f"{self.first.isoformat()} to {self.last.isoformat()}"


def make_window(first: str, last: str) -> Window:
    """A window from two months (``2024-10``) or days (``2024-10-05``).

    Raises:
        ConfigError: neither, a day that there is not, or an end before the start.
    """
    window = Window(_day(first, end=False), _day(last, end=True))
    if window.last < window.first:
        raise ConfigError(f"the window {window} ends before it starts")
    return window


def _day(text: str, end: bool) -> date:
    match = _DAY.fullmatch(text)
    try:
        if match is None:
            raise ValueError("not of the form YYYY-MM or YYYY-MM-DD")
        year, month = int(match[1]), int(match[2])
        return date(year, month, int(match[3] or (calendar.monthrange(year, month)[1] if end else 1)))
    except (ValueError, calendar.IllegalMonthError) as error:
        raise ConfigError(f"{text!r} is no date of a window ({error}); write 2024-10 or 2024-10-05") from error


def check_release(text: str) -> str:
    """``v5`` from ``v5`` or ``release_v5``.

    Raises:
        ConfigError: there is no such release.
    """
    name = text.removeprefix("release_")
    if name not in RELEASES:
        raise ConfigError(f"there is no release {text!r}; there are {', '.join(RELEASES)} (of code_generation_lite)")
    return name


def release_files(release: str) -> list[str]:
    """Names of the files that make a release.

    >>> release_files("v3")
    ['test.jsonl', 'test2.jsonl', 'test3.jsonl']
    """
    number = list(RELEASES).index(release) + 1
    return ["test.jsonl", *(f"test{k}.jsonl" for k in range(2, number + 1))]


def expected_count(release: str, window: Window) -> int | None:
    """How many problems a window has, where that is known; a window around all months has the whole release."""
    for (name, first, last), count in WINDOWS.items():
        if name == release and make_window(first, last) == window:
            return count
    return None


def explain_count(release: str, window: Window, found: int, expected: int) -> str:
    """Why a count may be wrong: in another release the window has as many, or rows are missing."""
    others = [name for name in RELEASES if name != release and expected_count(name, window) == found]
    said = f"the window {window} of release_{release} has {expected} problems and these files have {found} in it"
    if others:
        return f"{said}: that is release_{others[0]}; add --option release={others[0]}, or leave its files out"
    if found > expected:
        return f"{said}; they hold more than release_{release} ({', '.join(release_files(release))})"
    return f"{said}; release_{release} is {', '.join(release_files(release))}, are all of them there and whole?"
