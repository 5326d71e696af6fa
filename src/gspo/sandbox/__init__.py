"""Programs that nobody trusts, run in a box: one fresh box per run, nothing comes out but bytes and an ending.

The parts: ``limits`` (what a box may use, how a run ended), ``interpreter`` (which Python, and which paths it needs),
``seccomp`` (the system calls that a box may make), ``bubblewrap`` and ``native`` (the two ways to build a box),
``guest`` (the scripts that run on the other side), ``process`` (watches one run), ``selftest`` and ``box`` (the
``Sandbox`` that callers use). What is right or wrong is not decided here: see ``gspo.rewards.code``.
"""

from gspo.sandbox.box import ISOLATIONS, Sandbox, open_sandbox
from gspo.sandbox.limits import BoxResult, Ending, Limits

__all__ = ["ISOLATIONS", "BoxResult", "Ending", "Limits", "Sandbox", "open_sandbox"]
