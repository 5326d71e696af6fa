"""Scripts that run on the other side of the wall. They are never imported here, only handed over as files."""

from pathlib import Path

#: Builds and supervises a box without bubblewrap.
SUPERVISOR = Path(__file__).with_name("supervise.py")
#: Calls one function of a program.
CALL_SHIM = Path(__file__).with_name("call.py")
#: Tries what a box must not allow, and says what it could do.
PROBE = Path(__file__).with_name("probe.py")
#: Runs a program over all tests of a problem, with the faults of LiveCodeBench's own harness.
HARNESS = Path(__file__).with_name("harness.py")
