"""Running a benchmark: resumed it gives the same bytes, damaged files are done again, nothing is mixed up."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.data.chat import Rendering
from gspo.errors import ConfigError, DataError, RunDirectoryError
from gspo.evals.benchmark import (
    Answer,
    Benchmark,
    Figure,
    Findings,
    Grade,
    Imported,
    Options,
    Problem,
    ProblemResult,
    SamplingProtocol,
)
from gspo.evals.frame import RESULT, SAMPLES, run
from gspo.evals.graders import IntegerGrader
from gspo.evals.result import Settings
from gspo.evals.sampling import EngineSampler, GivenSampler, ModelFacts, Sampler
from gspo.evals.store import Store, read_samples
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.rollout.base import SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine

PROBLEMS = tuple(Problem(f"sum/{i}", f"{i}+{i}=", str(2 * i), f"sums.jsonl, line {i + 1}") for i in range(6))
IMPORTED = Imported(PROBLEMS, "sums", ("six sums",))


def read(paths: Sequence[Path], options: Options) -> Imported:
    return IMPORTED


def make_grader(options: Options, imported: Imported) -> IntegerGrader:
    return IntegerGrader()


def finish(results: Sequence[ProblemResult], imported: Imported, options: Options) -> Findings:
    return Findings({"own": len(results)}, (Figure("own", "6", "results"),), notes=("done",))


SUMS = Benchmark("sums", "Sums", SamplingProtocol(3, 8), read, make_grader, finish=finish)


class StoppedHereError(Exception):
    """Raised by the tests to break an evaluation off."""


def make_policy() -> CausalPolicy:
    return load_policy(tiny="qwen3", tiny_config={"num_hidden_layers": 1, "hidden_size": 32}, seed=1)


@pytest.fixture(scope="module")
def policy() -> CausalPolicy:
    return make_policy()


def sampler(policy: CausalPolicy, *, num_samples: int = 3, seed: int = 0, temperature: float = 1.0) -> EngineSampler:
    return EngineSampler(
        EmbeddedEngine(policy, max_slots=4),
        policy.tokenizer,
        ModelFacts("tiny", "digest-of-weights", policy.context_length),
        SamplingParams(max_new_tokens=8, temperature=temperature, stop_token_ids=policy.stop_token_ids),
        Rendering(),
        PROBLEMS,
        num_samples=num_samples,
        seed=seed,
    )


def evaluate(by: Sampler, directory: Path, **options: Any) -> dict[str, Any]:
    return run(SUMS, IMPORTED, {}, by, IntegerGrader(), directory, **options)


def given(samples: Mapping[str, Sequence[str]], num_samples: int = 0) -> GivenSampler:
    return GivenSampler(samples, PROBLEMS, num_samples)


def stop_after(calls: int) -> Callable[[], None]:
    left = [calls]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoppedHereError

    return check


# Results.


def test_what_is_written_is_what_is_returned_and_says_what_was_measured(tmp_path: Path, policy: CausalPolicy) -> None:
    result = evaluate(sampler(policy), tmp_path, settings=Settings(k=(1, 3)), facts={"files": []})
    assert json.loads((tmp_path / RESULT).read_text())["problems"] == result["problems"]
    assert [problem["id"] for problem in result["problems"]] == [problem.id for problem in PROBLEMS]
    assert (result["num_prompts"], result["num_samples"], result["name"]) == (6, 3, "sums")
    assert result["identity"].keys() == {
        "benchmark", "data", "model", "prompt template", "prompts", "protocol", "judge policy"
    }  # fmt: skip
    assert result["metrics"]["own"] == 6
    assert result["metrics"]["pass@3"] >= result["metrics"]["pass@1"]
    assert result["notes"] == ["six sums", "done"]
    assert result["protocol"]["top_p"] == 1.0
    assert sum(sum(p["verdicts"].values()) for p in result["problems"]) == 18


def test_given_answers_are_counted(tmp_path: Path) -> None:
    samples = {
        f"sum/{i}": [f"\\boxed{{{2 * i}}}", "\\boxed{999}", "I cannot say", f"\\boxed{{{2 * i}}}"] for i in range(6)
    }
    metrics = evaluate(given(samples), tmp_path)["metrics"]
    assert metrics["pass@1"] == 0.5
    assert metrics["unanswered_fraction"] == 0.25
    assert (metrics["unscored_fraction"], metrics["missing_fraction"]) == (0.0, 0.0)
    assert "truncated_fraction" not in metrics  # nobody knows
    # all rates are equal, so problems do not spread; each has p (1 - p) / (n - 1) = 1/4 / 3; six of them, over 6^2
    assert metrics["pass@1/standard_error"] == 0.0
    assert metrics["pass@1/measurement_error"] == pytest.approx((6 * 0.25 / 3) ** 0.5 / 6)


def test_missing_cells_are_said_and_bounded(tmp_path: Path) -> None:
    samples = {f"sum/{i}": [f"\\boxed{{{2 * i}}}", "\\boxed{999}"] for i in range(4)} | {"sum/4": ["\\boxed{8}"]}
    result = evaluate(given(samples), tmp_path)
    metrics = result["metrics"]
    # 12 cells, 9 there; rates of the problems that have any: 1/2 four times and 1
    assert metrics["missing_fraction"] == pytest.approx(3 / 12)
    assert metrics["unscored_fraction"] == 0.0
    assert metrics["pass@1"] == pytest.approx((4 * 0.5 + 1) / 5)
    assert metrics["pass@1/if_unscored_wrong"] == pytest.approx(5 / 12)
    assert metrics["pass@1/if_unscored_right"] == pytest.approx(8 / 12)
    assert [problem["num_missing"] for problem in result["problems"]] == [0, 0, 0, 0, 1, 2]


def test_ungraded_responses_are_neither_right_nor_wrong_and_components_have_their_own_numbers(tmp_path: Path) -> None:
    class Two(IntegerGrader):
        def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
            values = {"good": 1.0, "bad": 0.0, "broken": None}
            return [Grade(values[a.text], a.text, components={"lax": 1.0}) for a in answers]

    samples = {problem.id: ["good", "bad", "broken"] for problem in PROBLEMS}
    result = run(SUMS, IMPORTED, {}, given(samples), Two(), tmp_path)
    metrics = result["metrics"]
    assert (metrics["pass@1"], metrics["lax/pass@1"]) == (0.5, 1.0)
    assert metrics["unscored_fraction"] == pytest.approx(1 / 3)
    assert (metrics["pass@1/if_unscored_wrong"], metrics["pass@1/if_unscored_right"]) == pytest.approx((1 / 3, 2 / 3))
    assert "lax/pass@1/if_unscored_wrong" not in metrics
    assert result["problems"][0]["verdicts"] == {"good": 1, "bad": 1, "broken": 1}
    assert result["problems"][0]["components"] == {"lax": [3, 3]}


def test_aborted_responses_are_not_judged(tmp_path: Path) -> None:
    samples = {
        p.id: [{"text": f"\\boxed{{{p.gold}}}", "stop_reason": "aborted"}, f"\\boxed{{{p.gold}}}"] for p in PROBLEMS
    }
    metrics = evaluate(given(samples), tmp_path)["metrics"]  # type: ignore[arg-type]
    assert (metrics["pass@1"], metrics["unscored_fraction"]) == (1.0, 0.5)


def test_k_above_the_samples_is_refused_before_anything_is_sampled(tmp_path: Path, policy: CausalPolicy) -> None:
    with pytest.raises(ConfigError, match="pass@4 needs at least 4 samples per problem and there are 3"):
        evaluate(sampler(policy), tmp_path / "new", settings=Settings(k=(4,)))
    assert not (tmp_path / "new").exists()


# Going on.


@pytest.mark.parametrize("calls", [0, 1, 4, 11, 18, 19])
def test_a_stopped_evaluation_goes_on_to_the_same_bytes(tmp_path: Path, policy: CausalPolicy, calls: int) -> None:
    whole = tmp_path / "whole"
    evaluate(sampler(policy), whole)
    part = tmp_path / "part"
    with pytest.raises(StoppedHereError):
        evaluate(sampler(policy), part, check_stop=stop_after(calls))
    assert not (part / RESULT).exists()
    evaluate(sampler(policy), part)
    assert (part / RESULT).read_bytes() == (whole / RESULT).read_bytes()


def die_at(call: int, part: str) -> None:
    """Run by a process of its own: it kills itself when it is asked for the so-manieth time whether to stop."""
    count = itertools.count(1)

    def kill() -> None:
        if next(count) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    evaluate(sampler(make_policy()), Path(part), check_stop=kill)


def test_a_killed_process_loses_only_unfinished_problems(tmp_path: Path, policy: CausalPolicy) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    evaluate(sampler(policy), whole)
    code = f"from tests.evals.test_frame import die_at; die_at(10, {str(part)!r})"
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=300)
    assert killed.returncode == -signal.SIGKILL
    kept = [line for line in (part / SAMPLES).read_text().splitlines() if '"id"' in line]
    assert 0 < len(kept) < 6
    asked: list[str] = []

    class Watched(EngineSampler):
        def sample(self, problems: Sequence[Problem], *args: Any) -> None:
            asked.extend(problem.id for problem in problems)
            super().sample(problems, *args)

    again = sampler(policy)
    again.__class__ = Watched
    evaluate(again, part)
    assert len(asked) == 6 - len(kept)
    assert (part / RESULT).read_bytes() == (whole / RESULT).read_bytes()


@pytest.mark.parametrize("name", ["samples.jsonl", "grades.jsonl"])
@pytest.mark.parametrize("harm", ["torn", "flipped", "not json"])
def test_damage_is_said_and_done_again(tmp_path: Path, policy: CausalPolicy, name: str, harm: str) -> None:
    evaluate(sampler(policy), tmp_path)
    before = (tmp_path / RESULT).read_bytes()
    lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
    harmed = {"torn": lines[3][:40], "flipped": lines[3].replace(b'"id"', b'"iD"', 1), "not json": b"\x00\x01\n"}[harm]
    (tmp_path / name).write_bytes(b"".join(lines[:3]) + harmed + (b"" if harm == "torn" else b"".join(lines[4:])))
    warnings: list[str] = []
    evaluate(sampler(policy), tmp_path, warn=warnings.append)
    assert [f"{name}, line 4" in warning for warning in warnings] == [True]
    assert (tmp_path / RESULT).read_bytes() == before


def test_what_is_complete_is_not_sampled_or_judged_again(tmp_path: Path, policy: CausalPolicy) -> None:
    evaluate(sampler(policy), tmp_path)

    class Never(IntegerGrader):
        def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
            raise AssertionError("judged again")

    class Silent(EngineSampler):
        def sample(self, *_: Any) -> None:
            raise AssertionError("sampled again")

    again = sampler(policy)
    again.__class__ = Silent
    run(SUMS, IMPORTED, {}, again, Never(), tmp_path)


def test_another_evaluation_in_the_same_directory_is_refused_and_told_apart(
    tmp_path: Path, policy: CausalPolicy
) -> None:
    evaluate(sampler(policy), tmp_path)
    with pytest.raises(RunDirectoryError, match="an evaluation with another protocol"):
        evaluate(sampler(policy, seed=1), tmp_path)
    with pytest.raises(RunDirectoryError, match="another judge policy"):
        run(SUMS, IMPORTED, {}, sampler(policy), IntegerGrader(0, 9), tmp_path)
    other = replace(IMPORTED, problems=(replace(PROBLEMS[0], gold="5"), *PROBLEMS[1:]))
    with pytest.raises(RunDirectoryError, match="another data"):
        run(SUMS, other, {}, sampler(policy), IntegerGrader(), tmp_path)


def test_two_processes_do_not_write_to_one_directory(tmp_path: Path) -> None:
    store = Store(tmp_path / SAMPLES, {})
    with pytest.raises(RunDirectoryError, match="another evaluation is writing to it"):
        Store(tmp_path / SAMPLES, {})
    store.close()
    Store(tmp_path / SAMPLES, {}).close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_text('{"id": "mine"}\n')
    with pytest.raises(RunDirectoryError, match="is not a file of gspo eval"):
        Store(tmp_path / SAMPLES, {})
    assert (tmp_path / SAMPLES).read_text() == '{"id": "mine"}\n'


def test_a_first_line_cut_off_is_written_again(tmp_path: Path) -> None:
    Store(tmp_path / SAMPLES, {"data": "x"}).close()
    whole = (tmp_path / SAMPLES).read_bytes()
    (tmp_path / SAMPLES).write_bytes(whole[:14])
    warnings: list[str] = []
    Store(tmp_path / SAMPLES, {"data": "x"}, warnings.append).close()
    assert (tmp_path / SAMPLES).read_bytes() == whole
    assert len(warnings) == 1


# Samplers.


def test_answers_depend_on_seed_problem_and_sample_only(policy: CausalPolicy) -> None:
    def answers(problems: Sequence[Problem], seed: int = 0) -> dict[str, tuple[Answer, ...]]:
        found: dict[str, tuple[Answer, ...]] = {}
        sampler(policy, seed=seed).sample(problems, lambda p, group: found.__setitem__(p.id, group), lambda: None)
        return found

    everything = answers(PROBLEMS)
    assert len({answer.text for group in everything.values() for answer in group}) > 6
    assert answers(PROBLEMS[4:2:-1]) == {name: everything[name] for name in ("sum/4", "sum/3")}
    assert answers(PROBLEMS, seed=1) != everything
    assert all(answer.num_tokens == 8 or answer.stop_reason == "eos" for g in everything.values() for answer in g)


def test_a_prompt_that_leaves_no_room_is_refused_with_its_place(policy: CausalPolicy) -> None:
    with pytest.raises(DataError, match=r"sums\.jsonl, line 1: the prompt has \d+ tokens .* lower --max-new-tokens to"):
        EngineSampler(
            EmbeddedEngine(policy),
            policy.tokenizer,
            ModelFacts("tiny", "", policy.context_length),
            SamplingParams(max_new_tokens=policy.context_length),
            Rendering(),
            PROBLEMS,
            num_samples=1,
        )


def test_samples_are_read_in_each_form(tmp_path: Path, policy: CausalPolicy) -> None:
    lines = [
        {"id": "sum/0", "responses": ["a", "b"]},
        {"id": "sum/1", "response": "c"},
        {"id": "sum/1", "response": "d"},
    ]
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_samples(path) == {"sum/0": ["a", "b"], "sum/1": ["c", "d"]}
    first = evaluate(sampler(policy), tmp_path / "first")
    stored = read_samples(tmp_path / "first" / SAMPLES)
    again = evaluate(given(stored), tmp_path / "again")  # type: ignore[arg-type]
    assert again["problems"] == first["problems"]
    for line, sentence in (
        ({"responses": ["a"]}, r"line 1, column 'id': is missing"),
        ({"id": "sum/0", "responses": "a"}, r"line 1, column 'responses': must be a list"),
        ({"id": "sum/0", "responses": [3]}, r"must be a list"),
        ({"id": "sum/0", "answers": [], "check": "0"}, r"was changed or damaged"),
    ):
        path.write_text(json.dumps(line))
        with pytest.raises(DataError, match=sentence):
            read_samples(path)


def test_samples_of_other_problems_are_refused() -> None:
    with pytest.raises(DataError, match=r"'sum/9', which is no problem of this benchmark .*'sum/0'"):
        given({"sum/9": ["a"]})
    with pytest.raises(DataError, match="hold no response"):
        given({"sum/1": []})
    with pytest.raises(DataError, match="'sum/1' has 3 responses, more than --num-samples 2"):
        given({"sum/1": ["a", "b", "c"]}, 2)


def test_options_and_data_are_checked_by_the_frame(tmp_path: Path) -> None:
    for options, paths, sentence in (
        ({"x": "1"}, [tmp_path], r"benchmark 'sums' has no option 'x'; it has none"),
        ({}, [], r"benchmark 'sums' needs its data"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            SUMS.load(paths, options)
    with pytest.raises(ConfigError, match="comes with its problems"):
        replace(SUMS, needs_data=False).load([tmp_path], {})
    twice = replace(SUMS, read=lambda paths, options: Imported((PROBLEMS[0], PROBLEMS[0]), "x"))
    with pytest.raises(DataError, match=r"has the id 'sum/0', which sums\.jsonl, line 1 has too"):
        twice.load([tmp_path], {})
    with pytest.raises(DataError, match="hold no problem"):
        replace(SUMS, read=lambda paths, options: Imported((), "x")).load([tmp_path], {})
