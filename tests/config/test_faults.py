"""Wrong recipes: ``gspo check`` names every fault with file, line and key, in one report, with exit status 2."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from gspo.cli import main

DATA = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'
PAIRS = '{"prompt": "3+3=", "response": "6"}\n'
MODEL = '[model]\ntiny = "qwen3"\n'
TASK = '[data]\ntask = "arithmetic:addition"\n'
#: Two prompts of a file, two a step: the start of recipes about data. Line 3 is [data], line 4 its path.
FILE = MODEL + '[data]\npath = "d.jsonl"\n[rollout]\nprompts_per_step = 2\n[[reward.functions]]\nname = "number"\n'


class Fault(NamedTuple):
    """A recipe and the faults that it has: (line, key, part of the sentence)."""

    name: str
    recipe: str
    faults: list[tuple[int, str, str]]


def one(name: str, recipe: str, line: int, key: str, part: str) -> Fault:
    return Fault(name, recipe, [(line, key, part)])


WRONG = [
    # Keys and values.
    one("unknown key", MODEL + TASK + "[train]\nlearning_rat = 1e-6\n", 6, "train.learning_rat", "train.learning_rate"),
    one("key of another framework", MODEL + TASK + "[rollout]\nnum_generations = 8\n", 6, "rollout.num_generations",
        "did you mean rollout.group_size"),
    one("key in the wrong section", MODEL + TASK + "[eval]\ngroup_size = 8\n", 6, "eval.group_size",
        "belongs to section [rollout]"),
    one("unknown section", MODEL + TASK + "[optimiser]\nlr = 1\n", 5, "optimiser", "unknown section"),
    one("text for a number", MODEL + TASK + '[train]\nnum_steps = "ten"\n', 6, "train.num_steps", "a whole number"),
    one("fraction for a count", MODEL + TASK + "[rollout]\ngroup_size = 2.5\n", 6, "rollout.group_size",
        "a whole number"),
    one("list for text", MODEL + '[data]\ntask = ["arithmetic:addition"]\n', 4, "data.task", "must be text"),
    one("below its range", MODEL + TASK + "[train]\nmax_grad_norm = 0.0\n", 6, "train.max_grad_norm", "greater than 0"),
    one("above its range", MODEL + TASK + "[eval]\nconfidence = 1.5\n", 6, "eval.confidence", "less than 1"),
    one("nan", MODEL + TASK + "[train]\nlearning_rate = nan\n", 6, "train.learning_rate", "greater than 0"),
    one("unknown objective", MODEL + TASK + '[objective]\nname = "gspo2"\n', 6, "objective.name", '"gspo"'),
    one("unknown preset", '[run]\npreset = "papers"\n' + MODEL + TASK, 2, "run.preset", '"paper_5_4"'),
    one("unknown reward", MODEL + TASK + '[[reward.functions]]\nname = "numbr"\n', 6, "reward.functions[0].name",
        'did you mean "number"'),
    one("unknown option of a reward", MODEL + TASK + '[[reward.functions]]\nname = "math"\noptions = {unit = 1}\n', 7,
        "reward.functions[0].options", "no option 'unit'"),
    one("second of two rewards", MODEL + TASK + '[[reward.functions]]\nname = "task"\n\n[[reward.functions]]\n'
        'name = "r.py:score"\n', 9, "reward.functions[1].name", 'there is no file "r.py"'),
    one("a module without the function", MODEL + TASK + '[[reward.functions]]\nname = "tests.resume.runs:rewad"\n', 6,
        "reward.functions[0].name", 'did you mean "reward"'),
    one("no such module", MODEL + TASK + '[[reward.functions]]\nname = "my.rewards:f"\n', 6,
        "reward.functions[0].name", 'no module "my"'),
    one("unknown task", MODEL + '[data]\ntask = "arithmetic:additon"\n', 4, "data.task", "arithmetic:addition"),
    one("unknown option of a task", MODEL + TASK + "task_options = { digit = 3 }\n", 5, "data.task_options",
        "did you mean 'digits'"),
    # Contradictions and keys without effect.
    one("clip without bounds", MODEL + TASK + '[objective]\nclip = "explicit"\nclip_low = 0.1\n', 5,
        "objective.clip_high", "is needed"),
    one("bounds that cannot be", MODEL + TASK + '[objective]\nname = "grpo"\nclip = "explicit"\nclip_low = 1.2\n'
        "clip_high = 0.3\n", 8, "objective.clip_low", "not above 0"),
    one("correction that keeps nothing", MODEL + TASK + '[train]\nold_logprobs = "recompute"\n[objective.correction]\n'
        'kind = "icepop"\nlow = 3.0\nhigh = 2.0\n', 8, "objective.correction.kind", "keeps nothing"),
    one("correction with the engine's likelihoods", MODEL + TASK + '[train]\nold_logprobs = "engine"\n'
        '[objective.correction]\nkind = "tis"\n', 8, "objective.correction.kind", "is 1 with train.old_logprobs"),
    one("replay on a dense tiny model", MODEL + TASK + '[moe]\nreplay = "r3"\n', 6, "moe.replay", "no experts"),
    one("replay on a dense directory", '[model]\npath = "dense"\n' + TASK + '[moe]\nreplay = "r3"\n', 6, "moe.replay",
        "has no experts"),
    one("key without effect", MODEL + TASK + '[objective]\nkl_estimator = "k2"\n', 6, "objective.kl_estimator",
        "no effect"),
    one("evaluation without data", FILE + "[eval]\nevery = 5\n", 10, "eval.every", "no held-out prompts"),
    one("held-out number needed", FILE + "[data.eval]\nseed = 3\n", 9, "data.eval.num_prompts", "is needed"),
    one("pass@k of too few samples", MODEL + TASK + "[eval]\nk = [8]\n", 6, "eval.k", "at least 8 samples"),
    # Sizes.
    one("more updates than responses", MODEL + TASK + "[rollout]\nprompts_per_step = 2\ngroup_size = 2\n[train]\n"
        "num_mini_batches = 5\n", 9, "train.num_mini_batches", "more than the 4 sequences"),
    one("heads that do not divide", MODEL + "tiny_config = { num_attention_heads = 3, num_key_value_heads = 2 }\n"
        + TASK, 3, "model.tiny_config", "not a multiple"),
    one("more experts than there are", '[model]\ntiny = "qwen3_moe"\ntiny_config = { num_experts_per_tok = 9 }\n'
        + TASK, 3, "model.tiny_config", "more than num_experts = 8"),
    one("context too short", MODEL + "tiny_config = { max_position_embeddings = 64 }\n" + TASK
        + "[rollout]\nmax_new_tokens = 64\n", 7, "rollout.max_new_tokens", "no room for a prompt"),
    one("context too short for an evaluation", MODEL + TASK + "[eval]\nmax_new_tokens = 4096\n", 6,
        "eval.max_new_tokens", "context of 2048"),
    one("prompt limit beyond the context", MODEL + TASK + "max_prompt_tokens = 2000\n", 5, "data.max_prompt_tokens",
        "take at most 1792"),
    one("more memory than any machine", '[run]\ndevice = "cpu"\n[model]\ntiny = "qwen3"\ntiny_config = '
        "{ hidden_size = 65536, intermediate_size = 262144, num_hidden_layers = 512 }\n" + TASK, 5,
        "model.tiny_config", "this machine has"),
    one("fewer prompts than a step", FILE.replace("prompts_per_step = 2", "prompts_per_step = 3"), 4, "data.path",
        "d.jsonl has 2 prompts, fewer than rollout.prompts_per_step = 3"),
    one("more prompts than problems", MODEL + TASK + "num_prompts = 100\ntask_options = { digits = 1 }\n"
        "[rollout]\nprompts_per_step = 4\n", 5, "data.num_prompts", "has 79"),
    # Files.
    one("data that are not there", FILE.replace("d.jsonl", "e.jsonl"), 4, "data.path",
        'no file or directory "e.jsonl"'),
    one("script that is not there", MODEL + TASK + '[rollout]\nengine = "scripted"\nscript = "s.jsonl"\n', 7,
        "rollout.script", '"s.jsonl"'),
    one("pairs that are not there", MODEL + TASK + '[sft]\npath = "p.jsonl"\n', 6, "sft.path", '"p.jsonl"'),
    one("model that is not there", '[model]\npath = "./models/none"\n' + TASK, 2, "model.path", "neither a directory"),
    one("model without config.json", '[model]\npath = "empty"\n' + TASK, 2, "model.path", "no config.json"),
    one("model with a damaged config.json", '[model]\npath = "damaged"\n' + TASK, 2, "model.path", "as JSON"),
    one("task without worked solutions", MODEL + TASK + '[sft]\ntask = "reasoning_gym:chain_sum"\n', 6, "sft.task",
        "no worked solutions"),
    # Several at once: none hides another, and none is said twice.
    Fault(
        "faults of recipe and data",
        MODEL + '[data]\npath = "bad.jsonl"\nprompt_colum = "prompt"\n[rollout]\nprompts_per_step = 2\n'
        'temperature = 0\n[objective]\nname = "gpso"\n[eval]\nk = [1, 9]\n[[reward.functions]]\nname = "number"\n',
        [
            (4, "data.path", "bad.jsonl, line 2"),
            (4, "data.path", "bad.jsonl:3"),
            (5, "data.prompt_colum", "data.prompt_column"),
            (8, "rollout.temperature", "greater than 0"),
            (10, "objective.name", '"gspo"'),
            (12, "eval.k", "pass@9"),
            (12, "eval.k", "no held-out prompts"),
        ],
    ),
    Fault(
        "faults of three files",
        MODEL + '[data]\npath = "bad.jsonl"\n[data.eval]\npath = "bad-eval.jsonl"\n[sft]\npath = "bad-pairs.jsonl"\n'
        '[rollout]\nprompts_per_step = 1\n[[reward.functions]]\nname = "number"\n[train]\nwarmup = 3\n',
        [
            (4, "data.path", "bad.jsonl, line 2"),
            (4, "data.path", "bad.jsonl:3"),
            (6, "data.eval.path", "bad-eval.jsonl:1"),
            (8, "sft.path", "bad-pairs.jsonl:1"),
            (14, "train.warmup", "train.warmup_steps"),
        ],
    ),
]  # fmt: skip

BROKEN_TOML = [
    ("key twice", MODEL + TASK + 'task = "arithmetic:addition"\n', 5),
    ("table twice", MODEL + TASK + MODEL, 5),
    ("open string", MODEL + '[data]\ntask = "arithmetic:addition\n', 4),
    ("no value", MODEL + TASK + "[train]\nnum_steps =\n", 6),
    ("colon in place of the equals sign", MODEL + TASK + "[train]\nnum_steps: 3\n", 6),
    ("open table", MODEL + TASK + "[train\nnum_steps = 3\n", 5),
    ("a table that is a value", MODEL + TASK + "[data.task]\nname = 1\n", 5),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with data, good and bad, and models, in which recipes are checked."""
    (tmp_path / "d.jsonl").write_text(DATA)
    (tmp_path / "bad.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n{"prompt": "2+2=", "answer": ""}\n'
    )
    (tmp_path / "bad-eval.jsonl").write_text('{"prompt": "", "answer": "2"}\n')
    (tmp_path / "bad-pairs.jsonl").write_text('{"prompt": "7+7=", "response": ""}\n')
    for name, config in (("dense", '{"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, '
                          '"vocab_size": 9, "max_position_embeddings": 4096}'), ("damaged", "{")):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "empty").mkdir()
    # Modules of the tests stay on the path, which is where rewards are looked for besides the working directory.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(report: str) -> list[str]:
    """The sentences of a report on stderr."""
    first, *rest = report.removeprefix("error: ").splitlines()
    return [line.strip() for line in rest] if rest else [first]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_every_fault_is_named_with_file_line_and_key(
    case: Fault, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "r.toml").write_text(case.recipe)
    assert main(["check", "r.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    found = lines_of(err)
    assert len(found) == len(case.faults), err
    for sentence, (line, key, part) in zip(found, case.faults, strict=True):
        assert sentence.startswith((f"r.toml:{line}: {key}:", f"r.toml:{line}: {key} =")), sentence
        assert part in sentence


@pytest.mark.parametrize(("text", "line"), [case[1:] for case in BROKEN_TOML], ids=[case[0] for case in BROKEN_TOML])
def test_what_is_not_toml_is_named_by_its_line(
    text: str, line: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "r.toml").write_text(text)
    assert main(["check", "r.toml"]) == 2
    assert capsys.readouterr().err.startswith(f"error: r.toml:{line}: not valid TOML")


def test_training_is_refused_by_the_same_report(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "r.toml").write_text(WRONG[-1].recipe)
    assert main(["check", "r.toml"]) == 2
    checked = capsys.readouterr().err
    assert main(["train", "r.toml", "--run-dir", "run"]) == 2
    assert capsys.readouterr().err == checked
    assert not (place / "run").exists()


@pytest.mark.parametrize("name", ["key without effect", "faults of three files", "heads that do not divide", ""])
def test_a_process_of_its_own_takes_less_than_five_seconds_and_never_loads_torch(place: Path, name: str) -> None:
    """Also where the recipe is right (the last case), with a math verifier and a parametrised model."""
    case = next((case for case in WRONG if case.name == name), None)
    good = FILE.replace('"number"', '"math"') + "[data.eval]\nnum_prompts = 1\n"
    good = good.replace("prompts_per_step = 2", "prompts_per_step = 1")
    (place / "r.toml").write_text(case.recipe if case else good)
    program = (
        "import sys\nfrom gspo.cli import main\nstatus = main(['check', 'r.toml'])\n"
        "heavy = [n for n in ('torch', 'transformers', 'plotly') if n in sys.modules]\n"
        "print('loaded', heavy)\nsys.exit(status)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processors, its verifier processes included: a busy neighbour must not fail the test.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == (2 if case else 0), done.stderr
    assert done.stdout.endswith("loaded []\n")
    assert seconds < 5
    if case:
        assert len(lines_of(done.stderr)) == len(case.faults)
