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


def trained(compiled: bool, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> tuple[list, dict]:
    """Weights, norms and state after four updates of a model with a large and a small matrix and vectors."""
    if not compiled:
        monkeypatch.setattr("gspo.train.optimizer.native_for", lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 130), nn.Linear(130, 3)).to(dtype)
    opt = optimizer(model, weight_decay=0.1, learning_rate=0.01, warmup_steps=2)
    norms = []
    for number in range(4):
        opt.zero_grad()
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) * 10.0 ** (number - 2)
        norms.append(opt.apply())
    return [p.detach().clone() for p in model.parameters()] + norms, opt.inner.state_dict()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_one_pass_over_memory_equals_clipping_and_adamw_of_torch(dtype, bound, monkeypatch):
    ours, our_state = trained(True, monkeypatch, dtype)
    theirs, their_state = trained(False, monkeypatch, dtype)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=bound, rtol=10 * bound)
    assert our_state["state"].keys() == their_state["state"].keys()
    for index, state in their_state["state"].items():
        for name, value in state.items():
            found = our_state["state"][index][name]
            assert found.dtype == value.dtype
            torch.testing.assert_close(found, value, atol=bound * float(value.abs().max()), rtol=10 * bound)


def test_updates_are_the_same_to_the_last_bit_for_any_number_of_threads(monkeypatch):
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(trained(True, monkeypatch)[0])
    torch.set_num_threads(before)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True))


def test_a_state_of_torch_is_continued(monkeypatch):
    """A checkpoint of either way of updating continues with the other."""
    results = []
    for second_compiled in (True, False):
        layer = nn.Linear(3, 2)
        nn.init.ones_(layer.weight)
        nn.init.ones_(layer.bias)
        with monkeypatch.context() as patch:
            patch.setattr("gspo.train.optimizer.native_for", lambda _: None)
            first = optimizer(layer)
            for p in layer.parameters():
                p.grad = torch.full_like(p, 0.3)
            first.apply()
        second = optimizer(layer)
        second.inner.load_state_dict(first.inner.state_dict())
        second.update = first.update
        for p in layer.parameters():
            p.grad = torch.full_like(p, -0.1)
        with monkeypatch.context() as patch:
            if not second_compiled:
                patch.setattr("gspo.train.optimizer.native_for", lambda _: None)
            second.apply()
        results.append(layer.weight.detach().clone())
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)
    assert not torch.equal(results[0], torch.ones(2, 3))
