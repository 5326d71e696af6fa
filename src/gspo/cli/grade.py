"""``gspo grade``: what a verifier says of one response, and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gspo.errors import DataError, InputError
from gspo.rewards.verdict import Judgement

VERIFIERS = ("math", "number", "exact_match", "code")
_WORDS = {True: "right", False: "wrong", None: "not judged"}
#: Exit status for a gold answer that cannot be read.
NOT_JUDGED = 2


def grade(
    gold: str | None,
    response: str | None,
    gold_file: Path | None,
    response_file: Path | None,
    verifier: str,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Prints verdict, rung and reason; with ``as_json`` as one line.

    Returns 0 for a verdict, whatever it is, and 2 where nothing could be judged.
    """
    gold, response = _text("gold", gold, gold_file), _text("response", response, response_file)
    if verifier not in VERIFIERS:
        raise InputError(f"there is no verifier {verifier!r}; there are {', '.join(VERIFIERS)}")
    if not timeout_s > 0:
        raise InputError(f"--timeout-s is {timeout_s}; it must be a positive number of seconds")
    judgement = _judge_program(gold, response) if verifier == "code" else _judge(verifier, gold, response, timeout_s)
    if as_json:
        said = {"correct": judgement.correct, "rung": judgement.rung, "reason": judgement.reason}
        print(json.dumps(said))
    else:
        print(f"{_WORDS[judgement.correct]}\nrung:   {judgement.rung}\nreason: {judgement.reason or '-'}")
    return NOT_JUDGED if judgement.correct is None else 0


def _text(name: str, text: str | None, path: Path | None) -> str:
    """What was given: a text, or a file (``-``: standard input), and exactly one of the two."""
    if (text is None) == (path is None):
        raise InputError(f"gspo grade needs either --{name} TEXT or --{name}-file FILE")
    if path is None:
        assert text is not None
        return text
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--{name}-file {path} cannot be read: {error}") from error


def _judge(verifier: str, gold: str, response: str, timeout_s: float) -> Judgement:
    """In a process that can be killed, as in training: a limit means wrong if the gold answer can be read."""
    from gspo.rewards.pool import VerifierPool

    module = f"gspo.rewards.{verifier}"
    with VerifierPool(1, timeout_s, preload=[module]) as pool:
        verdict = pool.run(f"{module}:verify", [(gold, response)])[0]
        if verdict.failure is None:
            return Judgement(_truth(verdict.value), verdict.rung, verdict.reason.removeprefix(f"{verdict.rung}: "))
        readable = verdict.ran_into_limit and pool.run(f"{module}:read_gold", [(gold,)])[0].value
    return Judgement(False if readable else None, "limit" if verdict.ran_into_limit else "crash", verdict.failure)


def _truth(value: bool | float | None) -> bool | None:
    return None if value is None else bool(value)


def _judge_program(gold: str, response: str) -> Judgement:
    from gspo.rewards.code import verify
    from gspo.sandbox import open_sandbox

    return verify(gold, response, open_sandbox())
