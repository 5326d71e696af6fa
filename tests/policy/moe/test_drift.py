from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gspo.policy.moe.capture import TokenRoutes
from gspo.policy.moe.drift import RoutingStats, routing_stats

# Three tokens of one sequence, two layers, top-2 of 4 experts.
OLD = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]], dtype=torch.uint8)
NEW = torch.tensor([[[1, 0], [2, 3]], [[0, 2], [1, 0]], [[0, 1], [3, 1]]], dtype=torch.uint8)
EVERY = torch.ones(1, 3, dtype=torch.bool)


def tokens(
    ids: Tensor = NEW, reference: Tensor | None = OLD, margins: Tensor | None = None, scores: Tensor | None = None
) -> TokenRoutes:
    n = len(ids)
    return TokenRoutes(ids, reference, margins, scores, torch.zeros(n, dtype=torch.int64), torch.arange(n))


def test_drift_counts_slots_whose_expert_was_not_recorded_and_ignores_the_order() -> None:
    # layer 0: token 1 swaps 1 for 2, one slot of six; layer 1: token 1 swaps both, token 2 swaps one, three of six
    found = routing_stats(tokens(), 4, EVERY).metrics()
    assert found["moe/drift/layer_00"] == pytest.approx(1 / 6)
    assert found["moe/drift/layer_01"] == pytest.approx(3 / 6)
    assert found["moe/drift"] == pytest.approx((1 / 6 + 3 / 6) / 2)
    assert found["moe/changed_tokens"] == pytest.approx(2 / 3)  # tokens 1 and 2
    assert found["moe/changed_layers"] == pytest.approx((1 / 3 + 2 / 3) / 2)


def test_only_tokens_that_enter_count() -> None:
    found = routing_stats(tokens(), 4, torch.tensor([[True, False, False]])).metrics()
    assert found["moe/drift"] == found["moe/changed_tokens"] == 0.0
    nothing = routing_stats(tokens(), 4, torch.zeros(1, 3, dtype=torch.bool))
    assert nothing.metrics() == {}


def test_tokens_that_were_routed_naturally_are_not_compared() -> None:
    partly = OLD.clone()
    partly[1] = 255
    found = routing_stats(tokens(reference=partly), 4, EVERY).metrics()
    assert found["moe/drift/layer_00"] == 0.0
    assert found["moe/drift/layer_01"] == pytest.approx(1 / 4)


def test_load_is_even_when_every_expert_is_chosen_equally_often() -> None:
    even = torch.tensor([[[0, 1]], [[2, 3]]])
    found = routing_stats(tokens(even, None), 4, torch.ones(1, 2, dtype=torch.bool)).metrics()
    assert found == {"moe/load_max": 1.0, "moe/load_entropy": pytest.approx(1.0), "moe/load_idle": 0.0}
    one = torch.tensor([[[0, 1]], [[0, 1]]])
    found = routing_stats(tokens(one, None), 4, torch.ones(1, 2, dtype=torch.bool)).metrics()
    # two of four experts carry everything: twice an even share, entropy log 2 / log 4, half of them idle
    assert found == {"moe/load_max": 2.0, "moe/load_entropy": pytest.approx(0.5), "moe/load_idle": 0.5}


def test_margin_and_router_shift_are_means_over_tokens_and_layers() -> None:
    margins = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    then = torch.zeros(3, 2, 2)
    now = torch.tensor([0.1, -0.3]).expand(3, 2, 2)
    found = routing_stats(tokens(margins=margins, scores=now), 4, EVERY, old_log_scores=then).metrics()
    assert found["moe/margin"] == pytest.approx(3.5)
    assert found["moe/router_shift"] == pytest.approx(0.2)


def test_the_correlation_is_pearsons_over_tokens() -> None:
    log_ratio = torch.tensor([[0.1, -0.5, 0.2]], dtype=torch.float64)
    found = routing_stats(tokens(), 4, EVERY, token_log_ratio=log_ratio).metrics()
    x, y = torch.tensor([0.1, 0.5, 0.2]), torch.tensor([0.0, 1.0, 0.5])  # |d|, share of the two layers changed
    want = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    assert found["moe/log_ratio_correlation"] == pytest.approx(want, abs=1e-6)
    flat = routing_stats(tokens(OLD), 4, EVERY, token_log_ratio=log_ratio).metrics()
    assert "moe/log_ratio_correlation" not in flat  # nothing changed, so there is nothing to correlate with


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 40

    def draw() -> Tensor:
        return torch.rand(n, 3, 8, generator=generator).argsort(-1)[..., :2].to(torch.uint8)

    ids, reference = draw(), draw()
    row, column = torch.arange(n) // 10, torch.arange(n) % 10
    enters = torch.rand(4, 10, generator=generator) < 0.7
    ratio = torch.randn(4, 10, generator=generator)

    def stats(keep: Tensor) -> RoutingStats:
        part = TokenRoutes(ids[keep], reference[keep], None, None, row[keep], column[keep])
        return routing_stats(part, 8, enters, ratio)

    every = torch.arange(n)
    whole, parts = stats(every), stats(every[:13]) + stats(every[13:])
    assert parts.metrics() == pytest.approx(whole.metrics(), abs=1e-12)
    assert float(whole.load.sum()) == int(enters.sum()) * 3 * 2
    assert math.isfinite(whole.metrics("engine_")["engine_drift"])
