import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.data.prompts import PromptCursor, load_prompts
from gspo.errors import DataError
from gspo.types import Prompt

from .tokenizers import TEMPLATE, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def file(tmp_path):
    def write(*rows):
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


class TestLoad:
    def test_ids_columns_and_tokens(self, file, tokenizer):
        prompts = load_prompts(file({"prompt": "ab", "answer": "4", "id": "x"}, {"prompt": "c"}), tokenizer=tokenizer)
        assert [p.id for p in prompts] == ["d.jsonl:1", "d.jsonl:2"]
        assert prompts[0].content == "ab"
        assert prompts[0].columns == {"answer": "4", "id": "x"}
        assert prompts[0].token_ids == tuple(tokenizer.convert_tokens_to_ids(["a", "b"]))
        assert prompts[0].task == ""

    def test_chat_messages_stay_messages(self, file):
        messages = [{"role": "user", "content": "a"}]
        prompt = load_prompts(
            file({"question": messages}), tokenizer=make_tokenizer(TEMPLATE), prompt_column="question"
        )
        assert prompt[0].content == ({"role": "user", "content": "a"},)

    def test_generated_rows(self, tokenizer):
        row = {"id": "t/train/0/7", "task": "t", "prompt": "1+1=", "answer": "2", "task_args": ["2"]}
        prompt = load_prompts(rows=[row], tokenizer=tokenizer)[0]
        assert (prompt.id, prompt.task) == ("t/train/0/7", "t")
        assert prompt.columns == {"answer": "2", "task_args": ["2"]}

    def test_a_seeded_choice_keeps_the_order(self, file, tokenizer):
        path = file(*({"prompt": str(i)} for i in range(20)))
        chosen = [p.id for p in load_prompts(path, tokenizer=tokenizer, num_prompts=5, seed=1)]
        assert len(chosen) == 5
        assert chosen == [p.id for p in load_prompts(path, tokenizer=tokenizer, num_prompts=5, seed=1)]
        assert chosen != [p.id for p in load_prompts(path, tokenizer=tokenizer, num_prompts=5, seed=2)]
        assert chosen == sorted(chosen, key=lambda i: int(i.split(":")[1]))

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"prompts": "a"}, "d.jsonl:1 has no column 'prompt'.*did you mean 'prompts'"),
            ({"prompt": " "}, "d.jsonl:1: the column 'prompt' is empty"),
            ({"prompt": 3}, "d.jsonl:1: the column 'prompt' is a int; text or a list of messages"),
            ({"prompt": []}, "d.jsonl:1: the column 'prompt' has no messages"),
            ({"prompt": [{"content": "a"}]}, "d.jsonl:1: message 0 is not"),
            (
                {"prompt": [{"role": "user", "content": "a"}], "answer": ""},
                "d.jsonl:1 holds chat messages, but the tokenizer has no",
            ),
            ({"prompt": [{"role": "assistant", "content": "a"}]}, "messages end with the assistant's"),
            ({"prompt": "abcdef", "answer": ""}, "d.jsonl:1: the prompt has 6 tokens, more than the limit of 5"),
            ({"prompt": "a"}, "d.jsonl:1 has no column 'answer'"),
        ],
    )
    def test_a_row_that_cannot_be_a_prompt_is_named(self, file, tokenizer, row, message):
        with pytest.raises(DataError, match=message):
            load_prompts(file(row), tokenizer=tokenizer, max_prompt_tokens=5, required_columns=["answer"])

    def test_more_prompts_than_rows(self, file, tokenizer):
        with pytest.raises(DataError, match="has 1 rows, fewer than the 3 asked for"):
            load_prompts(file({"prompt": "a"}), tokenizer=tokenizer, num_prompts=3)

    def test_exactly_one_source(self, tokenizer):
        with pytest.raises(DataError, match="exactly one source"):
            load_prompts(tokenizer=tokenizer)

    def test_repeated_ids(self, tokenizer):
        row = {"id": "t/0", "task": "t", "prompt": "a"}
        with pytest.raises(DataError, match="two prompts have the id 't/0'"):
            load_prompts(rows=[row, row], tokenizer=tokenizer)


def cursor(count, seed=0):
    return PromptCursor([Prompt(str(i), str(i), (i,)) for i in range(count)], seed)


def draw(source, *sizes):
    return [[p.id for p in source.next(size)] for size in sizes]


class TestCursor:
    @given(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=12), st.integers(0, 3))
    def test_every_prompt_once_per_epoch_and_none_twice_in_a_batch(self, count, sizes, seed):
        batches = draw(cursor(count, seed), *sizes)
        drawn = [i for batch in batches for i in batch]
        for start in range(0, len(drawn) - count + 1, count):
            assert len(set(drawn[start : start + count])) == count
        for batch in batches:
            most = -(-len(batch) // count)  # rounded up: as seldom as the size of the data allows
            assert max(Counter(batch).values()) <= most

    @given(
        st.integers(1, 9),
        st.lists(st.integers(1, 12), max_size=5),
        st.lists(st.integers(1, 12), min_size=1, max_size=5),
    )
    def test_state_goes_through_json_and_continues(self, count, before, after):
        whole, resumed = cursor(count), cursor(count)
        draw(whole, *before)
        resumed.restore(json.loads(json.dumps(whole.state())))
        assert draw(whole, *after) == draw(resumed, *after)

    def test_left_over_prompts_open_the_next_batch(self):
        source = cursor(5)
        first, second = draw(source, 4, 4)
        assert set(first).isdisjoint(second[:1])
        assert set(first) | set(second[:1]) == set("01234")
        assert source.epoch == 1

    def test_seeds_and_epochs_differ(self):
        assert draw(cursor(20), 20) != draw(cursor(20, seed=1), 20)
        one, two = draw(cursor(20), 20, 20)
        assert one != two

    def test_a_position_of_other_data_is_refused(self):
        with pytest.raises(DataError, match="of 3 prompts with seed 0, but there are 4 with seed 0"):
            cursor(4).restore(cursor(3).state())

    def test_no_prompts(self):
        with pytest.raises(DataError, match="no prompts"):
            cursor(0)


def test_held_out_prompts_are_left_out_by_content(file, tokenizer):
    path = file(*({"prompt": f"{n % 7}+1=", "answer": str(n % 7 + 1)} for n in range(20)))
    held_out = load_prompts(path, tokenizer=tokenizer, num_prompts=3, seed=1)
    rest = load_prompts(path, tokenizer=tokenizer, without=[prompt.content for prompt in held_out])
    # Repeated rows of a held-out prompt go too, although their ids differ.
    assert {p.content for p in rest} == {f"{n}+1=" for n in range(7)} - {p.content for p in held_out}
    with pytest.raises(DataError, match="held out"):
        load_prompts(path, tokenizer=tokenizer, without=[f"{n}+1=" for n in range(7)])
