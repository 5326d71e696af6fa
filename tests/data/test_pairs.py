import json

import pytest

from gspo.data.pairs import load_pairs
from gspo.errors import DataError

from .tokenizers import TEMPLATE, make_tokenizer


@pytest.fixture
def file(tmp_path):
    def write(*rows):
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_text_is_closed_by_end_of_text(file):
    tokenizer = make_tokenizer()
    (prompt, response), *_ = load_pairs(file({"prompt": "a", "response": "bc"}), tokenizer=tokenizer)
    assert prompt.token_ids == (tokenizer.convert_tokens_to_ids("a"),)
    assert response == (*tokenizer.convert_tokens_to_ids(["b", "c"]), tokenizer.eos_token_id)


def test_chat_is_closed_by_the_templates_token(file):
    tokenizer = make_tokenizer(TEMPLATE)
    row = {"prompt": [{"role": "user", "content": "a"}], "response": [{"role": "assistant", "content": "b"}]}
    (_, response), *_ = load_pairs(file(row), tokenizer=tokenizer)
    assert response == tuple(tokenizer.convert_tokens_to_ids(["b", "<end>"]))


def test_an_end_that_is_there_is_not_doubled(file):
    tokenizer = make_tokenizer()
    (_, response), *_ = load_pairs(file({"prompt": "a", "response": "b<eos>"}), tokenizer=tokenizer)
    assert response.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "respons": "b"}, "d.jsonl:1 has no column 'response'.*did you mean 'respons'"),
        ({"prompt": "a", "response": ""}, "d.jsonl:1: the column 'response' is not a response"),
        ({"prompt": "a", "response": 4}, "d.jsonl:1: the column 'response' is not a response but 4"),
        (
            {"prompt": "aaaa", "response": "bbbb"},
            "d.jsonl:1: prompt and response have 9 tokens, more than the limit of 8",
        ),
    ],
)
def test_a_row_that_is_not_a_pair_is_named(file, row, message):
    with pytest.raises(DataError, match=message):
        load_pairs(file(row), tokenizer=make_tokenizer(), max_tokens=8)
