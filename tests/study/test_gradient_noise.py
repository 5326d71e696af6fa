"""The measures of gradients, the estimator by the product of ratios, and the executor on a small mixture of experts."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.config import load_recipe
from gspo.errors import ConfigError, RunError
from gspo.objectives.gspo import GSPO
from gspo.objectives.pg import PolicyGradient
from gspo.study.execute import Job
from gspo.study.gradient_noise import (
    GradientRecorder,
    ProductRatio,
    estimator_of,
    gradient_numbers,
    plan_of,
    run,
)
from gspo.study.laboratory import laboratory
from gspo.study.schema import Cell
from gspo.train.batch import rollout_batch
from gspo.train.schedule import mini_batches
from tests.test_launch import LENGTHS, MOE

INF = math.inf


class TestNumbers:
    def test_two_gradients_by_hand(self) -> None:
        # g = (3, 0), (1, 0); G_1 = (2, 0), G_2 = (2, 2).
        # |E g|^2 = 3 * 1 = 3; mean |g|^2 = 5, so the variance is 2. Mean g is (2, 0), the reference (2, 1).
        found = gradient_numbers(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [2.0, 2.0]]))
        assert found["snr"] == pytest.approx(3 / 2)
        assert found["cosine"] == pytest.approx(2 / math.sqrt(5))
        assert found["cosine_all"] == pytest.approx(2 / math.sqrt(5))
        assert found["scale"] == pytest.approx(4 / 4)  # <mean g, reference> / <G_1, G_2>
        # |E g|^2 - 2 <E g, G> + |G|^2 = 3 - 8 + 4 < 0: noise exceeds the bias.
        assert found["bias"] == 0
        halves = 2 / math.sqrt(8)
        assert found["ceiling"] == pytest.approx(2 * halves / (1 + halves))

    def test_an_unbiased_noisy_gradient(self) -> None:
        generator = torch.Generator().manual_seed(0)
        truth = torch.randn(4000, generator=generator)
        replicates = truth + 3 * torch.randn(200, 4000, generator=generator)
        halves = truth + 0.1 * torch.randn(2, 4000, generator=generator)
        found = gradient_numbers(replicates, halves)
        # |truth|^2 / (P * 9) with |truth|^2 about P.
        assert found["snr"] == pytest.approx(float(truth.square().sum()) / (4000 * 9), rel=0.02)
        assert found["cosine"] == pytest.approx(1 / math.sqrt(10), abs=0.01)
        assert found["scale"] == pytest.approx(1, abs=0.02)
        assert found["bias"] < 0.1

    def test_a_shrunken_and_turned_gradient_is_biased(self) -> None:
        truth, other = torch.eye(2)[0], torch.eye(2)[1]
        found = gradient_numbers((0.5 * truth + 0.5 * other).expand(3, 2), torch.stack([truth, truth]))
        assert found["scale"] == pytest.approx(0.5)
        assert found["bias"] == pytest.approx(math.sqrt(0.5))  # |(-0.5, 0.5)|
        assert found["snr"] == INF
        assert found["ceiling"] == pytest.approx(1)

    def test_a_gradient_without_signal_is_refused(self) -> None:
        with pytest.raises(RunError, match="exactly zero"):
            gradient_numbers(torch.zeros(2, 3), torch.ones(2, 3))


def loss_and_gradient(objective: Any, logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[float, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    output = objective(leaf, old, advantages, torch.ones_like(logprobs, dtype=torch.bool))
    output.loss_sum.backward()
    assert leaf.grad is not None
    return float(output.loss_sum.detach()), leaf.grad


class TestProductRatio:
    def test_value_and_gradient_are_the_formulas(self) -> None:
        new = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
        old = torch.tensor([[-1.1, -2.3, -0.4]], dtype=torch.float64)
        product = math.exp(0.1 + 0.3 - 0.1)
        value, gradient = loss_and_gradient(ProductRatio(INF, INF), new, old, torch.tensor([2.0], dtype=torch.float64))
        assert value == pytest.approx(-2 * product)
        assert gradient.tolist()[0] == pytest.approx([-2 * product / 3] * 3)

    @pytest.mark.parametrize(("advantage", "shift", "cut"), [(1, 0.5, True), (1, -0.5, False), (-1, -0.5, True)])
    def test_the_clip_takes_the_whole_response(self, advantage: float, shift: float, cut: bool) -> None:
        old = torch.zeros(1, 2, dtype=torch.float64)
        _, gradient = loss_and_gradient(ProductRatio(0.2, 0.27), old + shift / 2, old, torch.tensor([float(advantage)]))
        assert bool((gradient == 0).all()) is cut

    def test_it_is_gspo_on_policy_and_for_one_token(self) -> None:
        generator = torch.Generator().manual_seed(1)
        old = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        advantages = torch.randn(5, generator=generator, dtype=torch.float64)
        for new in (old, old[:, :1] + 0.1 * torch.randn(5, 1, generator=generator, dtype=torch.float64)):
            width = new.shape[1]
            ours = loss_and_gradient(ProductRatio(INF, INF), new, old[:, :width], advantages)
            theirs = loss_and_gradient(GSPO(INF, INF), new, old[:, :width], advantages)
            assert ours[0] == pytest.approx(theirs[0])
            assert torch.allclose(ours[1], theirs[1])

    def test_its_expectation_is_the_on_policy_gradient_and_that_of_the_others_is_not(self) -> None:
        # All 3^2 responses of two tokens over three, each with its probability under the old policy.
        generator = torch.Generator().manual_seed(2)
        old_logits, new_logits = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64).unbind(0)
        responses = torch.tensor(list(itertools.product(range(3), repeat=2)))
        advantages = torch.randn(9, generator=generator, dtype=torch.float64)

        def logprobs(logits: Tensor) -> Tensor:
            return logits.log_softmax(-1)[torch.arange(2), responses]

        def expected_gradient(objective: Any, sampled_from: Tensor) -> Tensor:
            """sum over y of q(y) times the gradient of y's loss, with respect to the logits of the new policy."""
            leaf = new_logits.clone().requires_grad_()
            old = logprobs(sampled_from)
            weights = old.sum(-1).exp()
            output = objective(logprobs(leaf), old, advantages * weights, torch.ones(9, 2, dtype=torch.bool))
            output.loss_sum.backward()
            assert leaf.grad is not None
            return leaf.grad

        truth = expected_gradient(PolicyGradient(), new_logits)
        assert torch.allclose(expected_gradient(ProductRatio(INF, INF), old_logits), truth)
        for biased in (PolicyGradient(), GSPO(INF, INF)):
            assert not torch.allclose(expected_gradient(biased, old_logits), truth, atol=1e-3)


PLAN = {"levels": [0, 2], "groups": 2, "num_replicates": 3, "num_reference": 4, "warm_up_updates": 2}
ESTIMATORS = {
    "fresh": {"objective": "fresh"},
    "pg": {"objective": "pg"},
    "gspo": {"objective": "gspo", "clip_low": 1e-3, "clip_high": 1e-3},
    "gspo_r2": {"objective": "gspo", "clip_low": 1e-3, "clip_high": 1e-3, "replay": "r2"},
    "grpo": {"objective": "grpo"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": []}, "levels"),
        ({"levels": [-1]}, "levels"),
        ({"groups": 0}, "groups = 0"),
        ({"num_reference": 3}, "even num_reference"),
        ({"num_replicates": 1}, "num_replicates >= 2"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of({**PLAN, **change})


@pytest.mark.parametrize("options", [{}, {"objective": "sapo"}, {"objective": "gspo", "replay": "r3"}])
def test_an_estimator_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"options\."):
        estimator_of(options)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of every estimator on a small mixture of experts, by arm, and the folder of their cells."""
    folder = tmp_path_factory.mktemp("cells")
    path = folder / "recipe.toml"
    path.write_text(MOE)
    recipe = load_recipe(path, [*LENGTHS, "--train.learning_rate", "1e-2"])
    found: dict[str, Any] = {"folder": folder}
    for name in ESTIMATORS:
        place = folder / name
        place.mkdir()
        options = {**PLAN, "estimators": ESTIMATORS, "estimator": name}
        found[name] = run(Job("gradient-noise", Cell(arm=name, seed=0), recipe, options, place, True))
    return found


def test_all_estimators_are_one_where_nothing_has_moved(cells: dict[str, Any]) -> None:
    for name in ("pg", "gspo", "gspo_r2", "grpo"):
        scalars = cells[name].scalars
        assert scalars["agreement_k0"] == pytest.approx(1, abs=1e-5)
        assert scalars["cosine_k0"] == pytest.approx(cells["pg"].scalars["cosine_k0"], abs=1e-5)
        assert scalars["clip_fraction_k0"] == 0
        assert scalars["routing_drift_k0"] == 0
    assert cells["fresh"].scalars["relative_cosine_k0"] == 1


def test_they_part_when_the_weights_move(cells: dict[str, Any]) -> None:
    gspo, replayed, grpo = (cells[name].scalars for name in ("gspo", "gspo_r2", "grpo"))
    assert gspo["clip_fraction_k2"] > 0
    assert grpo["clip_fraction_k2"] == 0  # no bounds were given
    assert gspo["routing_drift_k2"] > 0
    assert gspo["agreement_k2"] < 0.999
    assert gspo["cosine_k2"] != replayed["cosine_k2"]
    assert all(value is not None and math.isfinite(value) for value in gspo.values())
    assert cells["gspo"].series["cosine"].x == (0, 2)
    assert cells["gspo"].series["cosine"].y == (gspo["cosine_k0"], gspo["cosine_k2"])


def test_a_seed_is_measured_once_for_all_its_estimators(cells: dict[str, Any]) -> None:
    [shared] = cells["folder"].glob("estimators+seed=0+*.json")
    numbers = json.loads(shared.read_text())
    assert set(numbers) == set(ESTIMATORS)
    assert numbers["gspo"]["2"]["cosine"] == cells["gspo"].scalars["cosine_k2"]


def test_the_recorder_keeps_the_gradient_and_moves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MOE)
    with laboratory(load_recipe(path, LENGTHS)) as lab:
        before = [p.detach().clone() for p in lab.policy.model.parameters()]
        groups = lab.sample(4, 1)
        rollouts = rollout_batch(groups)
        batch = lab.batch(groups, rollouts, lab.score(rollouts))
        recorder = lab.optimizer(GradientRecorder)
        [mini] = mini_batches(batch, 1, seed=0, step=1)
        whole = lab.update(recorder, GSPO(), batch, mini)
        gradient = recorder.gradient
        assert float(gradient.norm()) == pytest.approx(whole.metrics["grad_norm"], rel=1e-6)
        assert sum(p.numel() for p in lab.policy.model.parameters()) == gradient.numel()
        # The gradient of the whole is the mean of those of its halves, which have as many responses each.
        halves = []
        for half in mini_batches(batch, 2, seed=0, step=1):
            lab.update(recorder, GSPO(), batch, half)
            halves.append(recorder.gradient)
        assert torch.allclose(torch.stack(halves).mean(dim=0), gradient, atol=1e-6)
        after = list(lab.policy.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_unknown_estimator_of_a_cell_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MOE)
    options = {**PLAN, "estimators": ESTIMATORS, "estimator": "gpso"}
    job = Job("gradient-noise", Cell(arm="gpso", seed=0), load_recipe(path, LENGTHS), options, tmp_path, True)
    with pytest.raises(ConfigError, match="'gpso' is none of fresh, pg"):
        run(job)


def test_a_level_without_signal_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MOE)
    constant = ["--reward.functions", '[{name = "tests.test_launch:by_prompt"}]', "--reward.audit", "false"]
    options = {**PLAN, "estimators": {"pg": {"objective": "pg"}}, "estimator": "pg"}
    found = run(Job("gradient-noise", Cell(arm="pg", seed=0), load_recipe(path, constant), options, tmp_path, True))
    assert found.scalars == {}
    assert found.series == {}
