import sys

import pytest

from gspo.errors import RewardError
from gspo.rewards.base import RewardSet, WeightedReward
from gspo.rewards.load import adapt_verl, load_reward_function
from gspo.types import Prompt


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current directory and gives its name."""

    def write(text):
        name = f"own_reward_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", list(sys.path))
        return name

    return write


def test_a_function_of_the_current_directory(module):
    name = module("def brevity(completions):\n    return [-float(len(c)) for c in completions]\n")
    assert load_reward_function(f"{name}:brevity")(completions=["abc"]) == [-3.0]


def test_a_function_of_a_file(module):
    name = module("def one(completions):\n    return [1.0]\n")
    assert load_reward_function(f"{name}.py:one")(completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("brevity", 'not of the form "module:function"'),
        ("no_such_module_here:f", "there is no module 'no_such_module_here'"),
        ("json.nothing:f", "there is no module 'json.nothing'"),
        ("json:dumpz", "module 'json' has no 'dumpz'; did you mean 'dump"),
        ("string:digits", "is a str, not a function"),
        ("nothing.py:f", "there is no file 'nothing.py'"),
    ],
)
def test_what_is_missing_is_named(path, message):
    with pytest.raises(RewardError, match=message):
        load_reward_function(path)


def test_a_module_that_fails_to_import_is_not_called_missing(module):
    name = module("import no_such_dependency\n")
    with pytest.raises(
        RewardError, match=r"importing reward module .* failed: ModuleNotFoundError.*no_such_dependency"
    ):
        load_reward_function(f"{name}:f")


VERL = {
    "data_source": "own/sums",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
}


def score_verl(compute_score):
    prompt = Prompt("a", ({"role": "user", "content": "2+2"},), (1,), columns=VERL)
    return RewardSet([WeightedReward("verl", adapt_verl(compute_score))]).score([prompt], ["it is 4"], [[1]])[0]


class TestVerl:
    def test_arguments_and_number(self):
        seen = {}

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            seen.update(locals())
            return 0.5

        assert score_verl(compute_score).value == 0.5
        assert (seen["data_source"], seen["solution_str"]) == ("own/sums", "it is 4")
        assert (seen["ground_truth"], seen["extra_info"]) == ("4", {"index": 3})

    def test_a_dict_with_a_score(self):
        assert score_verl(lambda **_: {"score": 1.0, "acc": True}).value == 1.0

    def test_an_async_function(self):
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            return 0.25

        assert score_verl(compute_score).value == 0.25

    def test_a_dict_without_a_score_is_refused(self):
        with pytest.raises(RewardError, match="a dict without 'score'; it has 'acc'"):
            score_verl(lambda **_: {"acc": True})
