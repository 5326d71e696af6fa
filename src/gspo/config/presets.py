"""Presets: what a recipe leaves open, filled in as a published setting has it (docs/algorithms/presets.md).

A preset never overrules a key that the recipe has, and its keys are not held against the recipe: one that has no
effect beside the others is dropped in silence, since nobody wrote it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_PAPER: Final[Mapping[str, Any]] = {
    "objective.name": "gspo",
    "objective.clip": "paper",
    "objective.correction.kind": "none",
    "advantage.scale": "group_std",
    "train.num_mini_batches": 4,
    "train.old_logprobs": "recompute",
    "train.groups_without_signal": "keep",
    "train.truncated": "keep",
    "moe.replay": "none",
}

#: Dotted keys and values by preset.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "paper": _PAPER,
        "paper_5_4": {**_PAPER, "train.old_logprobs": "engine"},
        "modern": {
            **_PAPER,
            "objective.clip": "calibrated",
            "train.old_logprobs": "auto",
            "train.groups_without_signal": "refill",
            "moe.replay": "r3",
        },
    }
)


def apply_preset(tree: dict[str, Any]) -> set[str]:
    """Completes a recipe in place; returns the keys whose values are the preset's.

    A tree in which the keys stand already (a recipe that was written back) gives the same answer. An unknown preset, or
    a section that is no table, is left for the validation to refuse.
    """
    run = tree.get("run")
    name = run.get("preset") if isinstance(run, dict) else None
    keys: set[str] = set()
    for key, value in PRESETS.get(name, {}).items() if isinstance(name, str) else ():
        *parents, leaf = key.split(".")
        node: Any = tree
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            continue
        if node.setdefault(leaf, copy.deepcopy(value)) == value:
            keys.add(key)
    return keys
