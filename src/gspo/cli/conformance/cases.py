"""Files of worked cases.

A file is a JSON list of cases, one case, or a table of answers (``{"policy": ..., "triples": [...]}``), which is one
case. An input of the form ``{"base": "ID", ...}`` takes over the input of another case of the same file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.cli.conformance.model import Case
from gspo.errors import DataError


def read_cases(file: Path) -> list[Case]:
    """The cases of a file, with their references to other cases resolved.

    Raises:
        DataError: the file cannot be read, or is not a list of cases.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if isinstance(content, dict):
        content = _single(content, Path(file).stem)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise DataError(f"{file} is not a list of cases; each case is an object with id, input and expected")
    by_id = {str(entry.get("id")): entry for entry in content}
    return [_case(entry, by_id, file, position) for position, entry in enumerate(content)]


def _single(content: dict[str, Any], name: str) -> list[dict[str, Any]] | None:
    """One case that stands alone, or a table of answers."""
    if "input" in content:
        return [content]
    if isinstance(content.get("triples"), list):
        return [{"id": name, "title": "table of answers", "rule": content.get("policy", ""), "input": content}]
    return None


def _case(entry: Mapping[str, Any], by_id: Mapping[str, Mapping[str, Any]], file: Path, position: int) -> Case:
    """An input that is neither object nor list becomes an empty one: it will not be understood."""
    name = str(entry.get("id", f"#{position}"))
    given = entry.get("input")
    if isinstance(given, dict):
        given = _with_base(given, name, by_id, file)
    expected = entry.get("expected")
    return Case(
        id=name,
        title=str(entry.get("title", "")),
        input=given if isinstance(given, dict | list) else {},
        expected=expected if isinstance(expected, dict) else {},
        faults=_flat(_object(entry, "known_wrong_answers")),
        tolerance=str(entry.get("tolerance", "")),
        rule=str(entry.get("rule", "")),
        remark=expected if isinstance(expected, str) else "",
    )


def _with_base(
    given: Mapping[str, Any], name: str, by_id: Mapping[str, Mapping[str, Any]], file: Path
) -> dict[str, Any]:
    result, seen = dict(given), {name}
    while (base := result.pop("base", None)) is not None:
        if str(base) not in by_id or str(base) in seen:
            raise DataError(f"{file}: case {name!r} refers to case {base!r}, which is not in the file")
        seen.add(str(base))
        result = {**_object(by_id[str(base)], "input"), **result}
    return result


def _object(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = entry.get(key)
    return dict(value) if isinstance(value, dict) else {}


def _flat(faults: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined with a slash."""
    result: dict[str, Any] = {}
    for name, value in faults.items():
        if isinstance(value, dict):
            result |= _flat(value, f"{prefix}{name}/")
        else:
            result[f"{prefix}{name}"] = value
    return result
