"""A large tied embedding adds its rows to the gradient of the head; the sum is that of autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.policy import embedding
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.policy.logprobs import sequence_logprobs
from gspo.types import Sequences


def sequences(*responses: list[int]) -> Sequences:
    prompt, index = torch.tensor([5, 1, 5]), torch.zeros(len(responses), dtype=torch.long)
    return Sequences((prompt,), index, torch.tensor(responses), torch.tensor([len(r) for r in responses]))


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> tuple[CausalPolicy, CausalPolicy]:
    """The same tied model with and without the shared gradient, float64."""
    plain = load_policy(tiny="qwen3", tiny_config={"num_hidden_layers": 1}, dtype="float64")
    monkeypatch.setattr(embedding, "SHARED_FROM", 0)
    shared = load_policy(tiny="qwen3", tiny_config={"num_hidden_layers": 1}, dtype="float64")
    assert embedding.head_gradient_of(plain.model) is None
    assert embedding.head_gradient_of(shared.model) is not None
    return plain, shared


def loss(policy: CausalPolicy, *responses: list[int]) -> Tensor:
    return sequence_logprobs(policy, sequences(*responses), 1.0).logprobs.sum()


def gradients(policy: CausalPolicy) -> list[Tensor]:
    return [p.grad for p in policy.model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "backward",
    [
        lambda p: loss(p, [1, 5, 1, 9]).backward(),
        lambda p: [loss(p, r).backward() for r in ([1, 5, 1, 9], [7, 7, 2, 5])],  # two micro-batches
        lambda p: (loss(p, [1, 5, 1, 9]) + 2 * loss(p, [7, 7, 2, 5])).backward(),  # two passes in one graph
        lambda p: (lambda x: [x.backward(retain_graph=True), x.backward()])(loss(p, [1, 5, 1, 9])),
        lambda p: p.model(input_ids=torch.tensor([[1, 5, 1]])).logits.square().sum().backward(),  # the model's own head
    ],
)
def test_the_gradient_is_that_of_autograd(policies: tuple[CausalPolicy, CausalPolicy], backward: Any) -> None:
    for policy in policies:
        backward(policy)
    ours, theirs = gradients(policies[1]), gradients(policies[0])
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_autograd_grad_gives_it_too(policies: tuple[CausalPolicy, CausalPolicy]) -> None:
    found = [torch.autograd.grad(loss(p, [1, 5, 1, 9]), [p.head.weight])[0] for p in policies]
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_a_padding_row_gets_nothing_from_the_embedding(policies: tuple[CausalPolicy, CausalPolicy]) -> None:
    for policy in policies:
        policy.model.get_input_embeddings().padding_idx = 5
        loss(policy, [1, 5, 1, 9]).backward()
    torch.testing.assert_close(*(p.head.weight.grad for p in policies), rtol=1e-10, atol=1e-12)


def test_no_second_tensor_of_its_size(policies: tuple[CausalPolicy, CausalPolicy]) -> None:
    """The gradient is the tensor that the head has made."""
    made: list[int] = []
    leave = embedding.HeadGradient.leave
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding.HeadGradient, "leave", lambda self, g: (made.append(g.data_ptr()), leave(self, g))[1])
        loss(policies[1], [1, 5, 1, 9]).backward()
    weight = policies[1].head.weight
    assert weight.grad is not None
    assert made == [weight.grad.data_ptr()]


def test_a_backward_pass_that_was_broken_off_leaves_nothing(policies: tuple[CausalPolicy, CausalPolicy]) -> None:
    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    norm = policies[1].base.layers[0].input_layernorm.weight  # type: ignore[union-attr,index]
    handle = norm.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        loss(policies[1], [1, 5, 1, 9]).backward()
    handle.remove()
    policies[1].model.zero_grad()
    for policy in policies:
        loss(policy, [7, 7, 2, 5]).backward()
    torch.testing.assert_close(*(p.head.weight.grad for p in policies), rtol=1e-10, atol=1e-12)


def test_a_copy_has_a_gradient_of_its_own(policies: tuple[CausalPolicy, CausalPolicy]) -> None:
    """As the reference model of a KL term is one."""
    twin = copy.deepcopy(policies[1].model)
    assert embedding.head_gradient_of(twin) is not embedding.head_gradient_of(policies[1].model)
    assert twin.get_input_embeddings().forward.__self__ is twin.get_input_embeddings()


def test_small_and_untied_embeddings_stay_as_they_are() -> None:
    small = load_policy(tiny="qwen3", tiny_config={"num_hidden_layers": 1})
    assert embedding.head_gradient_of(small.model) is None
    untied = load_policy(tiny="qwen3", tiny_config={"num_hidden_layers": 1, "tie_word_embeddings": False})
    assert not embedding.share_embedding_gradient(untied.model)
