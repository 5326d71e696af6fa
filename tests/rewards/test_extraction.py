import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.rewards.extraction import brace_pairs, final_answer, last_boxed, last_number, visible_text


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5} no, \boxed{6}", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{8} and then \boxed{9", "8"),  # the last box does not close
        (r"\boxed{3} Answer: 4", "3"),  # a box comes before a stated answer
        (r"\boxed{}", ""),
        ("1+1=2\n#### 2\nso it is 9 or so", "2"),
        ("#### 1\n#### 2", "2"),
        ("the answer: 5 is wrong. Answer: 10", "10"),
        ("The answer is 3. No: the answer is 4.", "4"),
        ("The final answer is $x+1$, as shown.", "x+1"),
        ("**Answer:** 12", "12"),
        ("Answer:\n\n42", "42"),
        ("The total is 72 clips, altogether.", "72"),
        ("We get $1+x$ in the end.", "1+x"),
        (r"We get \(1+x\) in the end.", "1+x"),
        (r"We get \[1+x\]", "1+x"),
        ("We get $x+1$, so 7 in all.", "7"),
        ("the probability is 3/4.", "3/4"),
        ("it falls to -3 degrees", "-3"),
        ("from 5-3 we see nothing", "3"),
        ("I do not know.", None),
        ("", None),
        (r"<think>\boxed{6}</think> I do not know.", None),
        (r"<think>\boxed{6}", None),
        (r"<think>a</think> \boxed{1} <think>\boxed{2}", None),
        (r"thought \boxed{1} </think> it is 2", "2"),  # the template opened the block
    ],
)
def test_the_policy(response, answer):
    assert final_answer(response) == answer


def test_only_text_after_the_last_closed_block_is_visible():
    assert visible_text("<think>a</think>b<think>c</think>d") == "d"
    assert visible_text("no block") == "no block"
    assert visible_text("<think>a</think>b<think>c") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,000", "1,000"), ("a 2 b 3.5 c", "3.5"), ("x=-3", "-3"), ("5-3", "3"), ("no", None), ("7.", "7"), (".5", ".5")],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_many_open_boxes_cost_linear_time():
    assert last_boxed("\\boxed{" * 20_000) is None  # takes minutes if each box is searched to the end


@given(st.text(alphabet="a\\{}", max_size=40))
def test_brace_pairs_are_nested_and_unescaped(text):
    pairs = brace_pairs(text)
    for opening, closing in pairs.items():
        assert text[opening] == "{"
        assert text[closing] == "}"
        assert opening < closing
        inside = [p for p in pairs.items() if opening < p[0] < closing]
        assert all(end < closing for _, end in inside)


@given(st.text(max_size=60).filter(lambda s: "think>" not in s and "boxed" not in s))
def test_a_box_at_the_end_wins_over_any_text(text):
    assert final_answer(text.replace("{", "").replace("}", "").rstrip("\\") + r" \boxed{17}") == "17"
