"""An own reward: right answers earn 1, and among right answers short ones earn a little more.

In the recipe::

    [[reward.functions]]
    name = "examples.custom_reward:right_and_short"     # or "examples/custom_reward.py:right_and_short"
    options = { target_characters = 200 }

Try it without a model: ``python examples/custom_reward.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo.rewards.base import RewardSet, WeightedReward, completion_text
from gspo.rewards.number import verify
from gspo.types import Prompt


def right_and_short(
    completions: Sequence[Any], answer: Sequence[str], target_characters: int = 200
) -> list[float | None]:
    """One value per completion; ``answer`` is the column of that name, None says that the row is not judged."""
    values: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion_text(completion)
        correct = verify(str(gold), text).correct
        bonus = 0.1 * max(0.0, 1.0 - len(text) / target_characters)
        values.append(None if correct is None else float(correct) * (1.0 + bonus))
    return values


def main() -> None:
    prompt = Prompt(id="demo", content="2+2=", token_ids=(1,), columns={"answer": "4"})
    texts = ["4", "Two and two make four, which is written 4.", "5"]
    rewards = RewardSet([WeightedReward("right_and_short", right_and_short)])
    for text, score in zip(texts, rewards.score([prompt] * 3, texts, [[1]] * 3), strict=True):
        print(f"{score.value:.3f}  {text}")


if __name__ == "__main__":
    main()
