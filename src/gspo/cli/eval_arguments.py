"""The command lines of ``gspo eval`` and ``gspo eval compare`` as types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

_OF_BENCHMARK = "(default: the benchmark's)"
_OUT = "(default: runs/eval-BENCHMARK-MODEL)"


@dataclass(frozen=True)
class Eval:
    """Evaluate a model on a recipe's held-out prompts, or on a benchmark (docs/evaluation.md), with error bars.

    On held-out prompts; every key of the recipe can be overridden:

    gspo eval recipe.toml --model runs/demo/checkpoints/step-60 --eval.num_samples 16

    On a benchmark; an interrupted evaluation goes on when the same command is given again:

    gspo eval --model runs/demo/checkpoints/step-60 --benchmark aime24 --data aime.jsonl --out runs/aime

    gspo eval --benchmark aime24 --data aime.jsonl --samples samples.jsonl

    Two or more evaluations of the same problems: gspo eval compare A B
    """

    recipe: Annotated[
        tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RECIPE.toml", help_behavior_hint="")
    ] = None
    """TOML file with [model]; without --benchmark also with [data], [reward] and [eval]"""
    model: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: the recipe's)")] = None
    """model directory or hub name, e.g. a checkpoint"""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """held-out prompts: write the result to evaluation.json in this directory"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """held-out prompts: write the result to this JSON file instead"""
    benchmark: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """aime24, livecodebench, codeforces, custom, own-integers, own-programs, ..."""
    data: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="FILE", help_behavior_hint="")
    ] = ()
    """benchmark: its data; may be given several times"""
    option: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE", help_behavior_hint="")
    ] = ()
    """benchmark: an option of its own; may be given several times"""
    verifier: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """custom: who judges (math, number, exact_match, integer, code, module:function)"""
    samples: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """benchmark: judge the responses in this JSONL file instead of sampling"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint=_OUT)] = None
    """benchmark: directory for responses, grades, result and page"""
    num_samples: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=_OF_BENCHMARK)] = None
    """benchmark: responses per problem"""
    max_new_tokens: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=_OF_BENCHMARK)] = None
    """benchmark: longest response"""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T", help_behavior_hint=_OF_BENCHMARK)] = None
    """benchmark: of sampling; 0 is greedy"""
    instruction: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint=_OF_BENCHMARK)] = None
    """benchmark: appended to prompts that are text"""
    k: Annotated[tyro.conf.UseAppendAction[tuple[int, ...]], tyro.conf.arg(metavar="K", help_behavior_hint="")] = ()
    """benchmark: report pass@K too; may be given several times"""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 0)")] = None
    """benchmark: of the samples"""
    confidence: Annotated[float | None, tyro.conf.arg(metavar="C", help_behavior_hint="(default: 0.95)")] = None
    """benchmark: level of the intervals"""
    dtype: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: float32)")] = None
    """benchmark without a recipe: float32, bfloat16 or float16"""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: auto)")] = None
    """benchmark without a recipe: cpu, cuda, ..."""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.evaluate import evaluate

        return evaluate(self, overrides)


@dataclass(frozen=True)
class EvalCompare:
    """Compare evaluations of the same problems, each with the first: paired intervals, permutation tests, Holm.

    gspo eval compare runs/eval-before runs/eval-after

    Of a run, those it made itself on its held-out prompts: gspo eval compare runs/demo
    """

    evaluations: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIR...", help_behavior_hint="(two or more)")
    ]
    """evaluation directories, JSON files, or a run directory"""
    component: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the primary one)")] = ""
    """compare by this grader, e.g. compat"""
    confidence: float = 0.95
    """level of the intervals"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """write the comparisons to this JSON file too"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.evaluate import compare

        return compare(self.evaluations, self.component, self.confidence, self.output)
