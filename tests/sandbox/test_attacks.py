"""All programs of tests/cases/attack_programs.txt get the listed verdicts, and nothing of them is left.

Each isolation is tried as root (own user id per box) and as an ordinary user.
"""

import os
import tempfile

import pytest

from gspo.errors import InputError
from gspo.sandbox import open_sandbox

from .programs import as_ordinary_user, judge_all, load_programs, survivors

PROGRAMS = load_programs()


def why_not(isolation):
    """Why an isolation does not work on this machine; empty if it does. (A test of its own says that one must.)"""
    try:
        open_sandbox(isolation)
    except InputError as error:
        return str(error)
    return ""


@pytest.fixture(
    scope="module",
    params=[("bubblewrap", False), ("bubblewrap", True), ("landlock", False), ("landlock", True)],
    ids=["bubblewrap", "bubblewrap-ordinary-user", "landlock", "landlock-ordinary-user"],
)
def judged(request):
    isolation, ordinary = request.param
    if ordinary and os.geteuid() != 0:
        pytest.skip("the tests already run as an ordinary user")
    reason = as_ordinary_user(lambda: why_not(isolation)) if ordinary else why_not(isolation)
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="gspo-attacks-") as scratch:  # pytest's own is for root only
        os.chmod(scratch, 0o777)
        said = _judge_as(ordinary, isolation, scratch)
        return said, os.listdir(scratch), survivors()


def _judge_as(ordinary, isolation, scratch):
    if ordinary:
        return as_ordinary_user(lambda: judge_all(isolation, PROGRAMS, scratch))
    return judge_all(isolation, PROGRAMS, scratch)


def test_every_program_gets_its_verdict(judged):
    said, _, _ = judged
    wrong = {case.name: said[case.name] for case in PROGRAMS if said[case.name]["verdict"] not in case.verdicts}
    assert wrong == {}
    assert len(said) == len(PROGRAMS) >= 70


def test_only_accepted_is_correct(judged):
    assert all(one["correct"] is (one["verdict"] == "accepted") for one in judged[0].values())


def test_nothing_survives(judged):
    _, files, processes = judged
    assert files == []
    assert processes == []


def test_all_thirty_attacks_are_there():
    numbers = {case.name.split()[1] for case in PROGRAMS}
    assert {f"{number:02d}" for number in range(1, 31)} <= numbers
    assert sum(case.name.split()[1] == "honest" for case in PROGRAMS) >= 12
