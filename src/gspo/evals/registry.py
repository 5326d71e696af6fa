"""The benchmarks by name. A module is imported when its benchmark is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Final

from gspo.errors import ConfigError
from gspo.evals.benchmark import Benchmark

#: Name to "module:attribute".
BENCHMARKS: Final = MappingProxyType(
    {
        "aime24": "gspo.evals.aime:AIME24",
        "custom": "gspo.evals.custom:CUSTOM",
        "livecodebench": "gspo.evals.livecodebench:LIVECODEBENCH",
        "codeforces": "gspo.evals.codeforces:CODEFORCES",
        "own-contests": "gspo.evals.codeforces:OWN_CONTESTS",
        "own-integers": "gspo.evals.own:OWN_INTEGERS",
        "own-programs": "gspo.evals.own:OWN_PROGRAMS",
    }
)


def find_benchmark(name: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        ConfigError: there is none; the nearest is named.
    """
    if name not in BENCHMARKS:
        close = get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(BENCHMARKS)}"
        raise ConfigError(f"there is no benchmark {name!r}; {hint}")
    module, _, attribute = BENCHMARKS[name].partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, Benchmark)
    return found
