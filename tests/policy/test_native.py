"""The compiled kernels against the same formulas in torch, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo.policy.fused import NormRotate, RmsNorm, SwiGlu
from gspo.policy.native import Native, keep_freed_memory, load_native, native_for

pytestmark = pytest.mark.skipif(load_native(torch.float32) is None, reason="no C compiler here: torch code is used")
DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-12)]


def kernels(dtype: torch.dtype) -> Native:
    found = load_native(dtype)
    assert found is not None
    return found


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


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("normed", [True, False])
def test_decode_attention(dtype: torch.dtype, bound: float, window: int | None, normed: bool) -> None:
    """Against softmax over each row's own keys, on both sides of a block of 64; slots hold nan elsewhere."""
    positions = torch.tensor([0, 3, 63, 64, 130])
    n, hq, hkv, size, length = 5, 4, 2, 8, 140
    projected = numbers(n, (hq + 2 * hkv) * size, dtype=dtype).detach()
    weight = numbers(2, size, dtype=dtype, seed=3).detach()
    angles = numbers(length, size, dtype=dtype, seed=2).detach()
    tables = angles.cos(), angles.sin()
    keys, values = numbers(2, n, length, hkv, size, dtype=dtype, seed=4).detach()
    for row, position in enumerate(positions.tolist()):
        keys[row, position:], values[row, position:] = torch.nan, torch.nan
    past_keys, past_values = keys.clone(), values.clone()
    out = projected.new_empty(n, hq * size)
    norms = (weight[0], 1e-6, weight[1], 1e-5) if normed else None
    kernels(dtype).decode_attention(projected, norms, tables, keys, values, positions, hq, window, 0.3, out)
    for row, position in enumerate(positions.tolist()):
        heads = projected[row].view(hq + 2 * hkv, size)
        query, key, value = heads[:hq], heads[hq : hq + hkv], heads[hq + hkv :]
        if normed:
            query, key = plain_norm(query, weight[0], 1e-6), plain_norm(key, weight[1], 1e-5)
        cosine, sine = (table[position : position + 1] for table in tables)
        query, key = plain_rotate(query[None], cosine, sine)[0], plain_rotate(key[None], cosine, sine)[0]
        first = 0 if window is None else max(0, position - window + 1)
        all_keys = torch.cat([past_keys[row, first:position], key[None]]).repeat_interleave(hq // hkv, dim=1)
        all_values = torch.cat([past_values[row, first:position], value[None]]).repeat_interleave(hq // hkv, dim=1)
        weights = (torch.einsum("hd,thd->ht", query, all_keys) * 0.3).softmax(-1)
        expected = torch.einsum("ht,thd->hd", weights, all_values).flatten()
        torch.testing.assert_close(out[row], expected, atol=bound, rtol=bound)
        torch.testing.assert_close(keys[row, position], key, atol=bound, rtol=bound)


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
    load_native.cache_clear()
    assert load_native(torch.float32) is None
    monkeypatch.setenv("GSPO_NATIVE", "1")
    monkeypatch.setenv("CC", "no-such-compiler")
    load_native.cache_clear()
    assert load_native(torch.float32) is None
    load_native.cache_clear()


def test_a_compiler_that_fails_leaves_torch_code(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_native.cache_clear()
    assert load_native(torch.float32) is None
    assert not list((tmp_path / "cache" / "gspo").iterdir())
    load_native.cache_clear()
