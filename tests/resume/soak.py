"""``make soak``: 200 steps under faults that end with the weights of a quiet run (``python -m tests.resume.soak``).

Faults: SIGKILL of the whole process group at random instants, verifier workers killed, a slow disk, and, where a tmpfs
may be mounted, a disk that is full now and then. The quiet run must not grow: its memory after the last step is within
5 % of that after step 20.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .processes import Server, same_but_for_its_place
from .runs import DENSE, make_recipe

ISOLATED = "audit = false\nisolate = true\nnum_workers = 1\ntimeout_s = 60.0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="gspo-soak-") as folder, full_disk(Path(folder) / "disk") as disk:
        recipe = write_recipe(Path(folder) / "recipe", options.steps)
        grown = quiet_run(recipe, Path(folder) / "quiet", options.steps)
        kills = disturbed_run(recipe, disk / "run", disk)
        same_but_for_its_place(Path(folder) / "quiet", disk / "run")
    print(f"the same bits after {kills}; memory grew by {grown:.1%} from step 20 to step {options.steps}")
    return int(grown > 0.05)


def write_recipe(folder: Path, num_steps: int) -> Path:
    """The recipe of the suite, longer, its reward in killable processes."""
    make_recipe(folder, DENSE)
    path = folder / "recipe.toml"
    text = path.read_text().replace("num_steps = 2\n", f"num_steps = {num_steps}\n").replace("every = 1", "every = 5")
    path.write_text(text.replace("audit = false", ISOLATED))
    return path


def quiet_run(recipe: Path, run: Path, num_steps: int) -> float:
    """Share by which the memory grew."""
    server = Server(run / "no signals")
    child = server.start("train", str(recipe), str(run))
    early = 0
    late = 0
    while (done := steps(run)) < num_steps:
        size = resident(child)
        early = early or (size if done >= min(20, num_steps // 2) else 0)
        late = size or late
        time.sleep(0.02)
    assert server.wait() == 0
    server.close()
    return late / early - 1


def steps(run: Path) -> int:
    path = run / "events.jsonl"
    return path.read_bytes().count(b'"type": "step"') if path.exists() else 0


def resident(process: int) -> int:
    """Kilobytes; 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def disturbed_run(recipe: Path, run: Path, disk: Path) -> str:
    """Runs under faults until the end; what happened, in words."""
    server = Server(run / "no signals", GSPO_SLOW_DISK_S="0.01")
    counts = {"kills": 0, "killed workers": 0, "full disks": 0}
    while True:
        words = ("resume", str(run)) if (run / "run.json").exists() else ("train", str(recipe), str(run))
        child = server.start(*words)
        end = time.monotonic() + random.uniform(0.5, 5.0)
        filler = disk / "filler"
        while time.monotonic() < end and alive(child):
            time.sleep(0.1)
            dice = random.random()
            if dice < 0.02:
                counts["killed workers"] += kill_a_worker(child)
            elif dice < 0.03 and os.path.ismount(disk):
                with contextlib.suppress(OSError), filler.open("wb") as file:
                    while True:
                        file.write(bytes(1 << 16))
                counts["full disks"] += 1
                time.sleep(0.5)
                filler.unlink()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        status = server.wait()
        assert status in (0, 1, -signal.SIGKILL), status  # 1: the disk was full
        counts["kills"] += status == -signal.SIGKILL
        if status == 0:
            server.close()
            return ", ".join(f"{number} {name}" for name, number in counts.items())


def alive(process: int) -> bool:
    return resident(process) > 0


def kill_a_worker(process: int) -> int:
    """Kills one child of a run, if it has any; how many."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True).stdout.split()
    if not found:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(random.choice(found)), signal.SIGKILL)
    return 1


@contextlib.contextmanager
def full_disk(path: Path, megabytes: int = 8):
    """A small disk of its own, where one may be mounted; else a plain folder, which is never full."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "gspo-soak", str(path)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    if not mounted:
        print("no tmpfs may be mounted here: the disk will never be full")
    try:
        yield path
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


if __name__ == "__main__":
    sys.exit(main())
