"""An own user id for each box, where the judge is root: process limits do not bind user 0."""

from __future__ import annotations

import os

_FIRST_WIDE, _PER_PROCESS, _PROCESSES = 1_900_000_000, 256, 4_194_304
_FIRST_NARROW = 20_000


def box_user(slot: int) -> int | None:
    """The user (and group) id of a slot of this process; None if the judge is not root.

    Where all ids are mapped they are far above those of people, and different for each judging process. In a
    container with 65,536 ids or so, two judging processes may share one.
    """
    if os.geteuid() != 0:
        return None
    if _mapped_ids() > _FIRST_WIDE + _PER_PROCESS * _PROCESSES:
        return _FIRST_WIDE + os.getpid() % _PROCESSES * _PER_PROCESS + slot
    return _FIRST_NARROW + (os.getpid() * _PER_PROCESS + slot) % 40_000


def _mapped_ids() -> int:
    """How many ids, from 0 on, this user namespace knows."""
    with open("/proc/self/uid_map") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    return next((count for inside, _, count in extents if inside == 0), 0)
