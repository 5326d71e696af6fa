"""``gspo eval --benchmark``: model or brought samples, grader and protocol put together for ``evals.frame``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo.config.schema import Recipe
from gspo.data.chat import Rendering
from gspo.errors import ConfigError
from gspo.evals import frame
from gspo.evals.benchmark import Benchmark, Imported
from gspo.evals.registry import find_benchmark
from gspo.evals.result import Settings
from gspo.evals.sampling import EngineSampler, GivenSampler, ModelFacts, Sampler
from gspo.evals.store import read_samples
from gspo.evals.tables import file_digests
from gspo.events import package_versions
from gspo.launch.house import policy_of
from gspo.launch.signals import StopSignal
from gspo.policy.causal_lm import CausalPolicy
from gspo.report.progress import EvaluationProgress
from gspo.rollout.base import SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.retrying import FailureLog, RetryingEngine
from gspo.train.checkpoint import verify_model
from gspo.train.loop import StoppedError


@dataclass(frozen=True)
class BenchmarkRequest:
    """What the command line asks for; None takes the benchmark's own protocol."""

    name: str
    data: tuple[Path, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    samples: Path | None = None  # judge these instead of sampling
    out: Path | None = None
    num_samples: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    instruction: str | None = None
    seed: int = 0
    settings: Settings = field(default_factory=Settings)

    def directory(self, model: str) -> Path:
        """Where the result goes: the same for the same command, so that it continues itself."""
        return self.out or Path("runs") / f"eval-{self.name}-{Path(model).name}"


def evaluate_benchmark(
    request: BenchmarkRequest,
    recipe: Recipe | None,
    model: str | None,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], Path]:
    """The content of ``evaluation.json`` and its directory.

    Args:
        recipe: model, device and rendering; None with ``samples``.
        model: a directory or hub name in place of the recipe's model.
        say: told what was mapped, and about damaged lines.

    Raises:
        InputError: data, options, model or directory that cannot work.
        StoppedError: SIGINT or SIGTERM; the same command continues.
    """
    benchmark = find_benchmark(request.name)
    imported = benchmark.load(request.data, request.options)
    for note in imported.notes:
        say(note)
    if request.samples is None:
        request.settings.check(request.num_samples or benchmark.protocol.num_samples)
    grader = benchmark.make_grader(request.options, imported)
    with closing(grader), StopSignal() as stop, EvaluationProgress(request.name) as progress:
        sampler = _sampler(request, benchmark, imported, recipe, model)
        directory = request.directory(_name_of(request, recipe, model))
        facts = {"files": file_digests(request.data), "versions": package_versions()}
        with _continuable(directory):
            result = frame.run(
                benchmark,
                imported,
                request.options,
                sampler,
                grader,
                directory,
                settings=request.settings,
                facts=facts,
                progress=progress,
                warn=say,
                check_stop=stop.check,
            )
    return result, directory


@contextmanager
def _continuable(directory: Path) -> Iterator[None]:
    try:
        yield
    except StoppedError as error:
        raise StoppedError(f"{error}; the same command continues, {directory} has what is done") from error


def _name_of(request: BenchmarkRequest, recipe: Recipe | None, model: str | None) -> str:
    if request.samples is not None:
        return request.samples.stem
    assert recipe is not None
    return model or recipe.model.path or recipe.model.tiny or "model"


def _sampler(
    request: BenchmarkRequest, benchmark: Benchmark, imported: Imported, recipe: Recipe | None, model: str | None
) -> Sampler:
    if request.samples is not None:
        return GivenSampler(read_samples(request.samples), imported.problems, request.num_samples or 0)
    if recipe is None:
        raise ConfigError("gspo eval --benchmark needs RECIPE.toml, --model DIR, or --samples FILE")
    if recipe.rollout.engine == "scripted":
        raise ConfigError("a benchmark is not sampled from a script; bring its responses: --samples FILE")
    if recipe.run.num_threads:
        torch.set_num_threads(recipe.run.num_threads)
    if model is not None:
        verify_model(Path(model))
    policy = policy_of(recipe, model)
    protocol = benchmark.protocol
    params = SamplingParams(
        max_new_tokens=request.max_new_tokens or protocol.max_new_tokens,
        temperature=protocol.temperature if request.temperature is None else request.temperature,
        stop_token_ids=policy.stop_token_ids,
        stop_strings=recipe.rollout.stop_strings,
    )
    instruction = protocol.instruction if request.instruction is None else request.instruction
    data = recipe.data
    # Nothing is kept of a call that failed for good but whole problems: the same command asks for the rest again.
    own = EmbeddedEngine(policy, max_slots=recipe.rollout.max_slots)
    engine = RetryingEngine(own, FailureLog(), max_retries=recipe.rollout.max_retries, keep=False)
    return EngineSampler(
        engine,
        policy.tokenizer,
        ModelFacts(_name_of(request, recipe, model), weights_digest(policy), policy.context_length),
        params,
        Rendering(data.chat_template, data.system_prompt, instruction or None, data.template_options),
        imported.problems,
        num_samples=request.num_samples or protocol.num_samples,
        seed=request.seed,
    )


def weights_digest(policy: CausalPolicy) -> str:
    """BLAKE2 of every weight by name, with dtype and shape, as they are in memory."""
    found = hashlib.blake2b(digest_size=32)
    tensors: Mapping[str, torch.Tensor] = policy.model.state_dict()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def recipe_of(model: str, dtype: str, device: str, trust_remote_code: bool = False) -> Recipe:
    """A recipe that says nothing but the model, for an evaluation without one.

    Raises:
        ConfigError: a dtype that there is not.
    """
    from pydantic import ValidationError

    tree = {"model": {"path": model, "dtype": dtype, "trust_remote_code": trust_remote_code}, "run": {"device": device}}
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(f"--{fault['loc'][-1]} is {fault['input']!r}: {fault['msg']}") from error
