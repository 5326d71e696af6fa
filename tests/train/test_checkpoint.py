"""Checkpoints: loadable elsewhere, complete for going on, whole or refused by name, and never in each other's way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from gspo.errors import ModelError
from gspo.train.checkpoint import (
    CheckpointError,
    TrainerState,
    checkpoint_name,
    checkpoints,
    keep,
    load_trainer_state,
    newest_good,
    optimizer_state,
    partial_name,
    remove_leftovers,
    restore_optimizer,
    save_checkpoint,
    verify_model,
)
from gspo.train.manifest import read_manifest, verify

from .test_step import optimizer, policy


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint of a mixture of experts after one update."""
    trained = policy("qwen3_moe")
    opt = optimizer(trained.model)
    sum(p.square().sum() for p in trained.model.parameters()).backward()
    opt.apply()
    state = TrainerState(
        optimizer_state(trained, opt),
        {"step": 3, "num_updates": 1, "pass@1": 0.5},
        {"0/log_s": torch.tensor([float("nan"), 1e-9])},
    )
    return save_checkpoint(trained, tmp_path_factory.mktemp("saved") / checkpoint_name(3), state, {"recipe": "abc"})


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints" / saved.name))


def test_a_checkpoint_is_a_directory_that_from_pretrained_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = policy("qwen3_moe")
    path = save_checkpoint(trained, tmp_path / "checkpoints" / checkpoint_name(3))
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ours = trained.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    assert tokenizer("1+2=")["input_ids"] == trained.tokenizer("1+2=")["input_ids"]
    assert tokenizer.chat_template == trained.tokenizer.chat_template
    assert [p.name for p in path.parent.iterdir()] == ["step-000003"]  # nothing half-written is left


def test_the_manifest_names_every_file_and_tensor_with_shape_and_dtype(saved):
    manifest = verify(saved)
    files = {p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == files - {"manifest.json"}
    assert manifest["recipe"] == "abc"
    tensors = manifest["files"]["model.safetensors"]["tensors"]
    # Vocabulary of 100, hidden size 32 (test_step.TINY).
    assert tensors["model.embed_tokens.weight"]["shape"] == [100, 32]
    assert {entry["dtype"] for entry in tensors.values()} == {"F32"}
    moments = manifest["files"]["trainer/optimizer.safetensors"]["tensors"]
    assert {name.split("/")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}


def test_the_optimizer_goes_on_bit_for_bit(saved):
    one, other = policy("qwen3_moe"), policy("qwen3_moe")
    first, second = optimizer(one.model), optimizer(other.model)

    def train(trained, opt, factor):
        opt.zero_grad()
        sum(p.square().sum() * factor for p in trained.model.parameters()).backward()
        opt.apply()

    train(one, first, 1.0)
    other.model.load_state_dict(one.model.state_dict())
    restore_optimizer(other, second, optimizer_state(one, first), first.update)
    for factor in (0.3, 2.0):
        train(one, first, factor)
        train(other, second, factor)
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))
    assert second.update == 3
    state = {"exp_avg/nothing.weight": torch.zeros(2)}
    with pytest.raises(ModelError, match=r"nothing\.weight"):
        restore_optimizer(other, second, state, 1)


def test_trainer_state_comes_back(saved):
    state = load_trainer_state(saved)
    assert state.position == {"step": 3, "num_updates": 1, "pass@1": 0.5}
    log_s = state.calibration["0/log_s"]
    assert bool(log_s[0].isnan())
    assert log_s[1] == torch.tensor(1e-9)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors", "config.json", "tokenizer.json",
                                  "trainer/state.json", "trainer/calibration.safetensors"])  # fmt: skip
def test_a_single_flipped_bit_is_found_wherever_it_is(copy, name):
    path = copy / name
    whole = path.read_bytes()
    for place in {0, 9, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ModelError, match="damaged") as caught:
            verify(copy)
        assert name in str(caught.value)
    path.write_bytes(whole)
    verify(copy)


def test_damage_is_named_by_tensor(copy):
    path = copy / "model.safetensors"
    whole = bytearray(path.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    start, _ = header["model.norm.weight"]["data_offsets"]
    whole[8 + length + start] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight"):
        verify(copy)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, -1])
def test_a_file_that_is_cut_off_is_named(copy, keep_bytes):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors.*damaged"):
        verify(copy)


def test_missing_files_and_manifests_are_named(copy):
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        verify(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(ModelError, match=r"manifest\.json: damaged"):
        read_manifest(copy)
    (copy / "manifest.json").write_text('{"format": 99, "files": {}}')
    with pytest.raises(ModelError, match="format 99"):
        read_manifest(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"has no manifest\.json"):
        verify(copy)


def test_the_newest_good_one_is_offered(copy):
    folder = copy.parent
    newer = Path(shutil.copytree(copy, folder / checkpoint_name(4)))
    with (newer / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    path, faults = newest_good(folder)
    assert path == copy
    assert len(faults) == 1
    assert "step-000004/model.safetensors" in faults[0]
    with pytest.raises(ModelError, match=r"step-000004/model.safetensors.*The newest good one is .*step-000003"):
        verify_model(newer)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no checkpoint of this run is whole: .*step-000004.*step-000003"):
        newest_good(folder)
    assert newest_good(folder / "nothing") == (None, [])


def test_weights_without_a_position_are_no_place_to_go_on_from(tmp_path):
    path = save_checkpoint(policy(), tmp_path / partial_name(5))
    assert checkpoints(tmp_path) == []
    with pytest.raises(ModelError, match="weights only"):
        load_trainer_state(path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    trained = policy()
    path = save_checkpoint(trained, tmp_path / "step-000001")
    before = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}

    def disk_full(self, directory):
        directory.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(trained), "save", disk_full)
    # TINY has about 23 thousand float32 weights: 0.09 MB.
    with pytest.raises(CheckpointError, match=r"No space left.*needs about \d+ MB.*MB are free.*--resume"):
        save_checkpoint(trained, path)
    assert {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_disk_that_fills_up_during_the_manifest_is_the_same(tmp_path, monkeypatch):
    trained = policy()
    path = save_checkpoint(trained, tmp_path / "step-000001")

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(trained, tmp_path / "step-000002")
    verify(path)
    assert checkpoints(tmp_path) == [path]


def test_only_the_newest_and_the_best_are_kept(tmp_path):
    for step, rate in ((1, 0.5), (2, 0.9), (3, None), (10, 0.7), (9, 0.9), (11, "nan")):
        folder = tmp_path / checkpoint_name(step)
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "state.json").write_text(json.dumps({} if rate is None else {"pass@1": rate}))
    (tmp_path / "sft").mkdir()
    keep(tmp_path, last=2, best=1)
    # The newest two, and of the two with 0.9 the newer.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sft", "step-000009", "step-000010", "step-000011"]
    keep(tmp_path, last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sft", "step-000011"]


def test_leftovers_of_a_dead_process_are_cleared_and_what_was_moved_aside_comes_back(copy):
    folder = copy.parent
    copy.rename(folder / f".{copy.name}.replaced")
    (folder / ".step-000004.writing").mkdir()
    (folder / ".step-000002.removing").mkdir()
    remove_leftovers(folder)
    assert [p.name for p in folder.iterdir()] == [copy.name]
    verify(copy)


def test_nothing_is_unpickled(copy):
    """No file of a checkpoint is a pickle or an archive of pickles, and no module of ours loads one."""
    for path in copy.rglob("*"):
        if path.is_file():
            assert path.suffix in (".json", ".safetensors", ".jinja"), path
            assert path.read_bytes()[:2] not in (b"\x80\x02", b"PK"), path
    import gspo.train

    for path in Path(gspo.train.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "torch.load(" not in text, path
        assert "import pickle" not in text, path
