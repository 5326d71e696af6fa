import asyncio
import gc
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from gspo.errors import InputError, RunError
from gspo.rewards.pool import VerifierPool

from . import behaviours

HERE = behaviours.__name__
G12 = json.loads((Path(__file__).parents[1] / "cases" / "math_cases.json").read_text())[1]
ITEMS = G12["input"]["items"]
LIMIT = G12["input"]["limit_seconds"]
MATH = "gspo.rewards.math:verify"


def alive(pid):
    """Whether a process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def math_pool():
    with VerifierPool(2, float(LIMIT), preload=["gspo.rewards.math"]) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(1, 0.3, memory_limit_mb=512) as pool:
        yield pool


class TestCaseG12:
    """A reward that hangs, or is called from a thread."""

    expected = G12["expected"]["verdicts"]

    def values(self, verdicts):
        return [verdict.value for verdict in verdicts]

    def test_main_thread_twice_without_loss(self, math_pool):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.monotonic()
        assert self.values(math_pool.run(MATH, ITEMS)) == self.expected
        assert self.values(math_pool.run(MATH, ITEMS)) == self.expected
        assert time.monotonic() - start < 2 * (5 * LIMIT + 5)
        assert len(math_pool.process_ids) == 2
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # kilobytes

    def test_worker_thread(self, math_pool):
        results = []
        thread = threading.Thread(target=lambda: results.append(math_pool.run(MATH, ITEMS)))
        thread.start()
        thread.join(60)
        assert self.values(results[0]) == self.expected

    def test_asyncio_task(self, math_pool):
        async def main():
            ticks = 0
            task = asyncio.create_task(math_pool.run_async(MATH, ITEMS * 20))
            while not task.done():
                await asyncio.sleep(0.001)
                ticks += 1
            return await task, ticks

        verdicts, ticks = asyncio.run(main())
        assert self.values(verdicts) == self.expected * 20
        assert ticks > 0  # the loop went on while the verdicts were made

    def test_spawned_process(self):
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        process = context.Process(target=behaviours.judge_in_new_process, args=(ITEMS, results))
        process.start()
        assert results.get(timeout=60) == self.expected
        process.join(30)
        assert process.exitcode == 0


class TestLimits:
    def test_a_hanging_item_is_killed_and_the_pool_heals(self, pool):
        before = pool.counters
        start = time.monotonic()
        late, after = pool.run(f"{HERE}:hang", [(60,), (0,)])
        assert time.monotonic() - start < 10
        assert late.timed_out
        assert late.value is None
        assert late.failure == "ran into the limit of 0.3 s"
        assert 0.3 <= late.seconds < 2
        assert after.value is True
        assert pool.counters["timeouts"] == before["timeouts"] + 1
        assert len(pool.process_ids) == 1

    def test_an_operation_in_c_is_killed_too(self, pool):
        late = pool.run(f"{HERE}:hang_in_c", [(3_000_000_000,)])[0]
        assert late.ran_into_limit

    def test_a_hanging_item_does_not_hold_up_the_others(self):
        with VerifierPool(2, 1.0) as two:
            two.run(f"{HERE}:double", [(1,), (2,)])
            start = time.monotonic()
            verdicts = two.run(f"{HERE}:hang", [(30,)] + [(0,)] * 50)
            assert time.monotonic() - start < 5
            assert [v.value for v in verdicts] == [None] + [True] * 50

    @pytest.mark.parametrize(("name", "how"), [("crash", "signal 11"), ("leave", "exit status 3")])
    def test_a_crash_is_a_verdict(self, pool, name, how):
        before = pool.counters["crashes"]
        verdict = pool.run(f"{HERE}:{name}", [()])[0]
        assert verdict.value is None
        assert not verdict.timed_out
        assert how in verdict.failure
        assert pool.counters["crashes"] == before + 1
        assert pool.run(f"{HERE}:double", [(4,)])[0].value == 8.0

    def test_memory_is_limited(self, pool):
        verdict = pool.run(f"{HERE}:eat_memory", [(4096,)])[0]
        assert verdict.out_of_memory
        assert verdict.value is None
        assert pool.run(f"{HERE}:eat_memory", [(1,)])[0].value is True

    def test_what_a_verifier_prints_goes_nowhere(self, pool, capfd):
        pool.run(f"{HERE}:double", [(1,)])
        assert pool.run(f"{HERE}:shout", [(5,)])[0].value is True
        assert capfd.readouterr() == ("", "")

    def test_a_long_reason_is_cut(self, pool):
        pool.run(f"{HERE}:double", [(1,)])
        assert len(pool.run(f"{HERE}:long_reason", [()])[0].reason) <= 500


class TestCalls:
    def test_order_options_and_values(self, pool):
        verdicts = pool.run(f"{HERE}:double", [(i,) for i in range(100)], options={"offset": 0.5})
        assert [v.value for v in verdicts] == [2 * i + 0.5 for i in range(100)]

    def test_an_exception_is_named(self, pool):
        verdict = pool.run(f"{HERE}:fail", [("gone",)])[0]
        assert verdict.value is None
        assert "KeyError: 'gone'" in verdict.failure

    def test_a_wrong_type_is_a_failure(self, pool):
        assert "returned str" in pool.run(f"{HERE}:return_text", [()])[0].failure

    def test_no_items(self, pool):
        assert pool.run(f"{HERE}:double", []) == []

    def test_arguments_that_are_not_json_are_refused_at_once(self, pool):
        with pytest.raises(TypeError):
            pool.run(f"{HERE}:double", [(object(),)])
        assert pool.run(f"{HERE}:double", [(1,)])[0].value == 2.0

    def test_many_threads_share_a_pool(self, pool):
        results = {}

        def work(number):
            results[number] = pool.run(f"{HERE}:double", [(number,)] * 5)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert {n: {v.value for v in vs} for n, vs in results.items()} == {n: {2.0 * n} for n in range(8)}

    def test_workers_do_not_import_torch(self, pool):
        pool.run("gspo.rewards.number:verify", [("1", "1")])
        assert pool.run(f"{HERE}:loaded_modules", [()])[0].value is False

    def test_wrong_settings_are_refused(self):
        with pytest.raises(InputError, match="at least 1 worker"):
            VerifierPool(0)


class TestEnds:
    def test_close_ends_the_processes(self):
        pool = VerifierPool(2, 5.0)
        pool.run(f"{HERE}:double", [(1,), (2,)])
        pids = pool.process_ids
        assert pids
        pool.close()
        assert not any(map(alive, pids))
        with pytest.raises(RunError, match="closed"):
            pool.run(f"{HERE}:double", [(1,)])

    def test_close_answers_what_still_runs(self):
        pool = VerifierPool(1, 30.0)
        pool.run(f"{HERE}:double", [(1,)])
        results = []
        thread = threading.Thread(target=lambda: results.extend(pool.run(f"{HERE}:hang", [(30,), (30,)])))
        thread.start()
        time.sleep(0.1)
        pool.close()
        thread.join(10)
        assert [verdict.value for verdict in results] == [None, None]
        assert all(verdict.failure for verdict in results)

    def test_a_dropped_pool_leaves_nothing(self):
        pool = VerifierPool(1, 5.0)
        pid = int(pool.run(f"{HERE}:process_id", [()])[0].value)
        del pool
        gc.collect()
        assert wait_until(lambda: not alive(pid))

    def test_no_orphan_after_the_parent_was_killed(self):
        script = f"""
            import threading, time
            from gspo.rewards.pool import VerifierPool
            pool = VerifierPool(2, 60.0)
            pids = [int(v.value) for v in pool.run("{HERE}:process_id", [()] * 20)]
            for _ in range(2):
                threading.Thread(target=pool.run, args=("{HERE}:hang_in_c", [(3_000_000_000,)])).start()
            time.sleep(0.2)
            print(*set(pool.process_ids), flush=True)
            time.sleep(60)
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, env=environment, text=True
        )
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        assert wait_until(lambda: not any(map(alive, pids)))

    def test_a_forked_process_gets_its_own_workers(self):
        script = f"""
            import os
            from gspo.rewards.pool import VerifierPool
            pool = VerifierPool(1, 5.0)
            mine = pool.run("{HERE}:process_id", [()])[0].value
            child = os.fork()
            if child == 0:
                theirs = pool.run("{HERE}:process_id", [()])[0].value
                pool.close()
                os._exit(0 if theirs and theirs != mine else 1)
            status = os.waitpid(child, 0)[1]
            print(os.waitstatus_to_exitcode(status), pool.run("{HERE}:process_id", [()])[0].value == mine)
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, env=environment, text=True, timeout=60
        )
        assert done.stdout.split() == ["0", "True"], done.stderr
