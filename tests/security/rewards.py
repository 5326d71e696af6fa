"""Rewards that give away what they can see; nothing heavy is imported, for the sake of verifier processes."""

from __future__ import annotations

import os

SECRETS = {
    "HF_TOKEN": "hf_Zr83nVq1",
    "WANDB_API_KEY": "wk-9f2eb7c041d3",
    "AWS_SECRET_ACCESS_KEY": 'quote"and\\slash',
    "database_password": "pässwörd-1",
    "OPENAI_API_KEY": "sk-7Tq2aa81",
}


def secrets(completions: list[str]) -> list[float]:
    """Raises with the values of the variables that tests set."""
    raise ValueError(" ".join(os.environ.get(name, "unset") for name in SECRETS))


def secrets_in_scores(completions: list[str]) -> list[object]:
    """Unscored, with the values as the reason."""
    from gspo.rewards.base import Unscored

    return [Unscored(" ".join(os.environ.get(name, "unset") for name in SECRETS)) for _ in completions]
