from __future__ import annotations

import pytest
import torch

from gspo.errors import DataError
from gspo.policy import projection
from gspo.policy.causal_lm import prepare_policy
from gspo.policy.logprobs import sequence_logprobs
from gspo.types import Sequences

from .models import gradients, plain_logprobs, small_policy, some_sequences, worst_difference


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("share", [True, False], ids=["shared prompts", "repeated prompts"])
@pytest.mark.parametrize("tied", [True, False])
def test_float64_values_entropies_and_all_gradients_equal_the_plain_model(
    kind: str, share: bool, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "CHUNK_BYTES", 0)  # chunks of 16 rows
    policy = small_policy(kind, "float64", tie_word_embeddings=tied)
    sequences = some_sequences()
    weights = torch.randn(sequences.token_ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, entropy = plain_logprobs(policy, sequences, 0.7)
    theirs = gradients(policy, (expected * weights).sum())
    result = sequence_logprobs(policy, sequences, 0.7, with_entropy=True, share_prompts=share)
    torch.testing.assert_close(result.logprobs, expected, atol=1e-11, rtol=0)
    torch.testing.assert_close(result.entropy, entropy, atol=1e-11, rtol=0)
    assert worst_difference(gradients(policy, (result.logprobs * weights).sum()), theirs) < 1e-10


def test_float32_is_within_rounding_of_the_plain_model() -> None:
    policy, sequences = small_policy(), some_sequences()
    expected, _ = plain_logprobs(policy, sequences, 1.0)
    result = sequence_logprobs(policy, sequences, 1.0)
    assert result.logprobs.dtype == torch.float32
    assert result.entropy is None
    torch.testing.assert_close(result.logprobs, expected, atol=2e-5, rtol=0)


def test_padding_is_exactly_zero_and_carries_no_gradient() -> None:
    policy, sequences = small_policy(), some_sequences()
    logprobs = sequence_logprobs(policy, sequences, 1.0).logprobs
    padding = torch.arange(9) >= sequences.lengths[:, None]
    assert logprobs[padding].eq(0).all()
    assert logprobs[~padding].lt(0).all()
    # Weights in padding change no gradient.
    weights = torch.ones_like(logprobs)
    clean = gradients(policy, logprobs.sum())
    weights[padding] = 1e9
    again = gradients(policy, (sequence_logprobs(policy, sequences, 1.0).logprobs * weights).sum())
    assert worst_difference(again, clean) < 1e-6


def test_a_prompt_is_computed_once_for_its_group() -> None:
    policy = small_policy()
    sequences = Sequences(
        (torch.arange(10, 40),), torch.zeros(8, dtype=torch.int64), torch.full((8, 5), 7), torch.full((8,), 5)
    )
    # 30 prompt tokens once, and the 4 response tokens of each row that predict something.
    assert sequence_logprobs(policy, sequences, 1.0).num_input_tokens == 30 + 8 * 4
    assert sequence_logprobs(policy, sequences, 1.0, share_prompts=False).num_input_tokens == 8 * (30 + 4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    policy, sequences = small_policy(kind), some_sequences()
    plain = gradients(policy, sequence_logprobs(policy, sequences, 1.0).logprobs.sum())
    again_policy = prepare_policy(policy.model, policy.tokenizer, "cpu", gradient_checkpointing=True)
    assert again_policy.model.is_gradient_checkpointing
    again = gradients(policy, sequence_logprobs(policy, sequences, 1.0).logprobs.sum())
    assert worst_difference(again, plain) < 1e-6


def test_bfloat16_policy_gives_float32_logprobs_near_those_of_float32() -> None:
    exact, coarse = small_policy(initializer_range=0.02), small_policy(dtype="bfloat16", initializer_range=0.02)
    sequences = some_sequences()
    expected = sequence_logprobs(exact, sequences, 1.0).logprobs
    result = sequence_logprobs(coarse, sequences, 1.0, with_entropy=True)
    assert result.logprobs.dtype == torch.float32
    assert (result.logprobs - expected).abs().max() < 0.05  # bf16 has 8 bits; the log-probs are near -4.6
    result.logprobs.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in coarse.model.parameters())


def test_rows_without_tokens_are_fine_even_alone() -> None:
    policy = small_policy()
    empty = Sequences((torch.tensor([5]),), torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]))
    assert sequence_logprobs(policy, empty, 1.0).logprobs.shape == (1, 0)


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    policy = small_policy(max_position_embeddings=16)
    long = Sequences((torch.arange(4, 24),), torch.tensor([0]), torch.tensor([[7]]), torch.tensor([1]))
    with pytest.raises(DataError, match=r"20 tokens does not fit .* context of 16"):
        sequence_logprobs(policy, long, 1.0)
    with pytest.raises(ValueError, match="temperature"):
        sequence_logprobs(policy, some_sequences(), 0.0)
