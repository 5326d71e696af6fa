"""What the README and the examples show, run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from gspo.config import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The first code block of that language in the README."""
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_custom_reward_example_prefers_the_short_right_answer() -> None:
    shown = subprocess.run(
        [sys.executable, "examples/custom_reward.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    short, long, wrong = (float(line.split()[0]) for line in shown.splitlines())
    assert short > long > wrong == 0


def test_the_recipe_of_the_readme_is_right(tmp_path: Path) -> None:
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    text = block("toml")
    for name in ("train.jsonl", "held_out.jsonl"):
        text = text.replace(f'"{name}"', f'"{tmp_path / name}"')
    (tmp_path / "my_rewards.py").write_text("def brevity(completions):\n    return [1.0 for _ in completions]\n")
    text = text.replace('"my_rewards.py:', f'"{tmp_path / "my_rewards.py"}:')
    (tmp_path / "my.toml").write_text(text)
    recipe = load_recipe(tmp_path / "my.toml")
    assert recipe.objective.clip == "calibrated"
    assert len(recipe.reward.functions) == 2


def test_the_python_of_the_readme_runs() -> None:
    names = {
        "rewards": [1.0, 0.0, None, 1.0],
        "group_ids": ["a", "a", "b", "b"],
        "logprobs": torch.full((4, 3), -1.0, requires_grad=True),
        "old_logprobs": torch.full((4, 3), -1.0),
        "response_mask": torch.ones(4, 3, dtype=torch.bool),
    }
    exec(block("python"), names)
    # Ratio 1 everywhere: the loss is minus the mean advantage, and a pair's advantages cancel.
    assert float(names["loss"]) == 0.0


def test_every_file_that_the_readme_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target
