"""Checkpoints are Hugging Face directories: written beside, then renamed, so that a half-written one never has the
name of a whole one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from gspo.policy.causal_lm import CausalPolicy

_NAME = re.compile(r"step-(\d+)")


def save_checkpoint(policy: CausalPolicy, directory: Path) -> Path:
    """Writes weights, config and tokenizer to ``directory``, replacing what was there only once all is written."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = directory.with_name(f".{directory.name}.writing-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    policy.save(beside)
    shutil.rmtree(directory, ignore_errors=True)
    beside.rename(directory)
    return directory


def checkpoint_name(step: int) -> str:
    """``step-000012``: sorts by step as text."""
    return f"step-{step:06d}"


def checkpoints(directory: Path) -> list[Path]:
    """The step checkpoints below ``directory``, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def keep_last(directory: Path, number: int) -> None:
    """Deletes all but the newest ``number`` step checkpoints."""
    for path in checkpoints(directory)[:-number]:
        shutil.rmtree(path)
