"""Writes docs/configuration.md from the schema: ``python -m gspo.config.document > docs/configuration.md``."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.keys import FOREIGN_NAMES, Key, recipe_keys, recipe_sections
from gspo.config.source import toml_value

_INTRODUCTION = """\
# Every key of a recipe

A recipe is a TOML file. Each key can be overridden on the command line:

```
gspo train recipe.toml --train.num_steps 20 --rollout.stop_strings '["\\n"]' --data.num_prompts none
```

Text is written bare, everything else as a TOML literal; `none` takes a key out of the recipe. Paths are relative to
the working directory. A key that does not exist, or that has no effect beside the other keys, is an error.
`gspo check recipe.toml` prints the resolved recipe and runs nothing.

This page is generated from `src/gspo/config/schema.py` by `python -m gspo.config.document`.
"""


def document() -> str:
    """The page as Markdown."""
    return "\n".join([_INTRODUCTION, *_section_tables(), *_foreign_table()]) + "\n"


def _section_tables() -> Iterator[str]:
    keys = recipe_keys().values()
    for section, model in recipe_sections().items():
        title = f"[[{section}]]" if section == "reward.functions" else f"[{section}]"
        text = (model.__doc__ or "").partition(":")[2].strip()
        yield f"## `{title}`\n\n{text[:1].upper()}{text[1:].rstrip('.')}.\n"
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        for key in keys:
            if key.section == section:
                yield _row(key)
        yield ""


def _row(key: Key) -> str:
    cells = (f"`{key.name.rpartition('.')[2]}`", key.expects, _default(key), key.field.description or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "not set" if key.default is None else f"`{toml_value(key.default)}`"


def _foreign_table() -> Iterator[str]:
    yield "## Names in other frameworks\n\nNot accepted, but the error names the key that is meant.\n"
    yield "| there | here |\n|---|---|"
    for foreign, ours in sorted(FOREIGN_NAMES.items()):
        yield f"| `{foreign}` | `{ours}` |"


if __name__ == "__main__":
    print(document(), end="")
