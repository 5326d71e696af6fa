"""The harness on work of a few tokens: arithmetic counted by hand, both settings of a round, the table."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from benchmarks.step_profile import shares
from benchmarks.workloads import WORKLOADS, Size, forward_flops, model_size, prompt_texts, step_flops

from benchmarks import ours, scaling, step, table
from gspo.policy.causal_lm import load_policy

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 8}


def test_arithmetic_of_one_forward() -> None:
    """One prompt of 3, responses of 2 and 1: inputs 3 + 1 + 0, predictions 3; queries see 1+2+3 keys, and 3+1."""
    size = Size(layer_parameters=10, head_parameters=7, attention=5)
    assert forward_flops(size, [3], [(0, 2), (0, 1)]) == 2 * (10 * 4 + 7 * 3) + 4 * 5 * (6 + 4)


def test_a_step_of_w1_is_about_six_times_parameters_times_tokens() -> None:
    size = Size(layer_parameters=3_000_000, head_parameters=25_600, attention=4 * 4 * 64)
    rollout, update = step_flops(WORKLOADS["w1"], size)
    assert update == 3 * rollout
    assert rollout == pytest.approx(2 * 3_025_600 * 128 * 64, rel=0.1)  # attention over 72 tokens is a few percent


def test_only_active_experts_count() -> None:
    config = SimpleNamespace(
        hidden_size=8, num_attention_heads=2, head_dim=4, num_hidden_layers=3, vocab_size=11, num_experts=4,
        num_experts_per_tok=1, moe_intermediate_size=5,
    )  # fmt: skip
    assert model_size(config, 10_000) == Size(10_000 - 3 * (3 * 8 * 5) * 3, 88, 3 * 2 * 4)


def test_workloads_are_those_of_the_document() -> None:
    assert [name for name, w in WORKLOADS.items() if len(set(w.response_lengths)) > 1] == ["w6"]
    uneven = WORKLOADS["w6"].response_lengths
    assert (len(uneven), min(uneven), max(uneven)) == (64, 8, 512)
    assert all(len(text) == 8 for text in prompt_texts(WORKLOADS["w1"]))
    assert WORKLOADS["w4"].num_rows * (WORKLOADS["w4"].prompt_length + 1016) == 8 * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    load_policy(tiny="qwen3", tiny_config=SMALL, device="cpu").save(directory)
    return str(directory)


def test_a_round_samples_and_updates(model: str) -> None:
    workload = replace(WORKLOADS["w1"], num_prompts=2, group_size=4, lengths=(6,), num_mini_batches=2)
    found = ours.Ours(workload, model).round("")
    assert found["tokens"] == 2 * 4 * 6
    assert set(found["seconds"]) == {"rollout", "old_logprobs", "update", "step"}
    assert found["flops"]["update"] == 3 * found["flops"]["rollout"] > 0
    assert found["skipped"] == {"tokens/skipped_forward": 0.0, "tokens/skipped_backward": 0.0}


def test_the_batch_of_w7_is_half_quiet_and_clips_thirty_percent(model: str) -> None:
    workload = replace(WORKLOADS["w7"], num_prompts=4, group_size=5, lengths=(6,), num_mini_batches=1)
    side = ours.Ours(workload, model)
    found = side.round("")
    assert found["skipped"]["tokens/skipped_forward"] == 10 * 6
    assert found["skipped"]["tokens/skipped_backward"] == 10 * 6 + 6 * 6  # 6 of the 20 responses are clipped
    assert side.round("all")["skipped"]["tokens/skipped_backward"] == 0


def test_a_report_has_medians_of_ratios_and_becomes_a_table() -> None:
    def side(seconds: float) -> dict:
        return {
            "seconds": {"rollout": seconds, "update": seconds, "step": 2 * seconds},
            "flops": {"rollout": 1e9, "update": 3e9},
            "tokens": 10,
            "peak_bytes": 3_000_000,
        }

    pairs = [[side(1.0), side(2.0)], [side(1.0), side(3.0)], [side(2.0), side(5.0)]]
    ready = [{"ready": "ours", "model_bytes": 1_000_000}, {"ready": "trl", "model_bytes": 2_000_000}]
    result = step._report(WORKLOADS["w1"], "trl", 1, [1e9, 2e9, 3e9], pairs, ready)
    assert result["ratio"]["step"] == {"median": 2.5, "spread": 0.4}  # of 2, 3, 2.5
    assert result["ours"]["rollout"]["utilisation"] == 0.5  # 1e9 operations in 1, 1, 2 s at 2e9 per second
    assert result["ours"]["peak_above_model_mb"] == 2
    assert "2.50x (spread 0.40)" in table.table([json.loads(json.dumps(result))])


def test_the_exponent_of_a_square_is_two() -> None:
    assert scaling.exponent([(1, 3.0), (2, 12.0), (4, 48.0)]) == pytest.approx(2)


def test_a_missing_peer_says_how_to_get_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step.PEERS, "trl", (tmp_path / "python", tmp_path / "peer.py"))
    with pytest.raises(SystemExit, match="make bench-venv"):
        step._peer("trl", WORKLOADS["w1"], "model", 1, "wall")


def test_a_worker_answers_and_its_death_is_noticed(model: str) -> None:
    import sys

    code = (
        "from benchmarks.protocol import *\nc = claim_stdout()\nsay(c, ready='x')\nprint('noise')\nsay(c, got=hear())"
    )
    worker = step.Worker(sys.executable, ["-c", code], 1)
    assert worker.ready == {"ready": "x"}
    assert worker.measure("all") == {"got": "all"}
    with pytest.raises(RuntimeError, match="ended with status 0"):
        worker.read()
    worker.close()


def test_a_profile_tells_kernels_and_operations_from_what_surrounds_them() -> None:
    own = {
        ("/x/src/gspo/policy/native.py", 210, "attend"): 3.0,
        ("~", 0, "<built-in method torch._C._nn.linear>"): 4.0,
        ("~", 0, "<method 'run_backward' of 'torch._C._EngineBase' objects>"): 2.0,
        ("~", 0, "<built-in method builtins.len>"): 0.5,
        ("/x/src/gspo/train/step.py", 98, "update"): 0.5,
    }
    # of 10 seconds
    assert shares(own) == pytest.approx({"kernels": 0.3, "operations": 0.6, "framework": 0.1})
