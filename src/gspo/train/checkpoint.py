"""Checkpoints are Hugging Face directories, with what the trainer needs to go on beside the weights.

::

    checkpoints/step-000010/
    ├── config.json, model.safetensors, tokenizer.json, ...   loads with from_pretrained
    ├── trainer/optimizer.safetensors    moments and step counts, by parameter name
    ├── trainer/calibration.safetensors  log s and advantages of the measuring window, if bounds are calibrated
    ├── trainer/state.json               position: step, update, prompts, bounds, events, evaluations
    └── manifest.json                    size, digest, and shape and dtype of every tensor; versions

``checkpoints/sft`` is the end of the cold start, ``sft-000120`` a place within it.
Written beside, synced, then renamed, so that a half-written one never has the name of a whole one. Read only after it
agrees with its manifest. There is no pickle in it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.errors import ModelError, RunError
from gspo.events import sync_path, write_json
from gspo.policy.causal_lm import CausalPolicy
from gspo.train.manifest import verify, write_manifest
from gspo.train.optimizer import Optimizer

_NAME = re.compile(r"step-(\d+)")
_SFT_NAME = re.compile(r"sft-\d+")
_PARTIAL = "-partial"
_STATE = Path("trainer") / "state.json"
_OPTIMIZER = Path("trainer") / "optimizer.safetensors"
_CALIBRATION = Path("trainer") / "calibration.safetensors"


class CheckpointError(RunError):
    """A checkpoint could not be written; the earlier ones are as they were."""


@dataclass(frozen=True, eq=False)
class TrainerState:
    """What beside the weights a run needs to go on as if nothing had happened.

    position: JSON that ``train.loop.Progress`` writes and reads; floats come back bit for bit.
    """

    optimizer: Mapping[str, Tensor]
    position: Mapping[str, Any]
    calibration: Mapping[str, Tensor] = field(default_factory=dict)


def save_checkpoint(
    policy: CausalPolicy,
    directory: Path,
    trainer: TrainerState | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint to ``directory``, replacing what was there only once all is on the disk.

    Args:
        trainer: None for weights that nobody continues from.
        facts: versions and hashes for the manifest.

    Raises:
        CheckpointError: the disk is full or failing; what was there before is still there.
    """
    from safetensors import SafetensorError

    beside = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        if not directory.parent.is_dir():
            directory.parent.mkdir(parents=True)
            sync_path(directory.parent.parent)
        policy.save(beside)
        if trainer is not None:
            _write_trainer(beside, trainer)
        write_manifest(beside, facts or {})
        _put_in_place(beside, directory)
    except (OSError, SafetensorError) as error:  # the second is how the writer of tensors reports a full disk
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(_no_room(policy, directory, trainer, error)) from error
    return directory


def _write_trainer(directory: Path, trainer: TrainerState) -> None:
    from safetensors.torch import save_file

    (directory / "trainer").mkdir()
    save_file(dict(trainer.optimizer), directory / _OPTIMIZER)
    if trainer.calibration:
        save_file(dict(trainer.calibration), directory / _CALIBRATION)
    write_json(directory / _STATE, trainer.position)


def _put_in_place(beside: Path, directory: Path) -> None:
    """Renames; a checkpoint of the same name is moved aside first, since a directory cannot be replaced in one go."""
    aside = directory.with_name(f".{directory.name}.replaced")
    if directory.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(directory, aside)
    os.replace(beside, directory)
    sync_path(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _no_room(policy: CausalPolicy, directory: Path, trainer: TrainerState | None, error: Exception) -> str:
    tensors = [*policy.model.parameters(), *(trainer.optimizer.values() if trainer is not None else ())]
    need = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free = shutil.disk_usage(directory.parent).free
    what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (
        f"the checkpoint {directory} could not be written ({what}): it needs about {need / 1e6:.0f} MB and "
        f"{free / 1e6:.0f} MB are free. The checkpoints before it are whole; free space, then continue with "
        "gspo train --resume"
    )


def optimizer_state(policy: CausalPolicy, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of AdamW as ``{"exp_avg/NAME": tensor, ...}`` on the CPU."""
    found: dict[str, Tensor] = {}
    for name, parameter in policy.model.named_parameters():
        for kind, value in optimizer.inner.state.get(parameter, {}).items():
            found[f"{kind}/{name}"] = torch.as_tensor(value).detach().cpu().contiguous().clone()
    return found


def restore_optimizer(
    policy: CausalPolicy, optimizer: Optimizer, state: Mapping[str, Tensor], num_updates: int
) -> None:
    """Puts back what :func:`optimizer_state` gave, and the number of updates made.

    Raises:
        ModelError: the state is of other parameters.
    """
    parameters = dict(policy.model.named_parameters())
    restored: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (value.dim() and value.shape != parameter.shape):
            raise ModelError(f"the optimizer state has {key} {tuple(value.shape)}, which the model has not")
        # The step count stays in its own dtype and is where the fused kernel reads it.
        restored.setdefault(name, {})[kind] = value.to(parameter.device).clone()
    for name, entries in restored.items():
        optimizer.inner.state[parameters[name]] = entries
    optimizer.update = num_updates


def load_trainer_state(directory: Path) -> TrainerState:
    """What belongs to the trainer, of a checkpoint that was verified.

    Raises:
        ModelError: it has weights only.
    """
    from safetensors.torch import load_file

    if not (directory / _STATE).exists():
        raise ModelError(f"{directory} has weights only, no trainer/; a run cannot be continued from it")
    position = json.loads((directory / _STATE).read_text(encoding="utf-8"))
    calibration = load_file(directory / _CALIBRATION) if (directory / _CALIBRATION).exists() else {}
    return TrainerState(load_file(directory / _OPTIMIZER), position, calibration)


def checkpoint_name(step: int) -> str:
    """``step-000012``: sorts by step as text."""
    return f"step-{step:06d}"


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint's name."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path} is not the name of a step checkpoint")
    return int(found[1])


def partial_name(step: int) -> str:
    """Weights of a step that broke off between its updates: to be looked at, not to be continued from."""
    return checkpoint_name(step) + _PARTIAL


def checkpoints(directory: Path) -> list[Path]:
    """The step checkpoints below ``directory``, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def sft_name(update: int) -> str:
    """``sft-000120``: within the cold start, after so many of its updates."""
    return f"sft-{update:06d}"


def sft_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints within the cold start, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _SFT_NAME.fullmatch(path.name))


def newest_good(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that agrees with its manifest, and a sentence for each newer one that does not.

    Raises:
        ModelError: there are checkpoints, and none is good.
    """
    path, faults = _first_good(reversed(checkpoints(directory)))
    if faults and path is None:
        raise ModelError(
            f"no checkpoint of this run is whole: {'; '.join(faults)}. Remove {directory} to train again from the "
            "start: the rollouts in journal/ are used again"
        )
    return path, faults


def newest_sft(directory: Path) -> tuple[Path | None, list[str]]:
    """As :func:`newest_good`, of those within the cold start; None where it has to be made from its beginning."""
    return _first_good(reversed(sft_checkpoints(directory)))


def newest_before(directory: Path, step: int) -> Path | None:
    """The newest checkpoint of an earlier step than this that agrees with its manifest."""
    return _first_good(path for path in reversed(checkpoints(directory)) if checkpoint_step(path) < step)[0]


def _first_good(paths: Iterable[Path]) -> tuple[Path | None, list[str]]:
    faults: list[str] = []
    for path in paths:
        try:
            verify(path)
        except ModelError as error:
            faults.append(str(error))
            continue
        return path, faults
    return None, faults


def remove_abandoned(directory: Path, after: int, attempt: int) -> None:
    """Deletes the checkpoints of later steps than ``after`` that were taken before attempt number ``attempt``."""
    for path in checkpoints(directory):
        position = _position(path)
        if checkpoint_step(path) > after and position is not None and position.get("attempt", 0) < attempt:
            remove(path)


def verify_model(path: Path) -> None:
    """Checks a model directory that has a manifest; one without is not ours, and is left to its loader.

    Raises:
        ModelError: damaged; names the file, and the newest good checkpoint beside it if there is one.
    """
    if not (path / "manifest.json").exists():
        return
    try:
        verify(path)
    except ModelError as error:
        raise ModelError(f"{error}{_offer(path)}") from error


def _offer(path: Path) -> str:
    good, _ = _first_good(other for other in reversed(checkpoints(path.parent)) if other != path)
    return "" if good is None else f". The newest good one is {good}"


def keep(directory: Path, last: int, best: int = 0, older: int | None = None) -> None:
    """Deletes all step checkpoints but the newest ``last`` and the ``best`` of highest held-out pass@1.

    Only checkpoints taken right after an evaluation have a pass@1; of equal ones the newer is better.

    Args:
        older: those of the last so many steps are kept as well, and the newest one before them.
    """
    paths = checkpoints(directory)
    rated = [(value, path) for path in paths if (value := _pass_rate(path)) is not None]
    rated.sort(key=lambda entry: (entry[0], entry[1].name))
    kept = {*paths[-last:], *(path for _, path in rated[len(rated) - best :])}
    if older is not None and paths:
        newest = checkpoint_step(paths[-1])
        before = [path for path in paths if checkpoint_step(path) <= newest - older]
        kept.update(paths[len(before) :], before[-1:])
    for path in paths:
        if path not in kept:
            remove(path)


def _pass_rate(path: Path) -> float | None:
    value = (_position(path) or {}).get("pass@1")
    return None if value is None or math.isnan(float(value)) else float(value)


def _position(path: Path) -> dict[str, Any] | None:
    """Of a checkpoint; None where it has none, or it cannot be read."""
    try:
        return dict(json.loads((path / _STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def remove(path: Path) -> None:
    """Deletes a checkpoint; what is left if that is cut short does not have a checkpoint's name."""
    doomed = path.with_name(f".{path.name}.removing")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def remove_sft(directory: Path) -> None:
    """Deletes the checkpoints within the cold start: it is finished."""
    for path in sft_checkpoints(directory):
        remove(path)


def remove_leftovers(directory: Path) -> None:
    """Deletes what a run that died left half-written or half-trained, and puts back a checkpoint moved aside."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        name = path.name.removeprefix(".").removesuffix(".replaced")
        if path.name == f".{name}.replaced" and not (directory / name).exists():
            os.replace(path, directory / name)
        elif path.name.startswith(".") or path.name.endswith(_PARTIAL):
            shutil.rmtree(path, ignore_errors=True)
