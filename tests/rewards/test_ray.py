"""The verifiers inside a Ray actor. Ray is no dependency: where it is not installed, the test is skipped."""

import json
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

G12 = json.loads((Path(__file__).parents[1] / "cases" / "math_cases.json").read_text())[1]


@pytest.fixture
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_hanging_answers_in_an_actor_do_not_take_it_down(cluster):
    """Case G12: an actor calls from a worker's main thread or from a thread of its own; neither gets SIGALRM's help."""

    class Judge:
        def judge(self, items, limit_s):
            from gspo.rewards.pool import VerifierPool

            with VerifierPool(2, float(limit_s), preload=["gspo.rewards.math"]) as pool:
                return [verdict.value for verdict in pool.run("gspo.rewards.math:verify", items)]

    for max_concurrency in (1, 2):
        judge = ray.remote(Judge).options(max_concurrency=max_concurrency, num_cpus=1).remote()
        values = ray.get(judge.judge.remote(G12["input"]["items"], G12["input"]["limit_seconds"]), timeout=300)
        assert values == G12["expected"]["verdicts"]
        ray.kill(judge)
