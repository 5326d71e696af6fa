"""The compiled kernels against the same formulas in torch, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo.policy.fused import NormRotate, RmsNorm, SwiGlu
from gspo.policy.native import APART_FROM, Native, keep_freed_memory, load_library, load_native, native_for, zeros_apart

pytestmark = pytest.mark.skipif(load_native(torch.float32) is None, reason="no C compiler here: torch code is used")
DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-12)]


def kernels(dtype: torch.dtype) -> Native:
    found = load_native(dtype)
    assert found is not None
    return found


def forget() -> None:
    """The next look is at the machine and the environment as they are then."""
    load_native.cache_clear()
    load_library.cache_clear()


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def plain_rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine[:, None] + turned * sine[:, None]


def compare(ours: Tensor, theirs: Tensor, inputs: list[Tensor], bound: float) -> None:
    """Values and the gradients of all inputs."""
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)
    upstream = torch.cos(torch.arange(ours.numel(), dtype=ours.dtype)).view(ours.shape)
    found = torch.autograd.grad(ours, inputs, upstream)
    expected = torch.autograd.grad(theirs, inputs, upstream)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=bound * float(b.abs().max() + 1), rtol=bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (70, 256)])  # the last one is shared by threads
def test_rms_norm(dtype: torch.dtype, bound: float, shape: tuple[int, int]) -> None:
    x, weight = numbers(*shape, dtype=dtype), numbers(shape[1], dtype=dtype, seed=1)
    ours = RmsNorm.apply(x, weight, 1e-5, kernels(dtype))
    compare(ours, plain_norm(x, weight, 1e-5), [x, weight], bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("size", [2, 6, 64])
def test_norm_and_rotation_of_heads(dtype: torch.dtype, bound: float, normed: bool, size: int) -> None:
    x, weight = numbers(90, 3, size, dtype=dtype), numbers(size, dtype=dtype, seed=1)
    angles = numbers(90, size, dtype=dtype, seed=2).detach()
    cosine, sine = angles.cos(), angles.sin()
    ours = NormRotate.apply(x, weight if normed else None, 1e-6, cosine, sine, kernels(dtype))
    theirs = plain_rotate(plain_norm(x, weight, 1e-6) if normed else x, cosine, sine)
    compare(ours, theirs, [x, weight] if normed else [x], bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_swiglu_from_minus_a_thousand_to_a_thousand(dtype: torch.dtype, bound: float) -> None:
    gate, up = numbers(40, 500, dtype=dtype), numbers(40, 500, dtype=dtype, seed=1)
    with torch.no_grad():
        gate[0, :9] = torch.tensor([0.0, 1e-30, -1e-30, 50, -50, 90, -90, 1000, -1000], dtype=dtype)
    compare(SwiGlu.apply(gate, up, kernels(dtype)), torch.nn.functional.silu(gate) * up, [gate, up], bound)


def test_nan_stays_nan() -> None:
    """A diverged model must not look healthy."""
    x = torch.tensor([[1.0, torch.nan, 2.0, 3.0]])
    assert torch.isnan(RmsNorm.apply(x, torch.ones(4), 1e-6, kernels(torch.float32))).all()
    assert torch.isnan(SwiGlu.apply(x, torch.ones(1, 4), kernels(torch.float32))).tolist() == [
        [False, True, False, False]
    ]


def test_freed_memory_is_kept_where_there_is_glibc() -> None:
    import platform

    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_the_same_runs_give_the_same_bits() -> None:
    x, weight = numbers(400, 64, dtype=torch.float32), numbers(64, dtype=torch.float32, seed=1)

    def once() -> Tensor:
        out = RmsNorm.apply(x, weight, 1e-6, kernels(torch.float32))
        return torch.autograd.grad(out.sin().sum(), weight)[0]

    assert torch.equal(once(), once())


def test_what_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_for(torch.zeros(1, dtype=torch.bfloat16)) is None
    assert native_for(torch.zeros(1, device="meta")) is None
    monkeypatch.setenv("GSPO_NATIVE", "0")
    forget()
    assert load_native(torch.float32) is None
    monkeypatch.setenv("GSPO_NATIVE", "1")
    monkeypatch.setenv("CC", "no-such-compiler")
    forget()
    assert load_native(torch.float32) is None
    forget()


def test_a_compiler_that_fails_leaves_torch_code(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    assert load_native(torch.float32) is None
    assert not list((tmp_path / "cache" / "gspo").iterdir())
    forget()


@pytest.mark.parametrize("rows", [3, APART_FROM // 8 + 1])
def test_zeros_apart_are_zeros_of_that_shape_whatever_their_size(rows: int) -> None:
    like = torch.ones(rows, 2, dtype=torch.float32)
    zeros = zeros_apart(like)
    assert zeros.shape == like.shape
    assert zeros.dtype == like.dtype
    assert not zeros.any()
    zeros.add_(1)
    assert not zeros_apart(like).any()  # each has its own
