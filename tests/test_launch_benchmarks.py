"""The composition of a benchmark: what the digests cover, and what a recipe contributes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gspo.config.schema import Recipe
from gspo.errors import ConfigError
from gspo.evals.result import Settings
from gspo.launch.benchmarks import BenchmarkRequest, evaluate_benchmark, recipe_of, weights_digest
from gspo.policy.causal_lm import load_policy

TINY = {"num_hidden_layers": 1, "hidden_size": 32}


def recipe(**sections: dict[str, object]) -> Recipe:
    return Recipe.model_validate({"model": {"tiny": "qwen3", "tiny_config": TINY}, **sections})


@pytest.fixture
def request_(tmp_path: Path) -> BenchmarkRequest:
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return BenchmarkRequest(
        "custom",
        (tmp_path / "sums.jsonl",),
        {"verifier": "integer"},
        out=tmp_path / "out",
        num_samples=2,
        max_new_tokens=4,
        settings=Settings(k=(2,)),
    )


def test_the_digest_of_weights_is_of_every_weight_and_of_nothing_else() -> None:
    one, two, other = (load_policy(tiny="qwen3", tiny_config=TINY, seed=seed) for seed in (1, 1, 2))
    assert weights_digest(one) == weights_digest(two) != weights_digest(other)
    with torch.no_grad():
        list(two.model.parameters())[-1].view(-1)[-1] += 1e-6
    assert weights_digest(one) != weights_digest(two)


def test_a_recipe_gives_model_system_prompt_and_stop_strings(request_: BenchmarkRequest) -> None:
    given = recipe(data={"system_prompt": "Be short."}, rollout={"stop_strings": ["!"]})
    said: list[str] = []
    result, directory = evaluate_benchmark(request_, given, None, say=said.append)
    assert directory == request_.out
    assert said == ["prompt from 'prompt', gold from 'answer', ids are row numbers"]
    assert result["model"]["name"] == "qwen3"
    assert result["template"]["system_prompt"] == "Be short."
    assert result["protocol"]["stop_strings"] == ["!"]
    assert result["versions"].keys() >= {"gspo", "torch", "transformers"}
    assert set(result["metrics"]) >= {"pass@1", "pass@2", "truncated_fraction", "length/mean"}


def test_a_script_is_no_model(request_: BenchmarkRequest) -> None:
    with pytest.raises(ConfigError, match="bring its responses: --samples FILE"):
        evaluate_benchmark(request_, recipe(rollout={"engine": "scripted", "script": "s.jsonl"}), None)


def test_a_model_without_a_recipe() -> None:
    found = recipe_of("some/dir", "bfloat16", "cpu")
    assert (found.model.path, found.model.dtype, found.run.device) == ("some/dir", "bfloat16", "cpu")
    with pytest.raises(ConfigError, match="--dtype is 'float8'"):
        recipe_of("some/dir", "float8", "cpu")
