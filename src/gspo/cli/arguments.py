"""The command line as types: one class per command, and the recipe overrides kept apart from its own flags."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro

from gspo.cli.eval_arguments import Eval, EvalCompare
from gspo.errors import ConfigError, InputError

_DESCRIPTION = """Reinforcement-learning post-training of language models at the level of whole answers (GSPO).

`gspo COMMAND --help` describes one command; `gspo --version` prints the version. Every key of a recipe can be given as
`--section.key value`; docs/configuration.md lists them.

Exit status: 0 done, 1 the run went wrong, 2 the input is wrong, 3 stopped by SIGINT or SIGTERM with everything saved
(continue with gspo train --resume), 130 interrupted at once."""

_NEW_RUN = "(default: a new one under runs/)"
_OF_STUDY = "(default: runs/studies/NAME)"
_IN_FIRST_RUN = "(default: report.html in the first run directory)"


class CommandLine(Protocol):
    """A parsed command."""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Does it. overrides: words for ``load_recipe``; command: the whole line, for the record."""


@dataclass(frozen=True)
class Train:
    """Train a model: cold start if the recipe has [sft], then the objective, evaluated before, during and after.

    Every key of the recipe can be overridden, for example:

    gspo train recipe.toml --train.num_steps 20 --objective.clip calibrated

    A run that was stopped, or died, goes on with:

    gspo train --resume runs/demo
    """

    recipe: Annotated[
        tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RECIPE.toml", help_behavior_hint="")
    ] = None
    """TOML file that describes the run (docs/configuration.md)"""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint=_NEW_RUN)] = None
    """directory for events, checkpoints and the summary"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR", help_behavior_hint="")] = None
    """continue this run, with its own recipe, from its newest good checkpoint"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.commands import resume, train

        if self.resume is None and self.recipe is not None:
            return train(self.recipe, self.run_dir, overrides, command)
        if self.resume is None:
            raise InputError("gspo train needs RECIPE.toml, or --resume RUN_DIR to continue a run")
        _refuse_with_resume(self.recipe, self.run_dir, overrides)
        return resume(self.resume, command)


@dataclass(frozen=True)
class Sft:
    """Cold start only: next-token loss on the responses of [sft].

    Every key of the recipe can be overridden, for example:

    gspo sft recipe.toml --sft.num_steps 100

    One that was stopped, or died, goes on with:

    gspo sft --resume runs/demo
    """

    recipe: Annotated[
        tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RECIPE.toml", help_behavior_hint="")
    ] = None
    """TOML file with [model] and [sft]"""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint=_NEW_RUN)] = None
    """directory for events, checkpoints and the summary"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR", help_behavior_hint="")] = None
    """continue this run, with its own recipe, from its newest good checkpoint"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.commands import resume, sft

        if self.resume is not None:
            _refuse_with_resume(self.recipe, self.run_dir, overrides)
            return resume(self.resume, command)
        if self.recipe is None:
            raise InputError("gspo sft needs RECIPE.toml, or --resume RUN_DIR to continue a run")
        return sft(self.recipe, self.run_dir, overrides, command)


def _refuse_with_resume(recipe: Path | None, run_dir: Path | None, overrides: Sequence[str]) -> None:
    if recipe is not None or run_dir is not None or overrides:
        raise InputError(
            "--resume continues a run with its own recipe in its own directory: leave out the recipe, --run-dir "
            "and every key; to train on with other settings, start a new run from the checkpoint (model.path)"
        )


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page from run directories; several are overlaid for comparison."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN...", help_behavior_hint="(one or more)")
    ]
    """run directories"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint=_IN_FIRST_RUN)] = None
    """HTML file"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.commands import report

        return report(self.runs, self.output)


@dataclass(frozen=True)
class Check:
    """Validate a recipe; print its resolved keys, the batch arithmetic, the number of updates and a memory estimate.

    Trains nothing and writes nothing. Exit status 2 if the recipe is wrong.
    """

    recipe: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RECIPE.toml")]
    """TOML file to check"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.check import check

        return check(self.recipe, overrides)


@dataclass(frozen=True)
class Conformance:
    """Compare the objectives of this build with files of cases whose right answers are known.

    Prints right, wrong and, where a wrong answer is one that a known fault gives, the fault. Exit status 1 if
    anything is wrong.
    """

    files: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE...", help_behavior_hint="(one or more)")
    ]
    """JSON files of cases"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.commands import conformance

        return conformance(self.files)


@dataclass(frozen=True)
class Doctor:
    """Say in plain words what went wrong in a run, with the evidence and the usual remedies.

    Reads the run directory only; the run may be finished, dead or still going.
    """

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """run directory"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.doctor import doctor

        return doctor(self.run_dir)


@dataclass(frozen=True)
class VerifyResume:
    """Prove for a recipe that a killed run that is continued ends with the same bits as one that was left alone.

    Trains a few steps once undisturbed and once killed (SIGKILL) at several instants and continued each time. Exit
    status 1 if anything differs.
    """

    recipe: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RECIPE.toml")]
    """TOML file of the run; its number of steps is cut to --steps"""
    steps: int = 3
    """rollout batches of each run"""
    kills: int = 4
    """times that the second run is killed"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.verify_resume import verify_resume

        return verify_resume(self.recipe, overrides, self.steps, self.kills)


@dataclass(frozen=True)
class Grade:
    """Judge one response as training would; print the verdict, the rung that decided, and the reason.

    Exit status 0 for right and wrong, 2 where the gold answer cannot be read.

    gspo grade --gold '\\frac{1}{2}' --response 'So it is \\boxed{0.5}.'

    gspo grade --verifier code --gold-file tests.json --response-file answer.md --json
    """

    gold: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """gold answer; for code the tests as JSON (docs/verifiers.md)"""
    response: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """whole response, as a model wrote it"""
    gold_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """read the gold answer from this file (- is standard input)"""
    response_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """read the response from this file (- is standard input)"""
    verifier: Annotated[str, tyro.conf.arg(metavar="NAME")] = "math"
    """math, number, exact_match or code"""
    timeout_s: float = 5.0
    """wall-clock limit of a verifier other than code"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one line: {"correct": true, "rung": .., "reason": ..}"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli.grade import grade

        return grade(
            self.gold, self.response, self.gold_file, self.response_file, self.verifier, self.timeout_s, self.json
        )


@dataclass(frozen=True)
class Study:
    """Run the paper's claims as judged experiments (docs/studies/), and write the page of each.

    gspo study list

    gspo study run clip-fraction --quick

    gspo study report stability --results docs/studies/stability/results.json

    Runs that are finished are kept; one that was broken off is made again.
    """

    action: tyro.conf.Positional[Literal["list", "run", "report"]]
    """list the studies; run one and write its page; or write the page from the runs or numbers that are there"""
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """name of a study, or a TOML file of your own"""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """the short version, a smoke test without a verdict"""
    explore: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """run: the runs of [exploration], which never enter the verdict"""
    jobs: int = 2
    """run: processes at a time, one thread each"""
    dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint=_OF_STUDY)] = None
    """directory of the study's runs"""
    results: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """report: judge these numbers instead of runs"""
    publish: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: --dir)")] = None
    """report: write NAME.md, its figures and results.json here"""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        from gspo.cli import study

        if self.action == "list":
            return study.list_studies()
        if self.name is None:
            raise InputError(f"gspo study {self.action} needs the NAME of a study; gspo study list shows them")
        if self.action == "run":
            if self.results is not None or self.publish is not None:
                raise InputError("--results and --publish belong to gspo study report; run it afterwards")
            return study.run(self.name, self.dir, quick=self.quick, explore=self.explore, jobs=self.jobs)
        return study.report(self.name, self.dir, quick=self.quick, results=self.results, publish=self.publish)


_COMMANDS: dict[str, type] = {
    "train": Train,
    "sft": Sft,
    "eval": Eval,
    "report": Report,
    "check": Check,
    "conformance": Conformance,
    "grade": Grade,
    "doctor": Doctor,
    "verify-resume": VerifyResume,
    "study": Study,
    "eval-compare": EvalCompare,
}
_WITH_RECIPE = (Train, Sft, Eval, Check, VerifyResume)


def parse(words: Sequence[str]) -> tuple[CommandLine, list[str]]:
    """The command of a line and its recipe overrides; ``eval compare`` is one command.

    Raises:
        SystemExit: after ``--help``, ``--version``, or a line that is not a command (2, explained on stderr).
        ConfigError: an option that the command does not have.
    """
    if words and words[0] == "--version":
        from gspo import __version__

        print(f"gspo {__version__}")
        raise SystemExit(0)
    if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
        raise InputError(_unknown_command(words[0]))
    if list(words[:2]) == ["eval", "compare"]:
        words = ["eval-compare", *words[2:]]
    kind = _COMMANDS.get(words[0]) if words else None
    own, overrides = split_overrides(words, kind)
    if overrides and kind not in _WITH_RECIPE:
        raise ConfigError(f"gspo {words[0]} has no option {overrides[0].partition('=')[0]}; see gspo {words[0]} --help")
    union: Any = Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
    for name, other in list(_COMMANDS.items())[1:]:
        union = union | Annotated[other, tyro.conf.subcommand(name, prefix_name=False)]  # type: ignore[valid-type]
    command = tyro.cli(union, prog="gspo", description=_DESCRIPTION, args=own or ["--help"])
    return command, overrides


def _unknown_command(word: str) -> str:
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    meant = f"did you mean gspo {near[0]}?" if near else f"there are {', '.join(_COMMANDS)}"
    return f"gspo has no command {word!r}; {meant}"


def split_overrides(words: Sequence[str], kind: type | None) -> tuple[list[str], list[str]]:
    """Parts a line into the command's own words and ``--name value`` pairs for the recipe.

    Everything that starts with ``--`` and is not a flag of the command is an override, so that a key that does not
    exist is answered with the nearest one.
    """
    flags = {field.name for field in fields(kind)} if kind else set()
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or kind is None or name == "help":
            own.append(word)
            continue
        target = own if name.replace("-", "_") in flags else overrides
        if target is overrides:
            _refuse_misspelt(name, flags)
        target.append(word)
        if not equals and rest and not rest[0].startswith("--"):
            target.append(rest.pop(0))
    return own, overrides


def _refuse_misspelt(name: str, flags: set[str]) -> None:
    """An option without a dot that is nearly one of the command's flags is a slip, not a key."""
    named = flags - {"recipe", "runs", "files", "evaluations"}
    near = difflib.get_close_matches(name.replace("-", "_"), named, n=1, cutoff=0.75)
    if "." not in name and near:
        raise ConfigError(f"there is no option --{name}; did you mean --{near[0].replace('_', '-')}?")
