"""Who answers the problems of a benchmark: an engine with a policy, or samples that the user brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from gspo.data.chat import Rendering, render_prompt
from gspo.envs.runner import make_requests
from gspo.errors import DataError
from gspo.evals.benchmark import Answer, Problem, answer_from, digest
from gspo.rollout.base import Engine, SamplingParams
from gspo.types import Completion, Prompt

#: Called the moment all answers to a problem are there.
OnAnswers = Callable[[Problem, tuple[Answer, ...]], None]
#: Called as single responses are finished.
OnResponse = Callable[[], None]


class Sampler(Protocol):
    """Answers problems; ``identity`` says what the answers depend on, by name; ``facts`` are recorded in the result."""

    @property
    def num_samples(self) -> int: ...
    @property
    def identity(self) -> Mapping[str, str]: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...

    def sample(self, problems: Sequence[Problem], on_answers: OnAnswers, on_response: OnResponse) -> None:
        """Hands over the answers to each problem once, in any order.

        The answers to a problem do not depend on which others are asked for.
        """
        ...


@dataclass(frozen=True)
class ModelFacts:
    """Which model answers; ``digest`` is of its weights."""

    name: str
    digest: str
    context_length: int


class EngineSampler:
    """Samples with an engine; the seed of a response is named by run seed, problem and sample.

    The tokens of a response do not depend on what else is in the call (the contract of engines), so an evaluation that
    is continued with the problems that are left ends with the same answers.

    Raises:
        DataError: a prompt that cannot be rendered, or leaves no room for the response; names the problem.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        model: ModelFacts,
        params: SamplingParams,
        rendering: Rendering,
        problems: Sequence[Problem],
        *,
        num_samples: int,
        seed: int = 0,
    ) -> None:
        self.num_samples = num_samples
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._seed = seed
        room = model.context_length - params.max_new_tokens
        self._prompts = {p.id: _prompt(p, tokenizer, rendering, room, params.max_new_tokens) for p in problems}
        template = digest([getattr(tokenizer, "chat_template", None), asdict(rendering)])
        protocol = {
            "num_samples": num_samples,
            "temperature": params.temperature,
            "top_p": 1.0,  # nothing is cut off the distribution: rollout/base.py says why
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": sorted(params.stop_token_ids),
            "stop_strings": list(params.stop_strings),
            "seed": seed,
        }
        self.identity: Mapping[str, str] = {
            "model": model.digest,
            "prompt template": template,
            "prompts": digest([[key, list(prompt.token_ids)] for key, prompt in self._prompts.items()]),
            "protocol": digest(protocol),
        }
        self.facts: Mapping[str, Any] = {
            "model": asdict(model),
            "protocol": protocol,
            "template": {**asdict(rendering), "digest": template},
        }

    def sample(self, problems: Sequence[Problem], on_answers: OnAnswers, on_response: OnResponse) -> None:
        prompts = [self._prompts[problem.id] for problem in problems]
        requests = make_requests(prompts, seed=self._seed, step=0, group_size=self.num_samples, purpose="benchmark")
        waiting: list[dict[int, Answer]] = [{} for _ in problems]

        def finished(index: int, sample: int, completion: Completion) -> None:
            group = waiting[index]
            group[sample] = self._answer(completion)
            if len(group) == self.num_samples:
                on_answers(problems[index], tuple(group[number] for number in range(self.num_samples)))
            on_response()

        self._engine.generate(requests, self._params, finished)

    def _answer(self, completion: Completion) -> Answer:
        ids = completion.token_ids.tolist()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
        return Answer(text, len(ids), str(completion.stop_reason))


def _prompt(problem: Problem, tokenizer: Any, rendering: Rendering, room: int, max_new_tokens: int) -> Prompt:
    ids = render_prompt(tokenizer, problem.prompt, rendering, problem.place)
    if len(ids) > room:
        raise DataError(
            f"{problem.place}: the prompt has {len(ids)} tokens and the response may have {max_new_tokens}, together "
            f"more than the model's context of {room + max_new_tokens}; lower --max-new-tokens to at most "
            f"{room + max_new_tokens - len(ids)}"
        )
    return Prompt(problem.id, problem.prompt, ids)


@dataclass(frozen=True)
class GivenSampler:
    """Answers that the user brings, by problem id; a problem may have none.

    Raises:
        DataError: an id that is no problem's, or more responses to a problem than ``num_samples``.
    """

    samples: Mapping[str, Sequence[str | Mapping[str, Any]]]
    problems: Sequence[Problem] = field(repr=False)
    num_samples: int = 0  # 0: as many as the problem with the most has

    def __post_init__(self) -> None:
        known = {problem.id for problem in self.problems}
        unknown = [name for name in self.samples if name not in known]
        if unknown:
            raise DataError(
                f"the samples answer {unknown[0]!r}, which is no problem of this benchmark "
                f"({len(unknown)} such of {len(self.samples)}); the first problem is {self.problems[0].id!r}"
            )
        most = max(self.samples, key=lambda name: len(self.samples[name]), default="")
        highest = len(self.samples[most]) if most else 0
        if not highest:
            raise DataError("the samples hold no response")
        if self.num_samples and highest > self.num_samples:
            raise DataError(
                f"problem {most!r} has {highest} responses, more than --num-samples {self.num_samples}; "
                "choosing among them would need a rule"
            )
        if not self.num_samples:
            object.__setattr__(self, "num_samples", highest)

    @property
    def identity(self) -> Mapping[str, str]:
        return {"samples": digest({name: list(given) for name, given in self.samples.items()})}

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "model": {"name": "samples brought by the user", "digest": self.identity["samples"]},
            "protocol": {"num_samples": self.num_samples},
        }

    def sample(self, problems: Sequence[Problem], on_answers: OnAnswers, on_response: OnResponse) -> None:
        for problem in problems:
            given = self.samples.get(problem.id, ())
            on_answers(problem, tuple(Answer(g) if isinstance(g, str) else answer_from(g) for g in given))
            for _ in given:
                on_response()
