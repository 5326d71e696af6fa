"""A recipe file and overrides in, one checked tree out; or one report of everything that is wrong.

No torch here: a wrong recipe is found before anything heavy is loaded.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gspo.config.check import check_files, check_recipe
from gspo.config.data_files import data_findings
from gspo.config.findings import Command, Finding
from gspo.config.keys import admits_text, flat_types, guess_key, guess_section, recipe_keys, recipe_sections
from gspo.config.model_files import model_findings
from gspo.config.presets import apply_preset
from gspo.config.reward_functions import reward_findings
from gspo.config.schema import Recipe
from gspo.config.source import Source, read_source, recipe_text, toml_value
from gspo.errors import ConfigError
from gspo.events.secrets import redact

__all__ = ["load_recipe", "recipe_text"]

#: Keys that [data.eval] takes over from [data]: always, and where it names no source of its own.
_SHARED_FORMAT = ("system_prompt", "instruction", "chat_template", "template_options", "max_prompt_tokens")
_SHARED_SOURCE = ("path", "task", "task_options", "prompt_column")

#: What else to say about a value that is refused.
_HINTS: Mapping[str, str] = {
    "rollout.temperature": "0 is greedy: the responses of a group would all be the same",
}


@dataclass
class Faults:
    """What is wrong with a recipe, in the order found.

    ``keys`` are wrong and not to be judged any further; ``copied`` are judged where they were copied from.
    """

    lines: list[tuple[str, str]] = field(default_factory=list)  # (place, sentence)
    keys: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)

    def add(self, place: str, key: str, text: str, *also: str | None) -> None:
        self.keys.update(k for k in (key, *also) if k)
        if not _below(key, self.copied):
            self.lines.append((place, text))

    def add_finding(self, place: str, finding: Finding) -> None:
        """Adds an error, unless it rests on a key that is wrong itself (or missing because it is misspelt)."""
        touched = any(_below(name, self.keys) for name in (finding.key, *finding.related))
        if finding.severity == "error" and not touched and finding.key not in self.copied:
            self.lines.append((place, finding.sentence))


def _below(name: str, keys: Iterable[str]) -> bool:
    """Whether a dotted name is one of the keys, or inside one."""
    return any(name == key or name.startswith((f"{key}.", f"{key}[")) for key in keys)


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), command: Command = "train", *, inspect: bool = False
) -> Recipe:
    """The recipe in a TOML file, with ``--section.key value`` overrides, checked as a whole.

    Args:
        path: a TOML file.
        overrides: words of a command line, ``["--train.num_steps", "5", "--data.seed=3"]``. A value is read by the
            type of its key: text bare, everything else as a TOML literal; ``none`` takes the key out of the recipe.
        command: what the recipe is for; ``sft`` and ``check`` do not need [data] where only [sft] is used.
        inspect: open what the recipe names too: the data row by row, the model's config and sizes, the rewards.

    Raises:
        ConfigError: one sentence per fault, all faults of the recipe (and its data) at once, each with file and line.
    """
    source = read_source(Path(path))
    faults = Faults()
    tree = copy.deepcopy(source.tree)
    overridden = set()
    for name, text in _pairs(overrides):
        known = _resolve_name(name)
        overridden.add(known)
        _set_value(tree, known, text, faults)
    place = _Places(source, frozenset(overridden))
    faults.copied |= apply_preset(tree) | _inherit_eval(tree)
    recipe = _validate(tree, place, faults)
    if recipe is not None:
        found = [*check_recipe(recipe, command), *check_files(recipe)]
        found += _written_secrets(tree)
        if inspect:
            wrong = {finding.key for finding in found if finding.severity == "error"}
            found += [f for f in inspect_recipe(recipe, command) if not wrong & {f.key, *f.related}]
        for finding in found:
            faults.add_finding(place(finding.key), finding)
    if recipe is None or faults.lines:
        raise ConfigError(_report(source.path, faults.lines))
    return recipe


def _written_secrets(tree: Mapping[str, Any], prefix: str = "") -> list[Finding]:
    """Values that are those of secret variables: the recipe is copied into the run directory."""
    found = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            found += _written_secrets(value, f"{key}.")
        elif (hidden := redact(toml_value(value))) != toml_value(value):
            text = f"{hidden} was replaced here: a recipe is kept with the run, so read the secret from the environment"
            found.append(Finding("error", key, text))
    return found


def inspect_recipe(recipe: Recipe, command: Command) -> list[Finding]:
    """What is wrong with the files and functions that a recipe names, seen by opening them; nothing is loaded."""
    return [*reward_findings(recipe), *model_findings(recipe), *data_findings(recipe, command)]


def _report(path: Path, lines: Iterable[tuple[str, str]]) -> str:
    """One line per fault: those of the file in its order, then those of the command line."""

    def order(line: tuple[str, str]) -> tuple[bool, int]:
        number = line[0].rpartition(":")[2]
        return line[0].startswith("--"), int(number) if number.isdecimal() else 0

    unique = [f"{place}: {sentence}" for place, sentence in sorted(dict.fromkeys(lines), key=order)]
    if len(unique) == 1:
        return unique[0]
    return "\n  ".join([f"{path} has {len(unique)} faults:", *unique])


@dataclass(frozen=True)
class _Places:
    """Where a key was set: the command line or a line of the file."""

    source: Source
    overridden: frozenset[str]

    def __call__(self, key: str) -> str:
        for name in self.overridden:
            if _below(key, [name]):
                return f"--{name}"
        return self.source.place(key)


# Overrides.


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """(dotted name, text) of ``--name value`` and ``--name=value``."""
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") and not equals:
            raise ConfigError(f"{word!r} is not an override; write --section.key value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} has no value; write --{name} VALUE")
            text = rest.pop(0)
        pairs.append((name.strip(), text))
    return pairs


def _resolve_name(name: str) -> str:
    """The name with ``-`` read as ``_`` where that makes it a known key."""
    snake = name.replace("-", "_")
    return snake if snake in recipe_keys() or snake in recipe_sections() else name


def _set_value(tree: dict[str, Any], name: str, text: str, faults: Faults) -> None:
    *parents, leaf = name.split(".")
    node = tree
    for depth, parent in enumerate(parents):
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            inside = ".".join(parents[: depth + 1])
            faults.add(f"--{name}", name, f"{inside} is not a table; it has no key {leaf}")
            return
        node = child
    if _unsets(name, text):
        node.pop(leaf, None)
    else:
        node[leaf] = _parse(name, text)


def _unsets(name: str, text: str) -> bool:
    """Whether ``none`` takes this key out of the recipe; not where "none" is one of its values."""
    if text != "none" or name not in {*recipe_keys(), *recipe_sections()}:
        return False
    if name in recipe_sections():
        return True
    members = flat_types(recipe_keys()[name].field.annotation)
    return not any(get_origin(member) is Literal and "none" in get_args(member) for member in members)


def _parse(name: str, text: str) -> Any:
    """The value that ``text`` means for this key; text stays text where nothing else fits, to be refused by type."""
    key = recipe_keys().get(name)
    if key is not None and admits_text(key.field.annotation):
        return text
    if key is not None and key.field.annotation is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        parsed = tomllib.loads(f"value = {text}")
        return parsed["value"] if parsed.keys() == {"value"} else text
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _inherit_eval(tree: dict[str, Any]) -> set[str]:
    """Completes [data.eval] from [data]: the format always, the source where it names none. Returns the keys copied."""
    data = tree.get("data")
    held_out = data.get("eval") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(held_out, dict):
        return set()
    own_source = "path" in held_out or "task" in held_out
    shared = _SHARED_FORMAT + (() if own_source else _SHARED_SOURCE)
    names = [name for name in shared if name in data and name not in held_out]
    held_out.update({name: copy.deepcopy(data[name]) for name in names})
    return {f"data.eval.{name}" for name in names}


# Validation.


def _validate(tree: dict[str, Any], place: _Places, faults: Faults) -> Recipe | None:
    """The recipe without the keys that are wrong; None if even that is none. Each wrong key becomes a fault."""
    tree.setdefault("model", {})
    for _ in range(8):  # each round takes the wrong keys out; nested faults can need another round
        try:
            return Recipe.model_validate_json(json.dumps(tree, default=str), strict=True)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                _add_fault(details, place, faults)
                _remove(tree, _removable(details))
    return None


def _add_fault(details: ErrorDetails, place: _Places, faults: Faults) -> None:
    loc = details["loc"]
    key = _dotted(loc)
    schema_key = ".".join(str(part) for part in loc if isinstance(part, str))
    value = details["input"]
    if details["type"] == "extra_forbidden":
        if len(loc) == 1 and isinstance(value, dict):
            guess = guess_section(key, list(value))
        else:
            guess = guess_key(schema_key)
        faults.add(place(key), key, f"{key}: {guess.text}", guess.target)
    elif schema_key in recipe_sections():
        kind = "a list of tables" if schema_key == "reward.functions" else "a table"
        faults.add(place(key), key, f"{key} = {_shown(value)}: must be {kind} (a section of the recipe)")
    elif details["type"] == "missing" and isinstance(loc[-1], str):
        faults.add(place(key), _dotted(_removable(details)), f"{key}: is missing; it must be {_expected(schema_key)}")
    else:
        whole = _dotted(_removable(details))
        subject = f"{whole} " if whole != key and schema_key == whole else ""
        shown = f"{key} = {_shown(value)}" if details["type"] != "missing" else f"{key} is missing"
        faults.add(place(key), whole, f"{shown}: {subject}must be {_expected(schema_key)}")


def _expected(schema_key: str) -> str:
    key = recipe_keys()[schema_key]
    default = None if key.required else key.default
    notes = [] if default in (None, {}, ()) else [f"the default is {toml_value(default)}"]
    known = "; ".join([*notes, *([_HINTS[schema_key]] if schema_key in _HINTS else [])])
    return f"{key.expects} ({known})" if known else key.expects


def _shown(value: Any) -> str:
    text = toml_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _dotted(loc: Sequence[str | int]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def _removable(details: ErrorDetails) -> tuple[str | int, ...]:
    """What has to go so that the rest can be judged: the key; for a wrong or incomplete list item the whole list."""
    loc = details["loc"]
    if isinstance(loc[-1], str) and details["type"] != "missing":
        return tuple(loc)
    first = next((index for index, part in enumerate(loc) if isinstance(part, int)), len(loc))
    return tuple(loc[:first])


def _remove(tree: dict[str, Any], path: Sequence[str | int]) -> None:
    *parents, leaf = path
    node: Any = tree
    for parent in parents:
        known = isinstance(node, list) or (isinstance(node, dict) and parent in node)
        node = node[parent] if known else None  # type: ignore[index]
    if isinstance(node, dict):
        node.pop(leaf, None)
    tree.setdefault("model", {})
