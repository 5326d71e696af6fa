import pytest
import torch

from gspo.train.checkpoint import checkpoint_name, checkpoints, keep_last, save_checkpoint

from .test_step import policy


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


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    trained = policy()
    path = save_checkpoint(trained, tmp_path / "step-000001")
    before = {p.name: p.stat().st_size for p in path.iterdir()}

    def disk_full(self, directory):
        directory.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(trained), "save", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(trained, path)
    assert {p.name: p.stat().st_size for p in path.iterdir()} == before
    assert checkpoints(tmp_path) == [path]


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 9):
        (tmp_path / checkpoint_name(step)).mkdir()
    (tmp_path / "sft").mkdir()
    keep_last(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sft", "step-000009", "step-000010"]
