"""The text of a recipe: reading it, finding the line of a key, and writing a recipe back as TOML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config.schema import Recipe, Section
from gspo.errors import ConfigError

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_ASSIGNMENT = re.compile(rf"^\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")
_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")


@dataclass(frozen=True)
class Source:
    """A recipe file as it was read."""

    path: Path
    tree: dict[str, Any]
    lines: Mapping[str, int]  # dotted key or section, e.g. "reward.functions[0].name" -> line, from 1

    def place(self, key: str) -> str:
        """ "recipe.toml:12" of the key or of the nearest section around it; "recipe.toml" if neither is there."""
        while key:
            if key in self.lines:
                return f"{self.path}:{self.lines[key]}"
            key = key.removesuffix("]").rpartition("[")[0] if key.endswith("]") else key.rpartition(".")[0]
        return str(self.path)


def read_source(path: Path) -> Source:
    """Reads a TOML file.

    Raises:
        ConfigError: the file is missing, cannot be read, is not UTF-8 or not TOML (with line and column).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such recipe file{_similar_files(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a recipe is a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as a recipe: {error.strerror}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_broken(path, str(error))) from None
    return Source(path, tree, dict(reversed(list(_key_lines(text)))))


def _similar_files(path: Path) -> str:
    names = sorted(file.name for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    return f"; {path.parent}/ has {', '.join(names[:5])}" if names else ""


def _broken(path: Path, message: str) -> str:
    place = _PLACE.search(message)
    if place is None:
        return f"{path}: not valid TOML: {message}"
    text = _PLACE.sub("", message).strip()
    return f"{path}:{place[1]}: not valid TOML at column {place[2]}: {text}"


def _key_lines(text: str) -> Iterator[tuple[str, int]]:
    """Line numbers of headers and assignments; lines inside multi-line strings are passed over."""
    prefix, counts, quote = "", {}, ""  # type: str, dict[str, int], str
    for number, line in enumerate(text.splitlines(), start=1):
        if quote:
            quote = "" if quote in line else quote
            continue
        if header := _HEADER.match(line):
            prefix = _plain(header[2])
            if header[1] == "[[":
                counts[prefix] = counts.get(prefix, -1) + 1
                yield prefix, number
                prefix = f"{prefix}[{counts[prefix]}]"
            yield prefix, number
        elif assignment := _ASSIGNMENT.match(line):
            name = _plain(assignment[1])
            yield f"{prefix}.{name}" if prefix else name, number
        quote = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def toml_value(value: Any) -> str:
    """A value as a TOML literal.

    >>> toml_value({"max_digits": 2, "words": ("a", "b")})
    '{ max_digits = 2, words = ["a", "b"] }'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Section):
        return toml_value({name: item for name, item in value if name in value.model_fields_set})
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_bare(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return str(value)


def _bare(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def recipe_text(recipe: Recipe) -> str:
    """The resolved recipe as TOML: keys left at their defaults are comments, so that it loads to an equal recipe."""
    return "\n".join(_section_lines("", recipe)).strip() + "\n"


def _section_lines(prefix: str, section: Section) -> Iterator[str]:
    nested: list[tuple[str, Section]] = []
    for name, value in section:
        if isinstance(value, Section):
            nested.append((name, value))
        elif value is None:
            yield f"# {name} is not set"
        else:
            mark = "" if name in section.model_fields_set else "# "
            yield f"{mark}{name} = {toml_value(value)}"
    for name, inner in nested:
        yield ""
        yield f"[{prefix}{name}]"
        yield from _section_lines(f"{prefix}{name}.", inner)
