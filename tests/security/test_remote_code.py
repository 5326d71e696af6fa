"""Python code shipped with weights runs only where the recipe asks for it by name, and then the events say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.cli import main
from gspo.errors import ModelError
from gspo.events import read_events

from .runs import train

CONFIG = """
import os
from transformers import Qwen3Config
open(os.environ["MARKER"], "a").write("config ")
class OwnConfig(Qwen3Config):
    model_type = "own"
"""
MODEL = """
import os
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
open(os.environ["MARKER"], "a").write("model ")
class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory whose classes are in files beside its weights; they write to a marker when they run."""
    from gspo.policy.tiny import tiny_model

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    model, tokenizer = tiny_model("qwen3", sizes)
    directory = tmp_path / "own_model"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "configuration_own.py").write_text(CONFIG)
    (directory / "modeling_own.py").write_text(MODEL)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return directory


def test_it_is_not_run_unless_asked_for(own_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"trust_remote_code|custom code"):
        train(tmp_path, model=f'\npath = "{own_model}"\n')
    assert not (tmp_path / "marker").exists()


def test_asked_for_it_runs_and_the_events_say_so(own_model: Path, tmp_path: Path) -> None:
    run = train(tmp_path, model=f'\npath = "{own_model}"\ntrust_remote_code = true\n')
    assert "model" in (tmp_path / "marker").read_text()
    warnings = [event["message"] for event in read_events(run / "events.jsonl") if event["type"] == "warning"]
    assert [text for text in warnings if "trust_remote_code" in text and str(own_model) in text]


def test_pickled_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gspo.policy.causal_lm import load_policy
    from gspo.policy.tiny import tiny_model

    model, tokenizer = tiny_model("qwen3", {"num_hidden_layers": 1, "hidden_size": 32})
    directory = tmp_path / "model"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(
        b"\x80\x04cos\nsystem\n(S'touch " + str(tmp_path).encode() + b"/x'\ntR."
    )
    with pytest.raises(ModelError):
        load_policy(directory)
    assert not (tmp_path / "x").exists()
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[model]\npath = "{directory}"\n[data]\ntask = "arithmetic:addition"\n')
    assert main(["check", str(recipe)]) == 2
    assert "as a pickle only (pytorch_model.bin)" in capsys.readouterr().err
