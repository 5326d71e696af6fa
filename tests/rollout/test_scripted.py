from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.errors import DataError, EngineError
from gspo.policy.tiny import character_tokenizer
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.scripted import ScriptedEngine
from gspo.types import Completion, StopReason

PARAMS = SamplingParams(8, stop_token_ids=frozenset({3}))


def request(name: str, samples: int = 1) -> GenerationRequest:
    return GenerationRequest(name, (5, 6), tuple(range(samples)))


def test_ids_and_logprobs_are_replayed_unchanged_and_text_is_encoded_once() -> None:
    script = {
        "a": [{"token_ids": [7, 3], "logprobs": [-0.5, -0.25]}, {"token_ids": [7, 7], "stop_reason": "length"}],
        "b": ["42", {"text": "4", "stop_reason": "stop_string"}, {"token_ids": []}],
    }
    engine = ScriptedEngine(script, character_tokenizer())
    engine.policy_version = 6
    seen: list[tuple[int, int, Completion]] = []
    first, second = engine.generate([request("a", 3), request("b", 3)], PARAMS, lambda *x: seen.append(x))
    assert [c.token_ids.tolist() for c in first] == [[7, 3], [7, 7], [7, 3]]  # sample 2 starts over
    assert first[0].logprobs.tolist() == [-0.5, -0.25]
    assert first[1].logprobs.isnan().all()  # unknown, and not a number that could be trained on
    assert [c.stop_reason for c in first] == [StopReason.EOS, StopReason.LENGTH, StopReason.EOS]
    four, two, end = 4 + 1 + ord("4") - 32, 4 + 1 + ord("2") - 32, 3  # 4 special tokens, newline, then ASCII from 32
    assert [c.token_ids.tolist() for c in second] == [[four, two, end], [four], []]
    assert [c.stop_reason for c in second] == [StopReason.EOS, StopReason.STOP_STRING, StopReason.EMPTY]
    assert {c.policy_version for c in (*first, *second)} == {6}
    assert [(r, s) for r, s, _ in seen] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert not engine.exact


def test_a_script_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(json.dumps({"prompt_id": "a", "completions": [{"token_ids": [9]}]}) + "\n\n")
    assert ScriptedEngine(path).generate([request("a")], PARAMS)[0][0].token_ids.tolist() == [9]


def test_a_prompt_without_a_script_is_named() -> None:
    with pytest.raises(EngineError, match="no completion for prompt 'train/7'"):
        ScriptedEngine({"a": ["1"]}).generate([request("train/7")], PARAMS)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"token_ids": [1, 2], "logprobs": [0.0]}, "1 log-probs for 2 ids"),
        ({"token_ids": [1], "text": "x"}, "either text or token_ids"),
        (7, "either text or token_ids"),
        ({"token_ids": [1], "stop_reason": "bored"}, "bored"),
        ("text", "a tokenizer is needed"),
    ],
)
def test_wrong_entries_are_named(entry: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ScriptedEngine({"a": [entry]}).generate([request("a")], PARAMS)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("{", "line 1: not JSON"), ('{"prompt_id": "a"}\n', "line 1: needs"), ("[1]", "line 1: needs")],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        ScriptedEngine(path)
    with pytest.raises(DataError, match="cannot be read"):
        ScriptedEngine(tmp_path / "missing.jsonl")
