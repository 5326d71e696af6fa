"""The perturbed engine, and what a short run with it says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.config import load_recipe
from gspo.envs.runner import make_requests
from gspo.errors import ConfigError
from gspo.policy.logprobs import sequence_logprobs
from gspo.rollout.base import SamplingParams, pad_completions
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.study.engine_likelihoods import (
    Events,
    PerturbedEngine,
    noisy_router,
    rounded_to_bfloat16,
    rounded_to_integers,
    run,
)
from gspo.study.execute import Job
from gspo.study.laboratory import Laboratory, laboratory
from gspo.study.schema import Cell
from gspo.types import Completion, Sequences
from tests.test_launch import LENGTHS, MOE

ANY = torch.Generator()
PARAMS = SamplingParams(max_new_tokens=6)


class TestPerturbations:
    @given(bits=st.integers(2, 8), rows=st.lists(st.lists(st.floats(-8, 8), min_size=3, max_size=3), min_size=1))
    def test_rows_are_rounded_to_as_many_bits(self, bits: int, rows: list[list[float]]) -> None:
        values = torch.tensor(rows)
        rounded = rounded_to_integers("w", values, bits, ANY)
        steps = 2 ** (bits - 1) - 1
        widths = values.abs().amax(dim=1, keepdim=True) / steps
        assert bool(((rounded - values).abs() <= widths / 2 * (1 + 1e-4) + 1e-30).all())
        for row, width in zip(rounded, widths, strict=True):
            if width > 1e-30:
                multiples = row / width
                assert bool((multiples - multiples.round()).abs().max() < 1e-3)
                assert float(multiples.abs().max()) <= steps + 1e-3

    def test_a_row_of_zeros_and_a_vector_stay(self) -> None:
        assert rounded_to_integers("w", torch.zeros(2, 3), 8, ANY).equal(torch.zeros(2, 3))
        vector = torch.tensor([0.1234, 1.0])
        assert rounded_to_integers("norm", vector, 2, ANY) is vector

    def test_bfloat16_keeps_eight_bits(self) -> None:
        # Between 1 and 2 the spacing is 2^-7.
        values = torch.tensor([1 + 2**-7, 1 + 2**-9, 1 + 3 * 2**-9])
        assert rounded_to_bfloat16("w", values, 0, ANY).tolist() == [1 + 2**-7, 1.0, 1 + 2**-7]

    def test_noise_is_on_the_routers_only_and_in_their_units(self) -> None:
        values = 0.02 * torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
        assert noisy_router("model.layers.0.mlp.experts.down_proj", values, 0.5, ANY) is values
        noisy = noisy_router("model.layers.0.mlp.gate.weight", values, 0.5, torch.Generator().manual_seed(1))
        assert float((noisy - values).std()) == pytest.approx(0.5 * float(values.std()), rel=0.02)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    path = tmp_path_factory.mktemp("lab") / "recipe.toml"
    path.write_text(MOE)
    with laboratory(load_recipe(path, LENGTHS)) as found:
        yield found


def sampled(lab: Laboratory, engine: Any) -> tuple[Sequences, list[Completion]]:
    """Four responses to each of three prompts, and the sequences they make."""
    requests = make_requests(lab.house.prompts[:3], seed=0, step=1, group_size=4)
    completions = [completion for group in engine.generate(requests, PARAMS) for completion in group]
    padded = pad_completions(completions)
    prompts = tuple(torch.tensor(request.token_ids) for request in requests)
    rows = torch.arange(3).repeat_interleave(4)
    return Sequences(prompts, rows, padded.token_ids, padded.lengths), completions


def engine_of(lab: Laboratory, kind: str, scale: float, **options: Any) -> PerturbedEngine:
    return PerturbedEngine(lab.policy, kind, scale, seed=0, max_slots=8, **options)


class TestEngine:
    def test_the_exact_one_is_the_embedded_engine(self, lab: Laboratory) -> None:
        engine = engine_of(lab, "exact", 0)
        _, ours = sampled(lab, engine)
        _, theirs = sampled(lab, EmbeddedEngine(lab.policy, 8))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            assert torch.equal(a.logprobs, b.logprobs)
        assert engine.mismatches[0]["mismatch/max_abs"] < 1e-5

    @pytest.mark.parametrize(("kind", "scale"), [("bf16", 0), ("int", 4), ("router_noise", 0.5)])
    def test_it_reports_the_distribution_that_it_sampled_from(self, lab: Laboratory, kind: str, scale: float) -> None:
        before = [p.detach().clone() for p in lab.policy.model.parameters()]
        engine = engine_of(lab, kind, scale)
        sequences, completions = sampled(lab, engine)
        padded = pad_completions(completions)
        with torch.no_grad():
            copy = sequence_logprobs(engine.copy, sequences, 1.0).logprobs
            own = sequence_logprobs(lab.policy, sequences, 1.0).logprobs
        assert torch.allclose(copy, padded.logprobs, atol=2e-5)
        difference = (own - padded.logprobs)[padded.mask]
        assert float(difference.abs().mean()) == pytest.approx(engine.mismatches[0]["mismatch/mean_abs"], rel=1e-3)
        assert float(difference.abs().mean()) > 1e-4
        assert all(torch.equal(a, b) for a, b in zip(before, lab.policy.model.parameters(), strict=True))

    def test_centring_gives_the_probed_tokens_the_trainers_mean(self, lab: Laboratory) -> None:
        plain_sequences, plain = sampled(lab, engine_of(lab, "int", 4))
        sequences, centred = sampled(lab, engine_of(lab, "int", 4, centred=True))
        assert torch.equal(plain_sequences.token_ids, sequences.token_ids)
        shifts = torch.cat([b.logprobs - a.logprobs for a, b in zip(plain, centred, strict=True)])
        assert float(shifts.std()) < 1e-6  # one constant for all tokens
        padded = pad_completions(centred)
        with torch.no_grad():
            own = sequence_logprobs(lab.policy, sequences, 1.0).logprobs
        assert float((own - padded.logprobs)[padded.mask].mean()) == pytest.approx(0, abs=1e-5)

    def test_it_takes_new_weights_at_every_call_and_perturbs_them_alike(self, lab: Laboratory) -> None:
        engine = engine_of(lab, "router_noise", 0.5)
        router = next(p for name, p in lab.policy.model.named_parameters() if name.endswith("mlp.gate.weight"))
        kept = router.detach().clone()
        noise = []
        try:
            for factor in (1.0, 3.0):
                with torch.no_grad():
                    router.copy_(factor * kept)
                sampled(lab, engine)
                copied = next(p for name, p in engine.copy.model.named_parameters() if name.endswith("mlp.gate.weight"))
                noise.append((copied - router).detach() / factor)
        finally:
            with torch.no_grad():
                router.copy_(kept)
        assert float(noise[0].std()) > 0
        assert torch.allclose(noise[0], noise[1], atol=1e-6)

    def test_an_unknown_perturbation_is_named(self, lab: Laboratory) -> None:
        with pytest.raises(ConfigError, match="no perturbation 'int8'; there are exact, bf16, int, router_noise"):
            engine_of(lab, "int8", 0)


def test_events_by_kind_and_place() -> None:
    events = Events()
    events.emit("update", mini_batch=0, metrics={"clip": 0.5})
    events.emit("update", mini_batch=1, metrics={"clip": 0.7})
    events.emit("update", mini_batch=0, metrics={})
    events.emit("warning", message="no metrics")
    assert events.metrics("update", "clip") == [0.5, 0.7]
    assert events.metrics("update", "clip", mini_batch=0) == [0.5]


def test_what_a_cell_says_of_engine_and_recomputed_log_probs(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MOE)
    narrow = ["--objective.clip", "explicit", "--objective.clip_low", "1e-5", "--objective.clip_high", "1e-5"]
    words = [*LENGTHS, *narrow, "--eval.num_samples", "1", "--train.num_logged_samples", "0"]
    arms = {
        "recompute": ["--train.old_logprobs", "recompute"],
        "engine": ["--train.old_logprobs", "engine", "--train.mismatch_bound", "10"],
    }
    found = {}
    for name, more in arms.items():
        recipe = load_recipe(path, [*words, *more])
        options = {"perturbation": "int", "scale": 4}
        job = Job("engine-likelihoods", Cell(arm=name, seed=0), recipe, options, tmp_path, True)
        found[name] = run(job)
    engine, recompute = found["engine"].scalars, found["recompute"].scalars
    assert recompute["clip_first"] == 0
    assert engine["clip_first"] is not None
    assert engine["clip_first"] > 0.2  # most of what moved outward, where the band is 1e-5
    assert engine["clip_low_bound"] == 1e-5
    assert engine["kl"] is not None
    assert engine["kl_over_bound"] == pytest.approx(engine["kl"] / 1e-5)
    assert all(value is not None and math.isfinite(value) for value in (*engine.values(), *recompute.values()))
    assert found["engine"].series["clip_by_mini_batch"].x == (0, 1, 2, 3)
    assert found["engine"].series["reward"].x == (1, 2)
