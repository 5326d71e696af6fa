from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.errors import ModelError
from gspo.policy import projection
from gspo.policy.projection import KEPT_OF_CHUNKS, LogitHead, even_chunk, head_of, selected_logprobs


def parts(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 5, dtype=dtype, requires_grad=True)
    bias = torch.randn(11, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.tensor([0, 10, 3, 3, 7, 1, 5])


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (2.0, 3.0)])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_values_entropy_and_gradients_equal_log_softmax(scale: float, softcap: float | None, chunk_rows: int) -> None:
    hidden, weight, bias, targets = parts()
    head = LogitHead(weight, bias, scale, softcap)
    logits = (hidden @ weight.T + bias) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = (logits / 0.7).log_softmax(-1)
    logprobs, entropy = selected_logprobs(head, hidden, targets, 0.7, True, chunk_rows)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).detach(), atol=1e-12, rtol=0)
    grad = torch.randn(7, dtype=torch.float64)
    ours = torch.autograd.grad(logprobs, (hidden, weight, bias), grad)
    theirs = torch.autograd.grad(chosen, (hidden, weight, bias), grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)


def test_bfloat16_weights_give_float32_logprobs() -> None:
    """bf16 logits near 10 are 0.06 apart; computed in float32 from the same weights they are exact to 1e-5."""
    hidden, weight, _, targets = (x.bfloat16() if x.is_floating_point() else x for x in parts(torch.float32))
    expected = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logprobs, _ = selected_logprobs(LogitHead(weight), hidden, targets, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_the_entropy_carries_no_gradient() -> None:
    hidden, weight, _, targets = parts()
    _, entropy = selected_logprobs(LogitHead(weight), hidden, targets, 1.0, True)
    assert entropy is not None
    assert not entropy.requires_grad


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_logits_of_all_rows_never_exist_forward_or_backward() -> None:
    rows, vocabulary, width, chunk = 200, 1000, 4, 16
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    with LargestTensor() as seen:
        logprobs, _ = selected_logprobs(LogitHead(weight), hidden, targets, 1.0, True, chunk)
        logprobs.sum().backward()
    assert seen.numel == chunk * vocabulary  # and not rows * vocabulary


@pytest.mark.parametrize("compiled", [True, False])
def test_many_chunks_use_one_room(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of two chunks are never there at once, nor are any between the passes."""
    if not compiled:
        monkeypatch.setattr("gspo.policy.projection.native_for", lambda _: None)
    rows, vocabulary, chunk = 100, 1000, 10
    hidden = torch.randn(rows, 4, requires_grad=True)
    head = LogitHead(torch.randn(vocabulary, 4))
    rooms: list[int] = []
    room = projection._room
    monkeypatch.setattr(projection, "_room", lambda *args: (rooms.append(1), room(*args))[1])
    logprobs, _ = selected_logprobs(head, hidden, torch.arange(rows), 1.0, True, chunk)
    assert logprobs.grad_fn.kept is None  # type: ignore[union-attr]
    logprobs.sum().backward()
    assert len(rooms) == 2  # one for each pass


def test_the_chunk_follows_the_budget() -> None:
    assert LogitHead(torch.empty(100, 1)).chunk_rows == (96 << 20) // 400
    assert LogitHead(torch.empty(151_936, 1)).chunk_rows == (96 << 20) // (4 * 151_936)
    assert even_chunk(384, 341) == 192  # two halves and not 341 and 43
    assert even_chunk(0, 16) == 1


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("head", [{}, {"scale": 0.5}, {"softcap": 3.0}])
def test_every_backward_pass_and_every_chunk_gives_the_same_gradient(
    compiled: bool, head: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first backward pass uses up the logits that were kept, the second computes them again."""
    if not compiled:
        monkeypatch.setattr("gspo.policy.projection.native_for", lambda _: None)
    torch.manual_seed(3)
    hidden, weight = torch.randn(50, 8, dtype=torch.float64), torch.randn(33, 8, dtype=torch.float64)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    targets = torch.arange(50) % 33
    upstream = torch.cos(torch.arange(50.0, dtype=torch.float64))
    logits = hidden @ weight.t() * head.get("scale", 1.0)
    if "softcap" in head:
        logits = head["softcap"] * torch.tanh(logits / head["softcap"])
    plain = torch.log_softmax(logits / 0.7, 1)
    expected = torch.autograd.grad(plain[torch.arange(50), targets], inputs, upstream)
    plain = plain.detach()
    assert -(-50 // 16) <= KEPT_OF_CHUNKS < 50 // 8  # one chunk; several, of which one is kept; too many for that
    for chunk in (50, 16, 8):
        ours, entropy = selected_logprobs(LogitHead(weight, **head), hidden, targets, 0.7, True, chunk)
        torch.testing.assert_close(ours, plain[torch.arange(50), targets], atol=1e-12, rtol=0)
        assert entropy is not None
        torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(1), atol=1e-12, rtol=0)
        for retain in (True, False):
            for a, b in zip(torch.autograd.grad(ours, inputs, upstream, retain_graph=retain), expected, strict=True):
                torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_a_model_without_a_linear_head_is_refused() -> None:
    class Headless(nn.Module):
        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(ModelError, match="no linear output layer"):
        head_of(Headless())
