"""A run of two steps that has everything a resume must put back, and what two such runs are compared by."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.config import Recipe, load_recipe
from gspo.events import read_events

DENSE = """
[model]
tiny = "qwen3"
tiny_config = { hidden_size = 16, num_hidden_layers = 1, intermediate_size = 16, num_attention_heads = 2, \
num_key_value_heads = 1, head_dim = 16 }
"""
MOE = """
[model]
tiny = "qwen3_moe"
tiny_config = { hidden_size = 16, num_hidden_layers = 1, intermediate_size = 16, num_attention_heads = 2, \
num_key_value_heads = 1, head_dim = 16, moe_intermediate_size = 8, num_experts = 4 }
"""
#: Of this seed both models move outward in both steps, so that the bounds are calibrated within them.
REST = """
[run]
seed = 1
[data]
path = "{data}"
[data.eval]
path = "{held_out}"
[rollout]
prompts_per_step = 3
group_size = 2
max_new_tokens = 4
[reward]
functions = [{{ name = "tests.resume.runs:reward" }}]
audit = false
[objective]
clip = "calibrated"
calibration_steps = 2
kl_coefficient = 0.01
[train]
num_steps = 2
warmup_steps = 0
num_mini_batches = 2
learning_rate = 1e-2
groups_without_signal = "refill"
max_refills = 1
[eval]
num_samples = 2
threshold = 0.5
every = 1
[checkpoint]
every = 1
keep_last = 1
"""


#: Names a file with a signal and the number of the call at which the reward sends it to its own process.
SIGNAL_FILE = "GSPO_TEST_SIGNAL_FILE"
_calls = itertools.count(1)


def reward(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """Has spread in most groups of a random model, and none in some."""
    number = next(_calls)
    request = Path(os.environ.get(SIGNAL_FILE, "/nowhere"))
    if request.exists():
        name, call = request.read_text().split()
        if number == int(call):
            request.unlink()
            os.kill(os.getpid(), signal.Signals[name])
    return [(sum(ids) % 4) / 4 for ids in completion_ids]


def make_recipe(folder: Path, model: str = DENSE, *words: str) -> Recipe:
    """Five training prompts, so that the second step crosses an epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train", range(5)), ("held_out", range(5, 7))):
        rows = [json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) for n in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    path = folder / "recipe.toml"
    path.write_text(model + REST.format(data=folder / "train.jsonl", held_out=folder / "held_out.jsonl"))
    return load_recipe(path, words)


def outcome(run_dir: Path) -> dict[str, Any]:
    """Everything a run leaves, but for times and for how often it was continued."""
    found: dict[str, Any] = {
        "events": [
            {name: value for name, value in event.items() if name not in ("time", "seconds")}
            for event in read_events(run_dir / "events.jsonl")
        ],
        "summary": {
            name: value
            for name, value in json.loads((run_dir / "summary.json").read_text()).items()
            if name != "seconds"
        },
        "recipe": (run_dir / "recipe.toml").read_text(),
        "checkpoints": sorted(path.name for path in (run_dir / "checkpoints").iterdir()),
    }
    for path in sorted((run_dir / "checkpoints").rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        # The manifest has the digest of state.json; a tokenizer that was loaded says so in its configuration.
        if path.is_dir() or path.name in ("manifest.json", "tokenizer_config.json"):
            continue
        if path.name == "state.json":  # the events' times have other numbers of digits
            state = json.loads(path.read_text())
            assert state.pop("events_size") <= (run_dir / "events.jsonl").stat().st_size
            found[name] = state
        else:
            found[name] = path.read_bytes()
    return found
