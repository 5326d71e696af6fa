"""A study's file in, a checked study out; its cells and their recipes."""

from __future__ import annotations

import copy
import difflib
import hashlib
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo.config.source import toml_value
from gspo.errors import ConfigError
from gspo.study.measures import MEASURES, SERIES
from gspo.study.schema import Arm, Cell, Study

STUDIES = Path(__file__).parent / "studies"
#: Overrides that start like this go to the executor's options instead of the recipe.
OPTIONS = "options."


@dataclass(frozen=True)
class LoadedStudy:
    """A study and where it came from."""

    study: Study
    path: Path
    digest: str  # of the file's bytes


def study_names() -> list[str]:
    """Names of the studies that come with the package."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def load_study(name: str) -> LoadedStudy:
    """A study by its name, or from a TOML file of one's own.

    Raises:
        ConfigError: there is none, it is not TOML, a key is unknown or wrong, or a name in it refers to nothing.
    """
    path = Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"
    try:
        data = path.read_bytes()
        tree = tomllib.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no study {name!r}{_meant(name)}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a study: {error}") from None
    try:
        study = Study.model_validate(tree)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{path}: " + "; ".join(faults)) from None
    faults_of_names = list(_faults(study))
    if study.name != path.stem:
        faults_of_names.append(f"it calls itself {study.name!r}, but the file is {path.name}")
    if faults_of_names:
        raise ConfigError(f"{path}: " + "; ".join(faults_of_names))
    return LoadedStudy(study, path, hashlib.sha256(data).hexdigest()[:16])


def _meant(name: str) -> str:
    names = study_names()
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names) or 'none'}"


def _faults(study: Study) -> Iterator[str]:
    """Names that occur twice or refer to nothing."""
    arms, axes = [arm.name for arm in study.arms], {axis.name: axis for axis in study.axes}
    measures = [measure.name for measure in study.measures] + [slope.name for slope in study.slopes]
    contrasts, series = [contrast.name for contrast in study.contrasts], [item.name for item in study.series]
    for what, names in (("arm", arms), ("measure", measures), ("contrast", contrasts), ("series", series)):
        yield from (f"{what} {name!r} occurs twice" for name in sorted({n for n in names if names.count(n) > 1}))
    used = [(f"arm {arm.name}", "axis", axis, list(axes)) for arm in study.arms for axis in arm.axes]
    used += [(f"measure {m.name}", "function", m.function, list(MEASURES)) for m in study.measures]
    used += [(f"series {s.name}", "function", s.function, list(SERIES)) for s in study.series]
    for slope in study.slopes:
        used += [(f"slope {slope.name}", "measure", name, measures) for name in (slope.x, slope.y)]
        used += [(f"slope {slope.name}", "arm", slope.arm, arms), (f"slope {slope.name}", "axis", slope.axis, [*axes])]
    for contrast in study.contrasts:
        where = f"contrast {contrast.name}"
        used += [(where, "measure", contrast.measure, measures), (where, "arm", contrast.arm, arms)]
        used += [(where, "arm", contrast.against, arms)] if contrast.against is not None else []
        if (contrast.alternative == "equivalent") != (contrast.margin is not None):
            yield f'{where}: a margin belongs to alternative = "equivalent", and to that only'
    for control in study.controls:
        where = f"control {control.name}"
        used += [(where, "measure", control.measure, measures), (where, "arm", control.arm, arms)]
    used += [(f"exclusion on {e.measure}", "measure", e.measure, measures) for e in study.exclusions]
    used += [("verdict", "contrast", name, contrasts) for name in study.verdict.needs]
    for figure in study.figures:
        known = series if figure.kind == "series" else measures
        used += [(f"figure {figure.id}", figure.kind, figure.y, known)]
        used += [(f"figure {figure.id}", "arm", arm, arms) for arm in figure.arms]
        if (figure.kind == "points") != (figure.x is not None):
            yield f'figure {figure.id}: x belongs to kind = "points", and to that only'
        elif figure.x is not None:
            used += [(f"figure {figure.id}", "axis or measure", figure.x, [*axes, *measures])]
    for where, what, name, known in used:
        if name not in known:
            yield f"{where}: there is no {what} {name!r}; there is {', '.join(known) or 'none'}"
    places = [contrast.where for contrast in study.contrasts] + [control.where for control in study.controls]
    for where_ in (*places, *(figure.where for figure in study.figures), *(slope.where for slope in study.slopes)):
        for axis, level in where_.items():
            if axis not in axes or level not in {found.name for found in axes[axis].levels}:
                yield f"where = {toml_value(where_)}: there is no level {level!r} of an axis {axis!r}"


def cells(study: Study, *, quick: bool = False) -> list[Cell]:
    """Every run of a study, seed by seed, so that a study that is broken off has whole seeds."""
    short = study.quick if quick else None
    if quick and short is None:
        raise ConfigError(f"study {study.name} has no [quick] version; leave out --quick")
    arms = [arm for arm in study.arms if short is None or not short.arms or arm.name in short.arms]
    kept = {} if short is None else short.levels
    seeds = study.seeds if short is None else short.seeds
    return _crossed(study, arms, seeds, kept)


def exploration_cells(study: Study) -> list[Cell]:
    """The runs of [exploration]."""
    if study.exploration is None:
        return []
    return _crossed(study, study.exploration.arms, study.exploration.seeds, {})


def _crossed(
    study: Study, arms: Iterable[Arm], seeds: Iterable[int], kept: Mapping[str, tuple[str, ...]]
) -> list[Cell]:
    names = {
        axis.name: [level.name for level in axis.levels if axis.name not in kept or level.name in kept[axis.name]]
        for axis in study.axes
    }
    return [
        Cell(arm=arm.name, levels=dict(zip(arm.axes, chosen, strict=True)), seed=seed)
        for seed in seeds
        for arm in arms
        for chosen in itertools.product(*(names[axis] for axis in arm.axes))
    ]


def arm_of(study: Study, name: str) -> Arm:
    """An arm by name, those of [exploration] too."""
    explored = study.exploration.arms if study.exploration is not None else ()
    return next(arm for arm in (*study.arms, *explored) if arm.name == name)


def level_value(study: Study, axis: str, level: str) -> float:
    """The number that a level stands for."""
    levels = next(found.levels for found in study.axes if found.name == axis)
    return next(found.value for found in levels if found.name == level)


def overrides_of(study: Study, cell: Cell, *, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(recipe overrides, executor options) of a cell; later ones win: levels, arm, quick version."""
    arm = arm_of(study, cell.arm)
    found: dict[str, Any] = {}
    for axis, level in cell.levels.items():
        levels = next(known.levels for known in study.axes if known.name == axis)
        found |= next(known.overrides for known in levels if known.name == level)
    found |= arm.overrides
    if quick and study.quick is not None:
        found |= study.quick.overrides
    options = (
        dict(study.options)
        | dict(arm.options)
        | {k.removeprefix(OPTIONS): v for k, v in found.items() if k.startswith(OPTIONS)}
    )
    return {key: value for key, value in found.items() if not key.startswith(OPTIONS)}, options


def recipe_tree(study: Study, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The base recipe with dotted overrides; the value ``"none"`` takes a key out."""
    tree = copy.deepcopy(study.recipe)
    for key, value in overrides.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if value == "none" and leaf in node:
            del node[leaf]
        else:
            node[leaf] = copy.deepcopy(value)
    return tree


def recipe_file_text(tree: Mapping[str, Any]) -> str:
    """A recipe as TOML: one table per section, what lies deeper in line."""
    parts = []
    for section, keys in tree.items():
        parts.append(f"[{section}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in keys.items()))
    return "\n".join(parts)
