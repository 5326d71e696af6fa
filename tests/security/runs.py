"""A run of one step on a model of a few thousand parameters, for tests that watch what it does."""

from __future__ import annotations

from pathlib import Path

from gspo import launch
from gspo.config import load_recipe

MODEL = """
tiny = "qwen3"
tiny_config = { hidden_size = 16, num_hidden_layers = 1, intermediate_size = 16, num_attention_heads = 2, \
num_key_value_heads = 1, head_dim = 16 }
"""
REST = """
[data]
task = "arithmetic:addition"
num_prompts = 4
[data.eval]
num_prompts = 2
[rollout]
prompts_per_step = 2
group_size = 2
max_new_tokens = 4
[train]
num_steps = 1
num_mini_batches = 1
[eval]
num_samples = 1
[checkpoint]
every = 0
[reward]
audit = false
"""


def train(folder: Path, more: str = "", model: str = MODEL, command: tuple[str, ...] = ("gspo", "train")) -> Path:
    """The run directory; ``more`` follows on the last section, which is [reward]."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f"[model]{model}{REST}{more}")
    launch.train(load_recipe(recipe), run_dir=folder / "run", command=command)
    return folder / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
