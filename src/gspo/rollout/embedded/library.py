"""The compiled decoding step: ``decode.c`` through ctypes, and the structures that both sides know.

Field by field these classes are the structures of ``decode.c``, ``panels.h`` and ``pages.h``.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.policy.native import load_library

SOURCE = Path(__file__).with_name("decode.c")
#: Bytes from which a buffer asks for large pages: the processor then fetches ahead across 4 kB, and misses fewer
#: translations. A step that reads all weights from memory took 2 to 3 times as long without.
LARGE_PAGES_FROM = 4 << 20
#: What becomes of the MLP of a layer, as in decode.c.
GATED, MIXTURE, FOREIGN = range(3)


class Weight(ctypes.Structure):
    """A matrix in panels; bias is null or one number per output."""

    _fields_ = (("panels", c_void_p), ("bias", c_void_p), ("depth", c_int64), ("width", c_int64))


class Layer(ctypes.Structure):
    """The weights of one layer."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, Weight) for name in ("projection", "output", "router", "gate_up", "down")),
        *((name, c_double) for name in ("input_eps", "query_eps", "key_eps", "mlp_eps", "scale")),
        *((name, c_int64) for name in ("window", "kind", "experts", "choices", "normalised")),
    )


class Step(ctypes.Structure):
    """The rows of one step, where their keys are, and room for what is computed."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in ("rows", "size", "table_width", "query_heads", "key_heads", "head_size", "layer_stride")
        ),
        *((name, c_void_p) for name in ("positions", "prompts", "table", "cosine", "sine")),
        *((name, c_void_p) for name in ("hidden", "normed", "projected", "attended", "activated", "scores", "mixed")),
        *((name, c_void_p) for name in ("gates", "routes", "places", "sources", "starts")),
    )


@dataclass(frozen=True, eq=False)
class Library:
    """The functions of decode.c for one dtype, on contiguous CPU tensors."""

    functions: Any
    dtype: torch.dtype
    panel: int  # outputs of a panel
    page: int  # positions of a page

    def panel_numbers(self, width: int, depth: int, gated: bool = False) -> int:
        """Numbers of a packed weight of `width` outputs and `depth` inputs (twice the outputs in storage if gated)."""
        columns = self.panel // 2 if gated else self.panel
        return -(-width // columns) * depth * self.panel

    def pack(self, weight: Tensor, ups: Tensor | None, panels: Tensor) -> None:
        """weight (outputs, inputs), with ups of the same shape as gate and up side by side, into panels."""
        outputs, inputs = weight.shape
        self.functions.pack(
            address(weight), address(ups), *map(c_int64, (weight.stride(0), outputs, inputs)), address(panels)
        )

    def page_numbers(self, key_heads: int, size: int) -> int:
        """Numbers of one layer in one page."""
        return int(self.functions.page_size(*map(c_int64, (key_heads, size))))

    def keep_prompt(self, keys: Tensor, values: Tensor, offset: int, pages: Tensor) -> None:
        """keys, values (p, Hkv, D), last stride 1, into the prompt's pages (addresses) `offset` numbers further on."""
        tokens, key_heads, size = keys.shape
        strides = (*keys.stride()[:2], *values.stride()[:2])
        self.functions.keep_prompt(
            address(keys), address(values), *map(c_int64, (*strides, tokens, offset, key_heads, size)), address(pages)
        )

    def embed(self, embedding: Tensor, token_ids: Tensor, step: Step) -> None:
        self.functions.embed(address(embedding), address(token_ids), ctypes.byref(step))

    def decode_layers(self, layers: Any, first: int, last: int, step: Step) -> None:
        self.functions.decode_layers(layers, c_int64(first), c_int64(last), ctypes.byref(step))

    def decode_logits(self, norm: Tensor, eps: float, head: Weight, step: Step, logits: Tensor) -> None:
        self.functions.decode_logits(
            address(norm), c_double(eps), ctypes.byref(head), ctypes.byref(step), address(logits)
        )

    def project(self, states: Tensor, head: Weight, logits: Tensor) -> None:
        """states (n, depth) -> logits (n, width)."""
        self.functions.project(address(states), c_int64(len(states)), ctypes.byref(head), address(logits))

    def choose(self, logits: Tensor, temperature: float, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """See sampling.choose."""
        rows, size = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self.functions.choose(
            address(logits), c_int64(rows), c_int64(size), c_double(temperature), address(uniform), address(tokens),
            address(logprobs),
        )  # fmt: skip
        return tokens, logprobs


@functools.cache
def load_decoding(dtype: torch.dtype) -> Library | None:
    """None without a C compiler, or for a number type other than float32 and float64."""
    functions = load_library(SOURCE, dtype) if dtype in (torch.float32, torch.float64) else None
    if functions is None:
        return None
    for name in ("panel_width", "page_positions", "page_size"):
        getattr(functions, name).restype = c_int64
    return Library(functions, dtype, int(functions.panel_width()), int(functions.page_positions()))


def address(tensor: Tensor | None) -> c_void_p:
    """Of the first number."""
    return c_void_p(None if tensor is None else tensor.data_ptr())


def room(numbers: int, dtype: torch.dtype) -> Tensor:
    """(numbers,) uninitialised, in large pages where that pays and the system has them."""
    size = numbers * dtype.itemsize
    if size < LARGE_PAGES_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numbers, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get no large pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
