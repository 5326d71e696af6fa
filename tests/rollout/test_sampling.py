from __future__ import annotations

from typing import Any

import pytest
import torch

from gspo.rollout.embedded.library import load_decoding
from gspo.rollout.embedded.sampling import choose, choose_by_torch, uniforms

MASK = (1 << 64) - 1
#: The compiled sampler where there is a compiler (else the next one twice), and the one in torch.
SAMPLERS = pytest.mark.parametrize("sample", [choose, choose_by_torch])


def zeros(number: int) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.int64)


def splitmix(x: int) -> int:
    """The published finaliser, in Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def test_uniforms_are_splitmix64_at_a_counter() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 12345], [0, 7, 3, 10**6]
    expected = [
        (splitmix(splitmix(s) + (p + 1) * 0x9E3779B97F4A7C15 & MASK) >> 11) / 2**53
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_uniforms_are_uniform_over_positions_and_over_neighbouring_seeds() -> None:
    n = 20_000
    for seeds, positions in ((torch.full((n,), 9), torch.arange(n)), (torch.arange(n), torch.zeros(n).long())):
        counts = torch.histc(uniforms(seeds, positions).float(), bins=20, min=0, max=1)
        statistic = float(((counts - n / 20) ** 2 / (n / 20)).sum())
        assert statistic < 43.8  # chi-square with 19 degrees of freedom exceeds this once in a thousand


@SAMPLERS
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("vocabulary", [6, 3000])
def test_frequencies_are_those_of_the_softmax(sample: Any, temperature: float, vocabulary: int) -> None:
    """Six likely tokens, the other 2,994 of the large vocabulary together as likely as one of them."""
    n = 20_000
    places = torch.tensor([0, 1, 511, 512, 2048, 2999]) if vocabulary > 6 else torch.arange(6)
    logits = torch.full((vocabulary,), -8.0)
    logits[places] = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0])
    tokens, logprobs = sample(logits.repeat(n, 1), temperature, uniforms(torch.arange(n), zeros(n)))
    expected = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), expected[tokens], atol=1e-5, rtol=0)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    rest = torch.ones(vocabulary, dtype=torch.bool)
    rest[places] = False
    observed = torch.cat([counts[places], counts[rest].sum()[None]])
    wanted = n * torch.cat([expected.exp()[places], expected.exp()[rest].sum()[None]])
    used = wanted > 5
    statistic = float(((observed - wanted)[used] ** 2 / wanted[used]).sum())
    assert statistic < 22.5  # chi-square with at most 6 degrees of freedom exceeds this once in a thousand


@SAMPLERS
def test_greedy_takes_the_first_of_the_largest(sample: Any) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits.clone(), 1.0, None)
    assert tokens.tolist() == [1]
    assert logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0, 1]), abs=1e-6)


@SAMPLERS
@pytest.mark.parametrize("vocabulary", [5, 2000])
@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(sample: Any, vocabulary: int, number: float) -> None:
    """Not even at the ends of [0, 1): impossible tokens surround the possible one."""
    logits = torch.full((1, vocabulary), -torch.inf)
    logits[0, vocabulary // 2] = -3.0
    tokens, logprobs = sample(logits, 1.0, torch.tensor([number], dtype=torch.float64))
    assert tokens.tolist() == [vocabulary // 2]
    assert logprobs.tolist() == [0.0]


@SAMPLERS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_logit_that_is_no_number_is_reported_by_its_row(sample: Any, bad: float, greedy: bool) -> None:
    logits = torch.zeros(3, 600)
    logits[1, 550] = bad
    _, logprobs = sample(logits, 1.0, None if greedy else torch.full((3,), 0.3, dtype=torch.float64))
    assert torch.isfinite(logprobs).tolist() == [True, False, True]


@pytest.mark.skipif(load_decoding(torch.float32) is None, reason="no C compiler here: torch code is used")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [100, 512, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_samplers_choose_the_same(dtype: torch.dtype, vocabulary: int, temperature: float) -> None:
    """But for a number that falls within rounding of the border between two tokens: none of these does."""
    logits = 3 * torch.randn(300, vocabulary, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for numbers in (None, uniforms(torch.arange(300), zeros(300))):
        ours, ours_logprobs = choose(logits.clone(), temperature, numbers)
        theirs, theirs_logprobs = choose_by_torch(logits.clone(), temperature, numbers)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours_logprobs, theirs_logprobs, atol=2e-6, rtol=0)


def test_a_row_draws_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 2000, generator=generator)
    seeds, positions = torch.arange(50) * 7, torch.arange(50)
    numbers = uniforms(seeds, positions)
    together, logprobs = choose(logits.clone(), 1.0, numbers)
    for row in range(50):
        part = slice(row, row + 1)
        alone, logprob = choose(logits[part].clone(), 1.0, numbers[part])
        assert alone[0] == together[row]
        assert logprob[0] == logprobs[row]
