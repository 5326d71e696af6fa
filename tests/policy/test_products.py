"""Products on tile registers: as exact as float32, for the matrices that they are meant for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gspo.policy.native import load_native, may_use_tiles
from gspo.policy.products import product

TILES = pytest.mark.skipif(
    load_native(torch.float32) is None or not may_use_tiles(), reason="this processor has no tile registers"
)
#: Large enough for tiles, and no multiple of 16 or 32 anywhere.
ROWS, DEPTH, COLUMNS = 130, 167, 97


def numbers(*shape: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal, and over 10^-spread to 10^spread in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 10 ** (spread * sizes)).float()


@pytest.mark.parametrize("turned", [False, True])
def test_the_identity_gives_every_number_back(turned: bool) -> None:
    """Three parts of 8 bits hold all 24 of a float, so nothing is lost where nothing is added up."""
    x = numbers(DEPTH, DEPTH, spread=25)
    one = torch.eye(DEPTH)
    x = x.t() if turned else x
    assert torch.equal(product(x, one), x)
    assert torch.equal(product(one, x), x)


@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_the_error_is_that_of_float32(spread: float) -> None:
    """A sum of K products in float32, in any order, is off by at most K 2^-24 sum |a b| (and what is left out of each
    product by less than 2^-24 |a b|): Higham, Accuracy and Stability of Numerical Algorithms, equation 3.5."""
    a, b = numbers(ROWS, DEPTH, spread=spread), numbers(DEPTH, COLUMNS, seed=1, spread=spread)
    exact = a.double() @ b.double()
    allowed = (DEPTH + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs())
    error = (product(a, b).double() - exact).abs()
    assert bool((error <= allowed).all())
    plain = (a @ b).double() - exact
    assert float(error.square().mean()) <= 2 * float(plain.square().mean())  # no worse than torch's own


def test_added_to_a_matrix_a_row_and_in_place() -> None:
    a, b = numbers(ROWS, DEPTH), numbers(DEPTH, COLUMNS, seed=1)
    exact = (a.double() @ b.double()).float()
    base, row = numbers(ROWS, COLUMNS, seed=2), numbers(COLUMNS, seed=3)
    torch.testing.assert_close(product(a, b, base=base), base + exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(product(a, b, base=row), row + exact, rtol=1e-5, atol=1e-4)
    whole = torch.full((ROWS, COLUMNS + 6), 7.0)
    part = whole[:, 3:-3]
    part.copy_(base)
    assert product(a, b, out=part, base=part) is part
    torch.testing.assert_close(part, base + exact, rtol=1e-5, atol=1e-4)
    assert bool((whole[:, :3] == 7).all())
    assert bool((whole[:, -3:] == 7).all())


def test_a_number_that_is_not_finite_stays_in_its_row() -> None:
    a, b = numbers(ROWS, DEPTH), numbers(DEPTH, COLUMNS, seed=1)
    a[3, 5], a[40, 0] = torch.inf, torch.nan
    finite = product(a, b).isfinite()
    assert not bool(finite[[3, 40]].any())
    finite[[3, 40]] = True
    assert bool(finite.all())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (numbers(3, 4), numbers(4, 5)),  # small
        (numbers(ROWS, 2 * DEPTH)[:, ::2], numbers(DEPTH, COLUMNS)),  # gaps both ways
        (numbers(ROWS, DEPTH).double(), numbers(DEPTH, COLUMNS).double()),
    ],
)
def test_anything_else_is_left_to_torch(a: Tensor, b: Tensor) -> None:
    assert torch.equal(product(a, b), torch.mm(a, b))


@TILES
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads() -> None:
    a, b = numbers(700, DEPTH), numbers(DEPTH, COLUMNS, seed=1)
    before, together = torch.get_num_threads(), product(a, b)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(product(a, b), together)
            assert torch.equal(product(a[:130], b), together[:130])
    finally:
        torch.set_num_threads(before)


@TILES
@pytest.mark.parametrize("how", ["GSPO_TILES=0", "a compiler that does not know them"])
def test_without_tiles_the_other_kernels_remain(how: str, tmp_path: Path) -> None:
    compiler = tmp_path / "old-cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -mno-amx-bf16\n')
    compiler.chmod(0o755)
    other = {"GSPO_TILES": "0"} if how.startswith("GSPO") else {"CC": str(compiler)}
    code = "import torch; from gspo.policy.native import load_native; print(load_native(torch.float32).has_tiles)"
    environment = os.environ | other | {"XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
