"""``gspo eval``: on a recipe's held-out prompts, or on a benchmark; and ``gspo eval compare``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.cli.commands import checked_recipe
from gspo.errors import ConfigError, InputError
from gspo.events import write_json

if TYPE_CHECKING:
    from gspo.cli.eval_arguments import Eval
    from gspo.config import Recipe


def evaluate(command: Eval, overrides: Sequence[str]) -> int:
    """``gspo eval``: which of the two is asked for, and whether the options are of that one."""
    if command.benchmark is None:
        _refuse(command, ("data", "option", "verifier", "samples", "out", "instruction", "k", *_NUMBERS), "--benchmark")
        if command.recipe is None:
            raise InputError("gspo eval needs RECIPE.toml (its held-out prompts), or --benchmark NAME")
        return _held_out(command.recipe, command, overrides)
    if command.run_dir is not None or command.output is not None:
        raise InputError("--benchmark writes a directory: say --out DIR instead of --run-dir and --output")
    return _benchmark(command, overrides)


_NUMBERS = ("num_samples", "max_new_tokens", "temperature", "seed", "confidence")


def _refuse(command: Eval, names: Sequence[str], without: str) -> None:
    given = [name for name in names if getattr(command, name) not in (None, ())]
    if given:
        flag = given[0].replace("_", "-")
        known = {"num_samples": "eval.num_samples", "max_new_tokens": "eval.max_new_tokens", "seed": "run.seed"}
        known |= {"temperature": "eval.temperature", "confidence": "eval.confidence", "k": "eval.k"}
        hint = f"; on a recipe's prompts it is --{known[given[0]]}" if given[0] in known else ""
        raise InputError(f"--{flag} is for {without}{hint}")


def _held_out(path: Path, command: Eval, overrides: Sequence[str]) -> int:
    """On the recipe's prompts: prints the result as one JSON line."""
    run_dir, output = command.run_dir, command.output
    if run_dir is not None and output is not None:
        raise InputError("--run-dir and --output both say where the result goes; keep one of the two")
    recipe = checked_recipe(path, overrides, "eval")
    from gspo import launch

    target = run_dir / "evaluation.json" if run_dir is not None else output
    print(json.dumps(launch.evaluate(recipe, model=command.model, output=target)))
    return 0


def _benchmark(command: Eval, overrides: Sequence[str]) -> int:
    """On a benchmark: prints what was measured, and where the result and its page are."""
    from gspo.evals.registry import find_benchmark
    from gspo.evals.result import Settings

    name = find_benchmark(str(command.benchmark)).name
    recipe = _recipe(command, overrides)
    from gspo.launch.benchmarks import BenchmarkRequest, evaluate_benchmark

    request = BenchmarkRequest(
        name=name,
        data=command.data,
        options=_options(command),
        samples=command.samples,
        out=command.out,
        num_samples=command.num_samples,
        max_new_tokens=command.max_new_tokens,
        temperature=command.temperature,
        instruction=command.instruction,
        seed=command.seed or 0,
        settings=Settings(command.k or (1,), command.confidence or 0.95, command.seed or 0),
    )
    result, directory = evaluate_benchmark(request, recipe, command.model, say=_say)
    print("\n".join(summary(result)))
    print(f"result: {directory / 'evaluation.json'}")
    _write_page(directory)
    return 0


def _recipe(command: Eval, overrides: Sequence[str]) -> Recipe | None:
    if command.samples is not None:
        if command.recipe is not None or command.model is not None:
            raise InputError("--samples judges responses that are there: leave out the recipe and --model")
        _refuse(command, ("max_new_tokens", "temperature", "instruction"), "sampling, and --samples samples nothing")
        return None
    if command.recipe is not None:
        if command.dtype is not None or command.device is not None:
            raise InputError("with a recipe say --model.dtype and --run.device")
        return checked_recipe(command.recipe, overrides, "eval")
    if overrides:
        raise ConfigError(f"{overrides[0]} overrides a key of a recipe, and no RECIPE.toml is given")
    if command.model is None:
        raise InputError("gspo eval --benchmark needs RECIPE.toml, --model DIR, or --samples FILE")
    from gspo.launch.benchmarks import recipe_of

    return recipe_of(command.model, command.dtype or "float32", command.device or "auto")


def _options(command: Eval) -> dict[str, str]:
    """``--option name=value`` and ``--verifier`` as one mapping."""
    options: dict[str, str] = {}
    words = [*command.option, *([f"verifier={command.verifier}"] if command.verifier is not None else [])]
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise ConfigError(f"--option {word}: write --option NAME=VALUE")
        if name in options:
            raise ConfigError(f"--option {name} is given twice")
        options[name] = value.strip()
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def summary(result: Mapping[str, Any]) -> list[str]:
    """The result in a few lines."""
    metrics = result["metrics"]
    level = f"{100 * result['confidence']:g} %"
    lines = [f"{result['title']}: {result['num_prompts']} problems x {result['num_samples']} samples, {_model(result)}"]
    names = [key.removesuffix("pass@1") for key in metrics if key == "pass@1" or key.endswith("/pass@1")]
    for name in names:
        lines.append(
            f"{name}pass@1 {_percent(metrics[f'{name}pass@1'])} [{_percent(metrics[f'{name}pass@1/low'])}, "
            f"{_percent(metrics[f'{name}pass@1/high'])}] {level} over problems; bootstrap "
            f"[{_percent(metrics.get(f'{name}pass@1/bootstrap_low'))}, "
            f"{_percent(metrics.get(f'{name}pass@1/bootstrap_high'))}]"
        )
        lines.append(
            f"  standard error {_percent(metrics.get(f'{name}pass@1/standard_error'))} over problems, "
            f"{_percent(metrics.get(f'{name}pass@1/measurement_error'))} with the problems fixed"
        )
        if f"{name}pass@1/if_unscored_wrong" in metrics:
            low, high = (metrics[f"{name}pass@1/if_unscored_{end}"] for end in ("wrong", "right"))
            lines.append(
                f"  cells without a verdict: {_percent(low)} if all are wrong, {_percent(high)} if all are right"
            )
    lines += [f"{key} {_percent(metrics[key])}" for key in metrics if _is_pass_at_k(key)]
    lines += [f"{figure['name']} {figure['text']} ({figure['note']})" for figure in result["figures"]]
    shares = ("unanswered", "truncated", "unscored", "missing")
    known = [f"{name} {_percent(metrics[f'{name}_fraction'])}" for name in shares if f"{name}_fraction" in metrics]
    return [*lines, f"responses: {', '.join(known)}"]


def _is_pass_at_k(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name.startswith("pass@") and name != "pass@1"


def _model(result: Mapping[str, Any]) -> str:
    return f"{result['model']['name']} (digest {result['model']['digest'][:12]})"


def _percent(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f} %"


def _write_page(directory: Path) -> None:
    """A finished evaluation is never a failure because its page could not be drawn."""
    from gspo.report.evaluation import write_evaluation_page

    try:
        print(f"report: {write_evaluation_page([directory], directory / 'report.html')}")
    except InputError as error:
        print(f"no report: {error}", file=sys.stderr)


def compare(paths: Sequence[Path], component: str, confidence: float, output: Path | None) -> int:
    """``gspo eval compare``: one line per evaluation after the first; with ``output`` as JSON too."""
    from gspo.evals.compare import compare as compare_evaluations
    from gspo.evals.compare import load_evaluations

    evaluations = load_evaluations(paths, component)
    found = compare_evaluations(evaluations, confidence=confidence)
    first = evaluations[0]
    print(f"against {first.label} ({first.name}, {len(first.counts)} problems), {100 * confidence:g} % intervals")
    rows = []
    for one in found:
        change = one.found
        print(
            f"{one.label}: {100 * change.difference:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}], "
            f"p = {change.p_value:.3g}, Holm over {len(found)}: {one.p_holm:.3g}, {change.num_prompts} problems"
            + "".join(f"; {note}" for note in one.notes)
        )
        fields = {"difference": change.difference, "low": change.low, "high": change.high, "p_value": change.p_value}
        rows.append({"evaluation": one.label, **fields, "p_holm": one.p_holm, "num_problems": change.num_prompts})
        rows[-1]["notes"] = list(one.notes)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, {"against": first.label, "confidence": confidence, "comparisons": rows})
    return 0
