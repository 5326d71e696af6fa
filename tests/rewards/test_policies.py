import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import InputError
from gspo.rewards.builtin import build_rewards
from gspo.rewards.math import compare, verify
from gspo.rewards.policies import MathPolicy
from gspo.types import Prompt

from .test_builtin import Settings

#: gold, answer, right by default, the option, right with it
SWITCHED = [
    ("5\\text{ cm}", "5", True, {"units": "required"}, False),
    ("5\\text{ cm}", "5\\text{ m}", False, {"units": "ignored"}, True),
    ("5\\text{ cm}", "5\\text{ cm}", True, {"units": "required"}, True),
    ("(3\\text{ cm}, 4\\text{ s})", "(3, 4\\text{ s})", True, {"units": "required"}, False),
    ("28\\%", "0.28", True, {"percent": "number"}, False),
    ("28\\%", "28", False, {"percent": "number"}, True),
    ("x = 28\\%", "x = 28", False, {"percent": "number"}, True),
    ("5", "x = 5", True, {"named_value": False}, False),
    ("x = 5", "x = 5.0", True, {"named_value": False}, True),
    ("(0,1)", "0 < x < 1", True, {"named_value": False}, False),
    ("1, 2", "2, 1", True, {"unordered_lists": False}, False),
    ("\\{1, 2\\}", "\\{2, 1\\}", True, {"unordered_lists": False}, True),
    ("\\frac{9}{4}", "2 1/4", True, {"mixed_numbers": False}, False),
    ("\\frac{1}{2}", "2\\frac{1}{4}", False, {"mixed_numbers": False}, True),
    ("1, \\frac{9}{4}", "2\\frac14, 1", True, {"mixed_numbers": False}, False),
    ("2x + y = \\frac{9}{4}", "2x + y = 2\\frac{1}{4}", True, {"mixed_numbers": False}, False),
]


@pytest.mark.parametrize(("gold", "answer", "by_default", "options", "with_option"), SWITCHED)
def test_each_option_changes_what_it_says(gold, answer, by_default, options, with_option):
    assert compare(gold, answer).correct is by_default
    assert compare(gold, answer, MathPolicy(**options)).correct is with_option
    assert verify(gold, f"\\boxed{{{answer}}}", options).correct is with_option


def test_the_rung_names_the_policy_only_where_it_decided():
    assert compare("5\\text{ cm}", "5", MathPolicy(units="required")).rung == "policy"
    assert compare("5\\text{ cm}", "6", MathPolicy(units="ignored")).rung == "integer"


RUNGS = [
    ("7", "7", "identical"),
    ("\\text{east}", "East", "word"),
    ("7", "07", "integer"),
    ("7", "8", "integer"),
    ("\\frac12", "0.5", "rational"),
    ("\\frac12", "1", "rational"),
    ("\\sqrt{8}", "2\\sqrt{2}", "expression"),
    ("x+1", "1+x", "expression"),
    ("(1,2)", "(2,1)", "structure"),
    ("x=y+1", "y=x-1", "expression"),
    ("\\int_0^1 x dx", "\\frac12", "symbolic"),
    ("5", "9^{9^{9^9}}", "size"),
]


@pytest.mark.parametrize(("gold", "answer", "rung"), RUNGS)
def test_the_first_decisive_rung_is_named(gold, answer, rung):
    assert compare(gold, answer).rung == rung


def test_rungs_outside_the_comparison():
    assert verify("5", "no idea").rung == "extraction"
    assert verify("no number here", "5").rung == "gold"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "ignored"}, "no option 'unit'; did you mean 'units'"),
        ({"tolerance": 0.1}, "no option 'tolerance'; it has units, percent"),
        ({"units": "strict"}, "units of 'math' is 'strict'; it must be one of 'compatible', 'required', 'ignored'"),
        ({"mixed_numbers": 1}, "mixed_numbers of 'math' is 1; it must be one of true, false"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        MathPolicy.from_options(options)
    with pytest.raises(InputError, match=message):
        build_rewards([Settings("math", options=options)])


def test_options_of_a_recipe_reach_the_verifier_and_rungs_are_counted():
    prompt = Prompt("p", "?", (1,), columns={"answer": "28\\%"})
    with build_rewards([Settings("math", options={"percent": "number"})], num_workers=1) as rewards:
        scores = rewards.score([prompt] * 3, ["\\boxed{28}", "\\boxed{0.28}", "none"], [[1]] * 3)
        assert [score.value for score in scores] == [1.0, 0.0, 0.0]
        counters = rewards.counters
    assert (counters["math/integer"], counters["math/rational"], counters["math/extraction"]) == (1, 1, 1)


POLICIES = st.builds(
    MathPolicy,
    units=st.sampled_from(["compatible", "required", "ignored"]),
    percent=st.sampled_from(["fraction", "number"]),
    named_value=st.booleans(),
    unordered_lists=st.booleans(),
    mixed_numbers=st.booleans(),
)
ANSWERS = sorted({answer for pair in SWITCHED for answer in pair[:2]} | {pair[0] for pair in RUNGS})


@given(POLICIES, st.sampled_from(ANSWERS))
def test_under_any_policy_an_answer_is_itself(policy, answer):
    assert compare(answer, answer, policy).correct is True
    assert compare(answer, f" {answer} ", policy).correct is True
