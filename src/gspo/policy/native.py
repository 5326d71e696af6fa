"""Compiled kernels for the parts of an update that memory limits: norms, rotations, gates, attention, AdamW.

``native.c`` is compiled by the machine's own C compiler the first time it is needed (about a second) and kept in the
user's cache directory. Without a compiler, off the CPU, or with ``GSPO_NATIVE=0`` everything runs through the model's
own torch code; results agree to rounding, and tests compare them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
#: Numbers that one partial sum of ``squares`` covers, as in update.h.
STRETCH = 16384
#: Contraction to fused multiply-adds is on; what tiles do besides is said in tiles.h. Nothing else departs from IEEE
#: arithmetic.
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
COMPILE_TIMEOUT_S = 60
#: Bytes from which a tensor may have pages of its own.
APART_FROM = 1 << 20


def native_for(tensor: Tensor) -> Native | None:
    """The kernels for tensors like this one, or None where there are none."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return None
    return load_native(tensor.dtype)


@functools.cache
def load_native(dtype: torch.dtype) -> Native | None:
    """Compiles if needed and loads. None without a C compiler, or if it fails on this machine."""
    library = load_library(SOURCE, dtype)
    return None if library is None else Native(library, ctypes.c_double if dtype == torch.float64 else ctypes.c_float)


@functools.cache
def load_library(source: Path, dtype: torch.dtype) -> ctypes.CDLL | None:
    """A C source of ours, compiled for float32 or float64; it may include headers of its folder and of this one."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or os.environ.get("GSPO_NATIVE") == "0":
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, source, dtype)))
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def keep_freed_memory() -> bool:
    """Tells the C library to keep freed blocks for the next ones; False where it cannot be told.

    By default it maps fresh pages for every activation and gives them back, and touching them for the first time costs
    more than the operation that fills them. The peak is the same; between peaks the process stays at it.
    """
    mmap_max, trim_threshold = -4, -1  # parameters of mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not the GNU C library
        return False
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def zeros_apart(like: Tensor) -> Tensor:
    """Zeros of a CPU tensor's shape, in pages of their own where they are large; for what is no activation.

    On the heap, which keeps what is freed, a block that stays or has a size of its own leaves gaps that activations do
    not fill. These pages go back to the system with the tensor.
    """
    if like.device.type != "cpu" or like.nbytes < APART_FROM:
        return torch.zeros_like(like)
    pages = mmap.mmap(-1, like.nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)


@functools.cache
def may_use_tiles() -> bool:
    """Whether this process may use tile registers for bfloat16 (AMX), which it asks the system for.

    ``GSPO_TILES=0`` leaves them alone, for comparisons.
    """
    if os.environ.get("GSPO_TILES") == "0" or platform.system() != "Linux" or "amx_bf16" not in _processor().split():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # arch_prctl(2), documented in the kernel's xstate.rst
    try:
        return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0
    except (OSError, AttributeError):
        return False


def _compiled(compiler: str, source: Path, dtype: torch.dtype) -> Path:
    """Path of the library for this source, compiler and processor."""
    is_double = dtype == torch.float64
    tiles = may_use_tiles() and not is_double
    defines = {"REAL": "double" if is_double else "float", "IS_DOUBLE": int(is_double), "HAS_TILES": int(tiles)}
    command = [compiler, *FLAGS, *(f"-D{name}={value}" for name, value in defines.items())]
    folders = sorted({source.parent, SOURCE.parent})
    texts = [file.read_text() for file in (source, *(h for folder in folders for h in sorted(folder.glob("*.h"))))]
    identity = "\0".join([*texts, *command, torch.__version__, _processor()])
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo"
    target = directory / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / target.name
        subprocess.run(
            [*command, f"-I{SOURCE.parent}", str(source), "-o", str(built), "-lm"],
            check=True,
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        built.replace(target)  # at once, so that two processes may compile at the same time
    return target


def _processor() -> str:
    """What ``-march=native`` means here: a cache directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))


@dataclass(frozen=True, eq=False)
class Pairs:
    """The choices of n tokens, K each, sorted by expert and in it by token; see experts.h."""

    starts: Tensor  # (E + 1,): the first place of each expert's pairs
    order: Tensor  # (n K,): the pair, token * K + choice, at each place
    places: Tensor  # (n, K): of each token's pairs, ascending


@dataclass(frozen=True, eq=False)
class Native:
    """The functions of ``native.c`` on contiguous CPU tensors of one dtype."""

    library: Any
    real: Any  # the C type of one number

    @property
    def lanes(self) -> int:
        """What the size of a head must be a multiple of for ``attend``."""
        return int(self.library.block_lanes())

    @property
    def has_tiles(self) -> bool:
        """Whether ``multiply`` runs on tile registers."""
        return bool(self.library.has_tiles())

    def multiply(self, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor) -> None:
        """out (n, m) = base (n, m) or (m,), or 0, plus a (n, k) b (k, m); of each factor's strides one is 1."""
        self.library.multiply(
            _at(a), *map(_int, a.stride()), _at(b), *map(_int, b.stride()),
            *map(_int, (len(a), b.shape[1], len(b))),
            _at(base), _int(base.stride(0) if base is not None and base.dim() == 2 else 0),
            _at(out), _int(out.stride(0)),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, inverse: Tensor | None) -> None:
        """(..., H) -> out (..., H); inverse (...) receives 1 / sqrt(mean(x^2) + eps)."""
        size = x.shape[-1]
        self.library.rms_norm(
            _at(x), _at(weight), self.real(eps), _int(x.numel() // size), _int(size), _at(out), _at(inverse)
        )

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, skip: Tensor | None, grad_x: Tensor
    ) -> Tensor:
        """grad_x (..., H) receives the gradient by x, plus skip (..., H); returns that of the weight (H,)."""
        size, partial = x.shape[-1], _partial(weight)
        self.library.rms_norm_backward(
            *map(_at, (grad, x, weight, inverse, skip)),
            *map(_int, (x.numel() // size, size)),
            _at(grad_x),
            _at(partial),
        )
        return partial.sum(0)

    def norm_rotate(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        cosine: Tensor,
        sine: Tensor,
        out: Tensor,
        inverse: Tensor | None,
    ) -> None:
        """(S, heads, D) and tables (S, D) -> out (S, heads, D), rows of both any stride apart; inverse (S, heads)."""
        self.library.norm_rotate(
            *_heads(x), _at(weight), self.real(eps), _at(cosine), _at(sine), *map(_int, x.shape), *_heads(out),
            _at(inverse),
        )  # fmt: skip

    def norm_rotate_backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        inverse: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        grad_x: Tensor,
    ) -> Tensor | None:
        """grad -> grad_x (S, heads, D), rows any stride apart, may be the same; returns that of the weight (D,)."""
        partial = None if weight is None else _partial(weight)
        self.library.norm_rotate_backward(
            *_heads(grad), _at(x), _int(0 if x is None else x.stride(0)), *map(_at, (weight, inverse, cosine, sine)),
            *map(_int, grad.shape), *_heads(grad_x), _at(partial),
        )  # fmt: skip
        return None if partial is None else partial.sum(0)

    def swiglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """silu(gate) * up; gate and up (rows, I) have one row stride, out is contiguous."""
        rows, size = gate.shape
        self.library.swiglu(_at(gate), _at(up), _int(gate.stride(0)), _int(rows), _int(size), _at(out))

    def swiglu_backward(
        self, grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, out: Tensor | None
    ) -> None:
        """Gradients with the strides of gate and up; out, where given, receives silu(gate) * up again."""
        rows, size = gate.shape
        self.library.swiglu_backward(
            *map(_at, (grad, gate, up)), *map(_int, (gate.stride(0), rows, size)), *map(_at, (grad_gate, grad_up, out))
        )

    def gated_product(self, x: Tensor, gate: Tensor, up: Tensor, projected: Tensor, activated: Tensor) -> None:
        """projected (n, 2 I) = x (n, H) times gate and up (I, H), turned; activated (n, I) = silu(gate x) * up x."""
        self.library.gated_product(
            *map(_at, (x, gate, up)), *map(_int, (*x.shape, len(gate))), _at(projected), _at(activated)
        )

    def gated_product_backward(
        self, grad: Tensor, down: Tensor, projected: Tensor, grad_projected: Tensor, activated: Tensor
    ) -> None:
        """grad_projected (n, 2 I) from the gradient (n, H) by activated times down (H, I), turned; activated again."""
        self.library.gated_product_backward(
            *map(_at, (grad, down)), *map(_int, (*grad.shape, down.shape[1])),
            *map(_at, (projected, grad_projected, activated)),
        )  # fmt: skip

    def mix_experts(
        self,
        pairs: Pairs,
        hidden: Tensor,
        gates: Tensor,
        weights: tuple[Tensor, Tensor],
        skip: Tensor | None,
        projected: Tensor,
        out: Tensor,
    ) -> None:
        """out (n, H) = skip, or 0, plus the gated outputs of experts; projected (n K, 2 I) is for the backward pass."""
        self.library.mix_experts(
            *_pairs(pairs, weights), *map(_at, (hidden, gates, *weights, skip, projected, out)),
        )  # fmt: skip

    def mix_experts_backward(
        self,
        pairs: Pairs,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """inputs: hidden, projected, gates. Writes the gradients of hidden, gates and both weights."""
        self.library.mix_experts_backward(*_pairs(pairs, weights), *map(_at, (grad, *inputs, *weights, *grads)))

    def place_pairs(self, ids: Tensor, num_experts: int) -> Pairs:
        """Of ids (n, K): each a number of an expert, or IndexError."""
        pairs = Pairs(ids.new_empty(num_experts + 1), ids.new_empty(ids.numel()), torch.empty_like(ids))
        found = self.library.place_pairs(
            _at(ids), *map(_int, (*ids.shape, num_experts)), *map(_at, (pairs.starts, pairs.order, pairs.places))
        )
        if not found:
            raise IndexError(f"a token chooses an expert that is not one of {num_experts}")
        return pairs

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Tensor, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """(S, Hq, D), (S, Hkv, D) twice, rows any stride apart -> out (S, Hq, D), lse (S, Hq); see attention.h."""
        self.library.attend(
            *_heads(query, key, value), _at(sequences), _int(len(sequences)),
            *map(_int, (query.shape[1], *key.shape[1:])), self.real(scale), _at(out), _at(lse),
        )  # fmt: skip

    def attend_backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        sequences: Tensor,
        groups: Tensor,
        scale: float,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Writes the gradients of query, key and value, rows any stride apart."""
        query, key, _ = inputs
        delta = torch.empty_like(lse)  # room for the kernel
        self.library.attend_backward(
            _at(grad), *_heads(*inputs), *map(_at, (out, lse, sequences, groups)), _int(len(groups) - 1),
            *map(_int, (query.shape[1], *key.shape[1:])), self.real(scale), _at(delta), *_heads(*grads),
        )  # fmt: skip

    def logprob_rows(
        self, logits: Tensor, targets: Tensor, factor: float, logprobs: Tensor, lse: Tensor, entropies: Tensor | None
    ) -> None:
        """Of softmax(factor * logits) (rows, V): log-probs of the targets, log-sum-exps and entropies (rows,)."""
        self.library.logprob_rows(
            _at(logits),
            _at(targets),
            self.real(factor),
            *map(_int, logits.shape),
            *map(_at, (logprobs, lse, entropies)),
        )

    def logprob_gradient(self, logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, factor: float) -> None:
        """Turns logits into the gradient of sum(grad * log-probs) by them."""
        self.library.logprob_gradient(
            *map(_at, (logits, targets, lse, grad)), self.real(factor), *map(_int, logits.shape)
        )

    def squares(self, x: Tensor, parts: Tensor) -> None:
        """parts (ceil(n / STRETCH),) float64: sums of squares of stretches of x."""
        self.library.squares(_at(x), _int(x.numel()), _at(parts))

    def adamw(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], numbers: tuple[float, ...]) -> None:
        """Parameter, gradient, mean and mean square; clip factor, decay, betas, step size, root correction, epsilon."""
        self.library.adamw(*map(_at, tensors), _int(tensors[0].numel()), *map(self.real, numbers))


def _partial(weight: Tensor) -> Tensor:
    """One row of sums per thread."""
    return weight.new_zeros(torch.get_num_threads(), len(weight))


def _pairs(pairs: Pairs, weights: tuple[Tensor, Tensor]) -> list[Any]:
    """What both directions of a mixture begin with."""
    sizes, (_, size, inner) = (*pairs.places.shape, len(pairs.starts) - 1), weights[1].shape
    return [*map(_int, sizes), *map(_at, (pairs.starts, pairs.order, pairs.places)), _int(size), _int(inner)]


def _heads(*tensors: Tensor) -> list[Any]:
    """Address and row stride of each."""
    return [argument for tensor in tensors for argument in (_at(tensor), _int(tensor.stride(0)))]


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    """Address of the first number."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


_int = ctypes.c_int64
