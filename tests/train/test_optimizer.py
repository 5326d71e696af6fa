import pytest
import torch
from torch import nn

from gspo.errors import NumericalError
from gspo.train.optimizer import Optimizer


def optimizer(model: nn.Module, **changes) -> Optimizer:
    settings = {
        "learning_rate": 0.1,
        "num_updates": 10,
        "warmup_steps": 0,
        "schedule": "constant",
        "betas": (0.9, 0.95),
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    return Optimizer(model, **(settings | changes))


def test_the_first_step_of_adam_moves_by_the_learning_rate_against_the_gradient():
    layer = nn.Linear(1, 1, bias=False)
    before = layer.weight.item()
    opt = optimizer(layer)
    layer.weight.grad = torch.tensor([[3.0]])
    assert opt.apply() == pytest.approx(3.0)  # the norm before clipping
    # Adam's first step is lr * g / (|g| + eps): the learning rate, whatever the size of the gradient.
    assert layer.weight.item() == pytest.approx(before - 0.1, abs=1e-6)
    assert opt.update == 1


def test_warm_up_scales_the_first_step():
    layer = nn.Linear(1, 1, bias=False)
    before = layer.weight.item()
    opt = optimizer(layer, warmup_steps=4)
    layer.weight.grad = torch.tensor([[1.0]])
    opt.apply()
    assert layer.weight.item() == pytest.approx(before - 0.1 / 4, abs=1e-6)


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = [p.detach().clone() for p in model.parameters()]
    opt = optimizer(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model[1].weight.grad[0, 1] = float("nan")
    with pytest.raises(NumericalError, match=r"1\.weight"):
        opt.apply()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert opt.update == 0


def test_only_matrices_decay():
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    opt = optimizer(model, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.apply()
    assert model.weight.detach().unique().tolist() == pytest.approx([1 - 0.1 * 0.5])
    assert model.bias.detach().tolist() == [1.0, 1.0]
