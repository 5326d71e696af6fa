"""A mixture in one call, and the products that it is made of, against plain torch: on tile registers and without."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gspo.policy.experts import Experts
from gspo.policy.native import Native, load_library, load_native, may_use_tiles

pytestmark = pytest.mark.skipif(load_native(torch.float32) is None, reason="no C compiler here: torch code is used")
HIDDEN, INNER, EXPERTS = 40, 24, 5
BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-12}


def forget() -> None:
    for function in (may_use_tiles, load_native, load_library):
        function.cache_clear()


@pytest.fixture(params=["float64", "float32", "float32 on tiles"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    """The kernels of each build."""
    with_tiles = request.param.endswith("tiles")
    if with_tiles and not may_use_tiles():
        pytest.skip("no tile registers here")
    if not with_tiles:
        monkeypatch.setenv("GSPO_TILES", "0")
        forget()
    yield built(torch.float64 if request.param == "float64" else torch.float32)
    monkeypatch.undo()
    forget()


def built(dtype: torch.dtype) -> Native:
    found = load_native(dtype)
    assert found is not None
    return found


def type_of(native: Native) -> torch.dtype:
    return torch.float64 if native.real is ctypes.c_double else torch.float32


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 3).to(dtype).requires_grad_()


def choices(num_tokens: int, top_k: int, among: list[int]) -> Tensor:
    """Different experts for each token, in any order."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randperm(len(among), generator=generator)[:top_k] for _ in range(num_tokens)]
    return torch.tensor(among)[torch.stack(drawn)]


def inputs_of(num_tokens: int, top_k: int, dtype: torch.dtype, *, skip: bool) -> list[Tensor]:
    shapes = [(num_tokens, HIDDEN), (num_tokens, top_k), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)]
    shapes += [(num_tokens, HIDDEN)] if skip else []
    return [numbers(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def mixed(inputs: list[Tensor], ids: Tensor, native: Native) -> list[Tensor]:
    """The result and the gradients of all inputs."""
    hidden, gates, gate_up, down, *skip = inputs
    return with_gradients(Experts.apply(hidden, ids, gates, gate_up, down, skip[0] if skip else None, native), inputs)


def plainly(inputs: list[Tensor], ids: Tensor) -> list[Tensor]:
    hidden, gates, gate_up, down, *skip = inputs
    out = skip[0] if skip else torch.zeros_like(hidden)
    for expert in range(len(gate_up)):
        a, b = (hidden @ gate_up[expert].t()).chunk(2, dim=1)
        weight = (gates * (ids == expert)).sum(1, keepdim=True)
        out = out + weight * ((nn.functional.silu(a) * b) @ down[expert].t())
    return with_gradients(out, inputs)


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    upstream = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def assert_close(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=bound * float(b.abs().max() + 1), rtol=bound)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "among"),
    [(37, 2, [0, 1, 2, 3, 4]), (37, 2, [0, 1, 3]), (1, 2, [4, 2]), (1, 1, [3]), (200, 5, [0, 1, 2, 3, 4])],
)
def test_values_and_gradients(native: Native, skip: bool, num_tokens: int, top_k: int, among: list[int]) -> None:
    dtype, ids = type_of(native), choices(num_tokens, top_k, among)
    inputs = inputs_of(num_tokens, top_k, dtype, skip=skip)
    found = mixed(inputs, ids, native)
    assert_close(found, plainly(inputs, ids), BOUNDS[dtype])
    for expert in range(EXPERTS):
        chosen = bool((ids == expert).any())
        assert [bool(grad[expert].any()) for grad in found[3:5]] == [chosen, chosen]


def test_any_number_of_threads_gives_the_same_bits(native: Native) -> None:
    ids, inputs = choices(600, 3, [0, 1, 2, 4]), inputs_of(600, 3, type_of(native), skip=True)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(mixed(inputs, ids, native))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_order_of_choices_changes_nothing(native: Native) -> None:
    ids, inputs = choices(37, 3, [0, 1, 2, 3, 4]), inputs_of(37, 3, type_of(native), skip=True)
    turned = [inputs[0], inputs[1].detach().flip(1).requires_grad_(), *inputs[2:]]
    found, other = mixed(inputs, ids, native), mixed(turned, ids.flip(1), native)
    other[2] = other[2].flip(1)
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))


def test_what_is_not_contiguous(native: Native) -> None:
    dtype, ids = type_of(native), choices(37, 2, [0, 1, 2, 3, 4])
    inputs = inputs_of(37, 2, dtype, skip=True)
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in inputs]
    found = mixed(strided, ids.t().contiguous().t(), native)
    assert all(torch.equal(a, b) for a, b in zip(found, mixed(inputs, ids, native), strict=True))


def test_an_expert_that_there_is_not(native: Native) -> None:
    inputs = inputs_of(3, 1, type_of(native), skip=False)
    for wrong in (-1, EXPERTS):
        with pytest.raises(IndexError, match="not one of 5"):
            mixed(inputs, torch.tensor([[0], [wrong], [1]]), native)


def test_builds_agree_to_the_last_bits(native: Native) -> None:
    """Each is as close to torch's float64 as its numbers are, so all are as close to each other."""
    dtype, ids = type_of(native), choices(300, 2, [0, 1, 2, 3, 4])
    inputs = inputs_of(300, 2, dtype, skip=True)
    exact = plainly([x.detach().double().requires_grad_() for x in inputs], ids)
    for a, b in zip(mixed(inputs, ids, native), exact, strict=True):
        assert (a.double() - b).abs().max() <= {torch.float32: 2e-6, torch.float64: 1e-14}[dtype] * b.abs().max()


SHAPES = [(1, 1, 1), (7, 3, 5), (6, 64, 16), (97, 33, 70), (100, 530, 300), (33, 257, 64)]


@pytest.mark.parametrize("base", ["none", "matrix", "bias", "itself"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product(native: Native, shape: tuple[int, int, int], turned: tuple[bool, bool], base: str) -> None:
    """Into a part of a matrix, whose other numbers stay."""
    dtype, (n, k, m) = type_of(native), shape
    a, b = numbers(n, k, dtype=dtype, seed=0).detach(), numbers(k, m, dtype=dtype, seed=1).detach()
    room = numbers(n + 2, m + 3, dtype=dtype, seed=2).detach()
    out, before = room[1:-1, 1:-2], room.clone()
    added = {
        "none": None,
        "matrix": numbers(n, m + 1, dtype=dtype, seed=3).detach()[:, 1:],
        "bias": numbers(m, dtype=dtype, seed=4).detach(),
        "itself": out,
    }[base]
    exact = a.double() @ b.double() + (0 if added is None else added.double())
    a, b = (x.t().contiguous().t() if turn else x for x, turn in zip((a, b), turned, strict=True))
    native.multiply(a, b, added, out)
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out, exact.to(dtype), atol=bound * float(exact.abs().max()), rtol=bound)
    before[1:-1, 1:-2] = out
    assert torch.equal(room, before)


def test_a_row_of_a_product_does_not_depend_on_the_others(native: Native) -> None:
    dtype = type_of(native)
    a, b = numbers(130, 600, dtype=dtype, seed=0).detach(), numbers(600, 300, dtype=dtype, seed=1).detach()
    whole, part = a.new_empty(130, 300), a.new_empty(3, 21)
    native.multiply(a, b, None, whole)
    native.multiply(a[95:98], b[:, 250:271], None, part)
    assert torch.equal(part, whole[95:98, 250:271])
