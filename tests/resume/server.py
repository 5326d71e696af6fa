"""Starts runs in processes of their own, quickly: everything is imported once, and each run is a fork.

Reads ``train RECIPE RUN_DIR`` or ``resume RUN_DIR`` from standard input, answers with the process id of the run (which
leads a process group of its own) and, when it has ended, with ``status NUMBER``.
"""

from __future__ import annotations

import os
import random
import sys
import time


def slow_down(seconds: float) -> None:
    """Every sync takes up to so much longer."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(random.uniform(0, seconds))
        fsync(descriptor)

    os.fsync = slow


def main() -> None:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    from gspo import launch  # noqa: F401
    from gspo.cli import main as gspo

    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if "GSPO_SLOW_DISK_S" in os.environ:
                slow_down(float(os.environ["GSPO_SLOW_DISK_S"]))
            command = ["--resume", *words[1:]] if words[0] == "resume" else [words[1], "--run-dir", words[2]]
            os._exit(gspo(["train", *command]))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print("status", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
