"""The compiled products of few rows and the attention over pages, against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gspo.rollout.embedded.library import LARGE_PAGES_FROM, Library, Weight, load_decoding, room

pytestmark = pytest.mark.skipif(load_decoding(torch.float32) is None, reason="no C compiler here: torch code is used")
DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-12)]


def library(dtype: torch.dtype) -> Library:
    found = load_decoding(dtype)
    assert found is not None
    return found


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def packed(functions: Library, weight: Tensor, bias: Tensor | None = None) -> tuple[Weight, Tensor]:
    """The structure and the memory that it points to."""
    panels = torch.empty(functions.panel_numbers(*weight.shape), dtype=weight.dtype)
    functions.pack(weight, None, panels)
    at = None if bias is None else bias.data_ptr()
    return Weight(panels=panels.data_ptr(), bias=at, depth=weight.shape[1], width=len(weight)), panels


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 50])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (7, 33), (64, 32), (300, 70)])
@pytest.mark.parametrize("biased", [True, False])
def test_product(dtype: torch.dtype, bound: float, rows: int, depth: int, width: int, biased: bool) -> None:
    """Widths that fill panels and that do not, depths that are no multiple of anything."""
    functions = library(dtype)
    states, weight = numbers(rows, depth, dtype=dtype), numbers(width, depth, dtype=dtype, seed=1)
    bias = numbers(width, dtype=dtype, seed=2) if biased else None
    head, _memory = packed(functions, weight, bias)
    found = torch.full((rows, width), torch.nan, dtype=dtype)
    functions.project(states, head, found)
    wanted = torch.nn.functional.linear(states, weight, bias)
    torch.testing.assert_close(found, wanted, atol=bound * float(wanted.abs().max()), rtol=bound)


def test_pack_takes_rows_with_a_stride() -> None:
    functions, whole = library(torch.float32), numbers(40, 20, dtype=torch.float32)
    part = whole[:, :9]
    head, _memory = packed(functions, part)
    found = torch.empty(3, 40)
    functions.project(numbers(3, 9, dtype=torch.float32, seed=1), head, found)
    torch.testing.assert_close(found, numbers(3, 9, dtype=torch.float32, seed=1) @ part.t())


def test_a_row_is_the_same_bit_for_bit_in_any_company_and_on_any_number_of_threads(threads: None) -> None:
    functions = library(torch.float32)
    states, weight = numbers(70, 333, dtype=torch.float32), numbers(129, 333, dtype=torch.float32, seed=1)
    head, _memory = packed(functions, weight)
    together = torch.empty(70, 129)
    functions.project(states, head, together)
    for count in (1, 2, 5, 13):
        alone = torch.empty(count, 129)
        functions.project(states[:count].contiguous(), head, alone)
        assert torch.equal(alone, together[:count])
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        again = torch.empty(70, 129)
        functions.project(states, head, again)
        assert torch.equal(again, together)


def test_room_is_what_was_asked_for() -> None:
    for count in (1, LARGE_PAGES_FROM // 4 + 1):
        memory = room(count, torch.float32)
        assert memory.shape == (count,)
        memory.fill_(2.0)
        assert float(memory.sum(dtype=torch.float64)) == 2.0 * count


PROGRAM = """
import torch
from gspo.policy.native import load_native
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded import EmbeddedEngine
from gspo.rollout.embedded.decoder import make_decoder
from tests.policy.models import small_policy
policy = small_policy("qwen3_moe")
assert load_native(torch.float32) is None and make_decoder(policy, 4, 64, 32) is None
request = GenerationRequest("p", (20, 21, 22), (1, 2, 3, 4, 5))
(row,) = EmbeddedEngine(policy, max_slots=3).generate([request], SamplingParams(20, 0.9, frozenset(range(3, 9))))
print([c.token_ids.tolist() for c in row])
"""


def test_without_a_compiler_the_same_tokens() -> None:
    from gspo.rollout.base import GenerationRequest, SamplingParams
    from gspo.rollout.embedded import EmbeddedEngine
    from tests.policy.models import small_policy

    environment = os.environ | {"GSPO_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    request = GenerationRequest("p", (20, 21, 22), (1, 2, 3, 4, 5))
    params = SamplingParams(20, 0.9, frozenset(range(3, 9)))
    (row,) = EmbeddedEngine(small_policy("qwen3_moe"), max_slots=3).generate([request], params)
    assert done.stdout.strip() == str([c.token_ids.tolist() for c in row])
