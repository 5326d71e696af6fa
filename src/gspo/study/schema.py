"""The file of a study, and what its runs say: types only.

A study fixes, before its first confirmatory run, what is compared and how it is judged. Whatever is read from the file
goes into its digest; results that belong to another digest are refused.

::

    Study                      the TOML file
    ├── Arm x axes x seeds     -> Cell, one run each
    ├── Measure                a named pure function of one finished run -> a number
    ├── Slope                  a number of several cells of one seed: d log y / d log x
    ├── Contrast               a planned comparison, judged together with the others (Holm)
    ├── Control                what must hold, or the study is void
    └── Verdict                which contrasts decide

    RunResult, Results         what was measured: results.json, enough to judge again without running
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gspo.config.schema import Fraction, Positive, Section

Role = Literal["arm", "control"]
Alternative = Literal["greater", "less", "different", "equivalent"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.+-]*$")]


class Paper(Section):
    """What the claim rests on."""

    says: str = Field(description="what was reported, with its figures")
    source: str = Field(description="paper, version, section or figure")


class Level(Section):
    """One value of an axis."""

    name: Name = Field(description='as it stands in the name of a cell, e.g. "3e-4"')
    value: float = Field(description="as it is drawn and as slopes are taken over it")
    overrides: dict[str, Any] = Field(description="dotted keys of the recipe")


class Axis(Section):
    """A factor that arms are crossed with."""

    name: Name
    label: str = Field(description="with its unit, for figures")
    levels: tuple[Level, ...]


class Arm(Section):
    """One way of training (or of measuring); crossed with its axes and with every seed."""

    name: Name
    label: str
    role: Role = "arm"
    overrides: dict[str, Any] = Field(default_factory=dict, description="dotted keys of the recipe")
    axes: tuple[str, ...] = Field((), description="names of the axes that it is crossed with")
    options: dict[str, Any] = Field(default_factory=dict, description="for an executor other than train")
    same_as: str | None = Field(
        None, description='"STUDY/ARM": the finished runs of another study, taken over where their recipes are equal'
    )


class Measure(Section):
    """A number of one run."""

    name: Name
    function: str = Field(description="name in gspo.study.measures.MEASURES")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the function")
    label: str = Field(description="with its unit")


class Series(Section):
    """A curve of one run, for figures."""

    name: Name
    function: str = Field(description="name in gspo.study.measures.SERIES")
    options: dict[str, Any] = Field(default_factory=dict)


class Slope(Section):
    """d log10 y / d log10 x by least squares over the levels of one axis, within one arm and one seed."""

    name: Name
    y: str = Field(description="name of a measure")
    x: str = Field(description="name of a measure")
    axis: str
    arm: str
    where: dict[str, str] = Field(default_factory=dict, description="levels of the arm's other axes")
    label: str


class Contrast(Section):
    """A planned comparison of one measure, paired by seed and by the levels of the axes.

    The estimate is the mean over seeds of ``measure(arm) - measure(against)`` (without ``against``: of the measure
    itself), after averaging over levels within a seed. What is tested is ``estimate > null`` and so on; ``equivalent``
    asks for ``|estimate - null| < margin`` (two one-sided tests).
    """

    name: Name
    says: str = Field(description="the sentence that holds if the test rejects")
    measure: str = Field(description="name of a measure or of a slope")
    arm: str
    against: str | None = None
    alternative: Alternative
    null: float = 0.0
    margin: float | None = Field(None, gt=0, description="equivalent only")
    where: dict[str, str] = Field(default_factory=dict, description="levels, e.g. { length = '18' }; default all")


class Control(Section):
    """What an arm must do for the study to say anything: its mean over all its runs lies between the bounds."""

    name: Name
    says: str
    arm: str
    measure: str
    low: float = float("-inf")
    high: float = float("inf")
    where: dict[str, str] = Field(default_factory=dict)


class Exclusion(Section):
    """A seed whose measure lies outside is left out, in every arm."""

    measure: str
    low: float = float("-inf")
    high: float = float("inf")


class Verdict(Section):
    """supported: all of ``needs`` hold. not supported: one of them is refuted. Else not reproduced at this scale."""

    needs: tuple[str, ...] = Field(min_length=1, description="names of contrasts")


class Figure(Section):
    """One figure of the page.

    kind "series": a series by its x, one line per cell's arm, mean over seeds, every seed faint behind it.
    kind "points": measure ``y`` against ``x`` (an axis or a measure), one line per arm, mean over seeds with interval.
    kind "strip": measure ``y`` of each arm, one dot per run, the mean as a bar.
    """

    id: Name
    title: str
    caption: str
    kind: Literal["series", "points", "strip"]
    y: str
    x: str | None = None
    x_title: str
    y_title: str
    arms: tuple[str, ...] = Field((), description="default all")
    where: dict[str, str] = Field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    main: bool = Field(False, description="stands beside the verdict in docs/studies/NAME.md")


class Exploration(Section):
    """What was tried before the file was fixed. Never enters the verdict."""

    text: str
    seeds: tuple[int, ...] = ()
    arms: tuple[Arm, ...] = ()


class Quick(Section):
    """The five-minute version."""

    seeds: tuple[int, ...]
    overrides: dict[str, Any] = Field(default_factory=dict)
    arms: tuple[str, ...] = Field((), description="arms that are run; default all")
    levels: dict[str, tuple[str, ...]] = Field(default_factory=dict, description="levels that are run, by axis")


class Study(Section):
    """A whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=True)

    name: Name
    title: str
    claim: str
    paper: Paper
    regime: str = Field(description="model, task and schedule in words, and why routing matters in it")
    executor: str = Field(
        "train", description='"train", or "module:function" that takes a gspo.study.execute.Job and writes records'
    )
    options: dict[str, Any] = Field(default_factory=dict, description="for an executor other than train, in every arm")
    cold_start: bool = Field(True, description="each seed's arms start from the same weights, trained by [recipe.sft]")
    recipe: dict[str, Any] = Field(description="the base recipe, as a recipe file has it")
    seeds: tuple[int, ...] = Field(min_length=1)
    axes: tuple[Axis, ...] = ()
    arms: tuple[Arm, ...] = Field(min_length=1)
    measures: tuple[Measure, ...] = Field(min_length=1)
    series: tuple[Series, ...] = ()
    slopes: tuple[Slope, ...] = ()
    contrasts: tuple[Contrast, ...] = Field(min_length=1)
    controls: tuple[Control, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    alpha: Fraction = Field(0.05, description="family-wise error of the planned contrasts (Holm)")
    confidence: Fraction = Field(0.95, description="of the intervals that are shown")
    num_bootstrap: Positive = 10_000
    verdict: Verdict
    figures: tuple[Figure, ...] = ()
    deviations: str = Field("", description="where this differs from the paper's setting")
    exploration: Exploration | None = None
    quick: Quick | None = None


class Cell(Section):
    """One run that is to be made: an arm at its levels, with one seed."""

    arm: str
    levels: dict[str, str] = Field(default_factory=dict, description="level by axis, in the order of the arm's axes")
    seed: int

    @property
    def place(self) -> str:
        """Name of its directory. ``gspo+length=18+seed=0``."""
        levels = "".join(f"+{axis}={level}" for axis, level in self.levels.items())
        return f"{self.arm}{levels}+seed={self.seed}"


class Curve(Section):
    """Points of one line; None where a value was not finite or not logged."""

    x: tuple[float, ...]
    y: tuple[float | None, ...]


class RunResult(Section):
    """What one run says."""

    cell: Cell
    status: Literal["finished", "failed"] = Field(description="failed: it ended with an error of its own (RunError)")
    message: str = ""
    seconds: float
    scalars: dict[str, float | None]
    series: dict[str, Curve] = Field(default_factory=dict)


class Results(Section):
    """results.json."""

    study: str
    digest: str = Field(description="of the study's file")
    quick: bool = False
    versions: dict[str, str]
    host: dict[str, Any] = Field(default_factory=dict)
    runs: tuple[RunResult, ...]
    exploration: tuple[RunResult, ...] = ()


Scalars = Mapping[str, float | None]
