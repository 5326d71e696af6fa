import json

import pytest

from gspo.cli import main

SUM = json.dumps({"tests": [["1 2", "3"]]})


def line(capsys, *words):
    status = main(["grade", *words, "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return status, json.loads(out)


@pytest.mark.parametrize(
    ("words", "correct", "rung"),
    [
        (["--gold", "\\frac{1}{2}", "--response", "So \\boxed{0.5}."], True, "rational"),
        (["--gold", "-5", "--response", "-5"], True, "identical"),
        (["--gold", "5", "--response", "\\boxed{9^{9^{9^9}}}"], False, "size"),
        (["--gold", "5", "--response", ""], False, "extraction"),
        (["--verifier", "number", "--gold", "1000", "--response", "1,000"], True, "number"),
        (["--verifier", "exact_match", "--gold", "a", "--response", "b"], False, "exact"),
    ],
)
def test_verdict_and_rung(words, correct, rung, capsys):
    status, said = line(capsys, *words)
    assert (status, said["correct"], said["rung"]) == (0, correct, rung)
    assert set(said) == {"correct", "rung", "reason"}
    assert not said["reason"].startswith(f"{rung}: ")


def test_an_unreadable_gold_answer_is_not_judged(capsys):
    status, said = line(capsys, "--gold", "no number here", "--response", "5")
    assert (status, said["correct"], said["rung"]) == (2, None, "gold")


def test_a_verifier_that_runs_into_the_limit(capsys, monkeypatch):
    """A limit so short that the first answer is late; whether the gold answer can be read decides what that means."""
    from gspo.rewards.pool import VerifierPool
    from gspo.rewards.verdict import Verdict

    def late(self, function, items, options=None):
        if function.endswith(":verify"):
            return [Verdict(None, 1.0, "ran into the limit of 1 s", timed_out=True)]
        return [Verdict(items[0][0] == "5", 0.0)]

    monkeypatch.setattr(VerifierPool, "run", late)
    assert line(capsys, "--gold", "5", "--response", "5") == (
        0,
        {"correct": False, "rung": "limit", "reason": "ran into the limit of 1 s"},
    )
    assert line(capsys, "--gold", "x", "--response", "5")[1]["correct"] is None


def test_for_people(capsys):
    assert main(["grade", "--gold", "7", "--response", "07"]) == 0
    assert capsys.readouterr().out == "right\nrung:   integer\nreason: '07' against '7'\n"


def test_files(tmp_path, capsys):
    (tmp_path / "gold").write_text("7")
    (tmp_path / "response").write_text("It is 7.")
    status, said = line(capsys, "--gold-file", str(tmp_path / "gold"), "--response-file", str(tmp_path / "response"))
    assert (status, said["correct"]) == (0, True)


def test_programs(capsys):
    words = ["--verifier", "code", "--gold", SUM, "--response", "print(sum(map(int, input().split())))"]
    status = main(["grade", *words, "--json"])
    captured = capsys.readouterr()
    if "no isolation works" in captured.err:
        pytest.skip(captured.err)
    assert status == 0
    assert json.loads(captured.out) == {"correct": True, "rung": "accepted", "reason": "1 of 1 tests passed"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gold", "5"], "either --response TEXT or --response-file"),
        (["--gold", "5", "--gold-file", "x", "--response", "5"], "either --gold TEXT or --gold-file"),
        (["--gold-file", "/nowhere", "--response", "5"], "--gold-file /nowhere cannot be read"),
        (["--gold", "5", "--response", "5", "--verifier", "maths"], "no verifier 'maths'; there are math"),
        (["--gold", "5", "--response", "5", "--timeout-s", "0"], "must be a positive number"),
        (["--gold", "5", "--respons", "5"], "did you mean --response"),
    ],
)
def test_wrong_input_is_one_sentence(words, message, capsys):
    assert main(["grade", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
