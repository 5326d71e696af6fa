"""Routes that were recorded while sampling survive a kill: a run with R3 replay, stopped and continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gspo.events import read_events
from gspo.train import journal
from gspo.types import Completion

from .disk import Point
from .runs import MOE, make_recipe, outcome
from .test_sweep import Recorded, Sampled, failures, folder, record

WORDS = ("--moe.replay", "r3", "--moe.load_balancing_coefficient", "0.1")
__all__ = ["folder"]  # a fixture


@pytest.fixture(scope="module")
def replayed(folder: Path) -> Recorded:
    recipe, run_dir = make_recipe(folder / "replay-recipe", MOE, *WORDS), folder / "replay"
    with pytest.MonkeyPatch.context() as patch:
        sampled = Sampled(patch)
        disk = record(recipe, run_dir, patch)
    return Recorded(recipe, run_dir, disk, outcome(run_dir), sampled.keys)


def middle(replayed: Recorded) -> Point:
    """Between the rollouts of the first step and its checkpoint: everything comes out of the journal."""
    points = replayed.points("killed", num_checkpoints=(0,))
    return next(p for p in points if p.num_records == max(p.num_records for p in points))


def test_a_run_with_replay_stopped_anywhere_ends_with_the_same_bits(replayed: Recorded) -> None:
    updates = [event["metrics"] for event in replayed.expected["events"] if event["type"] == "update"]
    assert max(metrics["moe/drift"] for metrics in updates) > 0  # what is forced is not what the routers would choose
    assert all(metrics["moe/balance_loss"] > 0 for metrics in updates if "loss" in metrics)
    for accident in ("killed", "torn"):
        points = replayed.points(accident)[::8]
        assert len(points) >= 3
        assert failures(replayed.recipe, replayed.run_dir, points, replayed.expected) == {}


def test_what_was_sampled_is_replayed_with_its_routes_and_not_sampled_again(
    replayed: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = middle(replayed)
    decoded: list[Completion] = []
    decode = journal.decode_completion
    monkeypatch.setattr(journal, "decode_completion", lambda item: decoded.append(decode(item)) or decoded[-1])
    sampled = Sampled(monkeypatch)
    assert failures(replayed.recipe, replayed.run_dir, [point], replayed.expected) == {}
    routes = [completion.routing for completion in decoded if completion.routing is not None]
    assert len(routes) >= 6  # three groups of two; held-out responses have none
    assert {tuple(ids.shape[1:]) for ids in routes} == {(1, 2)}  # one layer, two experts
    assert len(sampled.keys) < len(replayed.engine_calls)
    assert read_events(replayed.run_dir / "events.jsonl")[-1]["status"] == "finished"


def test_control_routes_that_come_back_wrong_are_found(replayed: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = journal.decode_completion

    def other_experts(item: dict) -> Completion:
        completion = decode(item)
        if completion.routing is None:  # held out
            return completion
        return replace(completion, routing=(completion.routing + 1) % 4)

    monkeypatch.setattr(journal, "decode_completion", other_experts)
    assert failures(replayed.recipe, replayed.run_dir, [middle(replayed)], replayed.expected)
