"""LiveCodeBench, code generation.

The parts: ``release`` (releases, windows, how many problems), ``files`` (the benchmark's own files), ``private_tests``
(their packed tests, read without unpickling), ``errata`` (known faults), ``compat`` and ``grading`` (the two graders),
``benchmark`` (as ``gspo eval`` sees it). See docs/livecodebench.md.
"""

from gspo.evals.livecodebench.benchmark import LIVECODEBENCH

__all__ = ["LIVECODEBENCH"]
