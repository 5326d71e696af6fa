"""Compiled kernels for the parts of a decoder that memory limits: norms, rotations, gates, attention of one token.

``native.c`` is compiled by the machine's own C compiler the first time it is needed (about a second) and kept in the
user's cache directory. Without a compiler, off the CPU, or with ``GSPO_NATIVE=0`` everything runs through the model's
own torch code; results agree to rounding, and tests compare them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
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
#: Contraction to fused multiply-adds is on; nothing else departs from IEEE arithmetic.
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
COMPILE_TIMEOUT_S = 60


def native_for(tensor: Tensor) -> Native | None:
    """The kernels for tensors like this one, or None where there are none."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return None
    return load_native(tensor.dtype)


@functools.cache
def load_native(dtype: torch.dtype) -> Native | None:
    """Compiles if needed and loads. None without a C compiler, or if it fails on this machine."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or os.environ.get("GSPO_NATIVE") == "0":
        return None
    try:
        path = _compiled(compiler, dtype)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    return Native(library, ctypes.c_double if dtype == torch.float64 else ctypes.c_float)


@functools.cache
def keep_freed_memory() -> bool:
    """Tells the C library to keep freed blocks of up to 32 MB for the next ones; False where it cannot be told.

    By default it maps fresh pages for every activation and gives them back, and touching them for the first time costs
    more than the operation that fills them. The peak is the same; between peaks the process stays at it.
    """
    mmap_threshold, trim_threshold = -3, -1  # parameters of mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not the GNU C library
        return False
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, 2**31 - 1))


def _compiled(compiler: str, dtype: torch.dtype) -> Path:
    """Path of the library for this source, compiler and processor."""
    is_double = dtype == torch.float64
    command = [compiler, *FLAGS, f"-DREAL={'double' if is_double else 'float'}", f"-DIS_DOUBLE={int(is_double)}"]
    identity = "\0".join([SOURCE.read_text(), *command, torch.__version__, _processor()])
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo"
    target = directory / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / target.name
        subprocess.run(
            [*command, str(SOURCE), "-o", str(built), "-lm"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
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
class Native:
    """The functions of ``native.c`` on contiguous CPU tensors of one dtype."""

    library: Any
    real: Any  # the C type of one number

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, inverse: Tensor | None) -> None:
        """(..., H) -> out (..., H); inverse (...) receives 1 / sqrt(mean(x^2) + eps)."""
        size = x.shape[-1]
        self.library.rms_norm(
            _at(x), _at(weight), self.real(eps), _int(x.numel() // size), _int(size), _at(out), _at(inverse)
        )

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, grad_x: Tensor, partial: Tensor
    ) -> None:
        """partial: (threads, H) zeros; its sum over threads is the gradient of the weight."""
        size = x.shape[-1]
        self.library.rms_norm_backward(
            *map(_at, (grad, x, weight, inverse)), _int(x.numel() // size), _int(size), _at(grad_x), _at(partial)
        )

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
        """(S, heads, D) with tables (S, D) -> out (S, heads, D); inverse (S, heads)."""
        self.library.norm_rotate(
            _at(x), _at(weight), self.real(eps), _at(cosine), _at(sine), *map(_int, x.shape), _at(out), _at(inverse)
        )

    def norm_rotate_backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        inverse: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        grad_x: Tensor,
        partial: Tensor | None,
    ) -> None:
        self.library.norm_rotate_backward(
            *map(_at, (grad, x, weight, inverse, cosine, sine)), *map(_int, grad.shape), _at(grad_x), _at(partial)
        )

    def swiglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """silu(gate) * up; gate and up (rows, I) have one row stride, out is contiguous."""
        rows, size = gate.shape
        self.library.swiglu(_at(gate), _at(up), _int(gate.stride(0)), _int(rows), _int(size), _at(out))

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
        rows, size = gate.shape
        self.library.swiglu_backward(
            *map(_at, (grad, gate, up)), _int(gate.stride(0)), _int(rows), _int(size), _at(grad_gate), _at(grad_up)
        )

    def combine(self, y: Tensor, places: Tensor, gates: Tensor | None, out: Tensor) -> None:
        """out (n, H): sums over k of gates (n, K), or 1, times rows places (n, K) of y (m, H)."""
        self.library.combine(*map(_at, (y, places, gates)), *map(_int, places.shape), _int(out.shape[1]), _at(out))

    def combine_backward(
        self, grad: Tensor, y: Tensor, places: Tensor, gates: Tensor, grad_y: Tensor, grad_gates: Tensor
    ) -> None:
        self.library.combine_backward(
            *map(_at, (grad, y, places, gates)),
            *map(_int, places.shape),
            _int(grad.shape[1]),
            _at(grad_y),
            _at(grad_gates),
        )

    def decode_attention(
        self,
        projected: Tensor,
        norms: tuple[Tensor, float, Tensor, float] | None,
        tables: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        num_query_heads: int,
        window: int | None,
        scale: float,
        out: Tensor,
    ) -> None:
        """One token per row: projected (n, (Hq + 2 Hkv) D) -> out (n, Hq D); keys and values (slots, L, Hkv, D) get it.

        norms: weight and epsilon for queries, then for keys. tables: cosine and sine (positions, D).
        """
        query_weight, query_eps, key_weight, key_eps = norms or (None, 0.0, None, 0.0)
        _, length, key_heads, size = keys.shape
        self.library.decode_attention(
            *map(_at, (projected, query_weight, key_weight)),
            self.real(query_eps),
            self.real(key_eps),
            *map(_at, (*tables, keys, values, positions)),
            *map(_int, (len(projected), num_query_heads, key_heads, size, length, window or 0)),
            self.real(scale),
            _at(out),
        )


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    """Address of the first number."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


_int = ctypes.c_int64
