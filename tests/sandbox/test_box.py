import json
import os
import threading
import time
from pathlib import Path

import pytest

from gspo.errors import InputError, RunError
from gspo.sandbox import BoxResult, Ending, Limits, Sandbox, open_sandbox
from gspo.sandbox import box as box_module
from gspo.sandbox.box import require_result
from gspo.sandbox.process import input_file

from .programs import survivors


def python(sandbox, source, stdin=b"", **limits):
    return sandbox.run_python({"main.py": source}, stdin=stdin, limits=Limits(**limits))


def test_input_output_and_exit_status(sandbox):
    result = python(
        sandbox, "import sys; print(sys.stdin.read()[::-1]); print('e', file=sys.stderr); sys.exit(3)", b"abc"
    )
    assert (result.ending, result.exit_status, result.stdout, result.stderr) == (Ending.EXIT, 3, b"cba\n", b"e\n")
    assert 0 < result.wall_s < 10
    assert not result.failed


def test_a_signal_is_128_and_more(sandbox):
    assert python(sandbox, "import os; os.kill(os.getpid(), 15)").exit_status == 128 + 15


def test_arguments_and_files_beside_the_script(sandbox):
    source = "import sys; print(open(sys.argv[1]).read(), sys.argv[2])"
    result = sandbox.run_python({"main.py": source, "a.txt": "text"}, arguments=["{box}/a.txt", "two"])
    assert result.stdout == b"text two\n"


def test_an_executable_runs_too(sandbox):
    """A script with the box's own Python named in its first line, run by its path."""
    script = f"#!{sandbox.backend.interpreter.executable}\nprint('run')\n"
    assert sandbox.run(["{box}/tool"], {"tool": script}).stdout == b"run\n"


def test_the_program_is_only_what_it_says_it_is(sandbox):
    """A fresh interpreter: no module and no variable of the launcher, nothing in the environment."""
    source = (
        "import sys, os, json\n"
        "print(json.dumps([sorted(set(globals())), 'gspo' in sys.modules, sys.argv[0][-7:],"
        " sorted(set(os.environ) - {'PWD', 'LC_CTYPE'}), sys._getframe().f_back is None]))"
    )
    names, has_gspo, script, environment, outermost = json.loads(python(sandbox, source).stdout)
    assert set(names) <= {"json", "os", "sys"} | {n for n in names if n.startswith("__")}
    assert (has_gspo, script, environment, outermost) == (False, "main.py", [], True)


def test_descriptors_of_the_judge_do_not_leak(sandbox):
    source = (
        "import os\n"
        "found = []\n"
        "for fd in range(256):\n"
        "    try: os.fstat(fd); found.append(fd)\n"
        "    except OSError: pass\n"
        "print(found)"
    )
    assert python(sandbox, source).stdout == b"[0, 1, 2]\n"


def test_the_input_cannot_be_changed():
    descriptor = input_file(b"abc")
    try:
        assert os.read(descriptor, 10) == b"abc"
        for change in (lambda: os.write(descriptor, b"x"), lambda: os.ftruncate(descriptor, 0)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(descriptor)


def test_processor_time_and_not_the_clock_decides(sandbox):
    """Half a second of sleep within a limit of 0.3 s is fine, half a second of work is not."""
    assert python(sandbox, "import time; time.sleep(0.5)", cpu_s=0.3, wall_s=10).ending is Ending.EXIT
    busy = python(sandbox, "import time\nwhile time.process_time() < 5: pass", cpu_s=0.3, wall_s=10)
    assert (busy.ending, busy.detail) == (Ending.TIME, "more than 0.3 s of processor time")
    assert 0.3 < busy.cpu_s < 1.0


def test_output_is_cut_at_the_limit(sandbox):
    result = python(sandbox, "import os\nwhile True: os.write(1, b'x' * 4096)", output_kb=16)
    assert (result.ending, len(result.stdout)) == (Ending.OUTPUT, 16 * 1024)
    assert python(sandbox, "print('x' * 16383)", output_kb=16).ending is Ending.EXIT  # with the newline exactly 16 KiB


def test_at_most_so_many_boxes_at_once(sandbox):
    """Each run notes when it started and ended; at no moment more than two overlap."""
    source = "import time; a = time.time(); time.sleep(0.15); print(a, time.time())"
    spans = []
    threads = [
        threading.Thread(target=lambda: spans.append(tuple(map(float, python(sandbox, source).stdout.split()))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans) == 6
    assert all(sum(a <= start < b for a, b in spans) <= sandbox.num_slots for start, _ in spans)


class Flaky:
    """A backend whose box cannot be built the first ``failures`` times."""

    name = "flaky"

    def __init__(self, real, failures):
        self.real, self.failures, self.calls = real, failures, 0
        self.interpreter = real.interpreter

    def place(self, directory):
        return self.real.place(directory)

    def launch(self, *arguments):
        self.calls += 1
        if self.calls <= self.failures:
            raise BlockingIOError(11, "no more processes")
        return self.real.launch(*arguments)

    def outcome(self, status, code):
        return self.real.outcome(status, code)


def test_a_box_that_cannot_be_built_is_tried_again(sandbox, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    backend = Flaky(sandbox.backend, 2)
    assert python(Sandbox(backend, 1), "print(1)").stdout == b"1\n"
    assert backend.calls == 3


def test_and_then_it_is_a_failure_not_a_verdict(sandbox, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    result = python(Sandbox(Flaky(sandbox.backend, 99), 1), "print(1)")
    assert result.failed
    assert "no more processes" in result.detail
    with pytest.raises(RunError, match=r"failed 3 times.*no more processes"):
        require_result(result)


def test_a_box_that_vanishes_is_a_failure_and_leaves_nothing(sandbox):
    """The box is killed from outside, as by a machine out of memory, at several moments of its start."""

    class Killed(Flaky):
        delay_s = 0.0

        def launch(self, *arguments):
            launched = self.real.launch(*arguments)
            time.sleep(self.delay_s)
            launched.end()
            return launched

    backend = Killed(sandbox.backend, 0)
    for backend.delay_s in (0.0, 0.003, 0.006, 0.03):
        result = Sandbox(backend, 1)._run_once(
            [sandbox.backend.interpreter.executable, "-c", "import time; time.sleep(60)", "{box}"], {}, b"", 0, Limits()
        )
        assert result.failed or result.exit_status == 128 + 9
        assert survivors() == []


def test_no_isolation_is_refused_unless_named(monkeypatch):
    def nothing_works(name, interpreter):
        raise InputError("forbidden here")

    monkeypatch.setattr(box_module, "_backend", nothing_works)
    with pytest.raises(
        InputError, match=r'no isolation works.*bubblewrap with .*forbidden.*landlock with .*isolation = "none"'
    ):
        open_sandbox("auto")


def test_none_runs_with_limits_only():
    sandbox = open_sandbox("none", num_slots=1)
    assert sandbox.isolation == "none"
    assert python(sandbox, "print(1)").stdout == b"1\n"
    assert python(sandbox, "while True: pass", cpu_s=0.2).ending is Ending.TIME


def test_why_a_better_isolation_was_not_taken(monkeypatch):
    real = box_module._backend

    def no_bubblewrap(name, interpreter):
        if name == "bubblewrap":
            raise InputError("there is no bwrap on this machine")
        return real(name, interpreter)

    monkeypatch.setattr(box_module, "_backend", no_bubblewrap)
    try:
        fallback = open_sandbox("auto", 1)
    except InputError as error:
        pytest.skip(str(error))
    assert fallback.isolation == "landlock"
    assert all("there is no bwrap" in reason for reason in fallback.rejected)
    assert fallback.rejected


def test_an_unknown_isolation_is_named():
    with pytest.raises(InputError, match="no isolation 'docker'; there are auto, bubblewrap, landlock, none"):
        open_sandbox("docker")


@pytest.mark.parametrize("name", ["cpu_s", "wall_s", "memory_mb", "max_processes", "output_kb", "scratch_mb"])
def test_limits_must_be_positive(name):
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"the limit {name} is"):
            Limits(**{name: value})


def test_nothing_of_a_run_stays_on_disk(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    python(sandbox, "print(1)")
    python(sandbox, "while True: pass", cpu_s=0.1)
    assert list(Path(tmp_path).iterdir()) == []


def test_results_compare():
    assert BoxResult(Ending.EXIT, 0) == BoxResult(Ending.EXIT, 0)
