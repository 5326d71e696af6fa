from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.errors import DataError
from gspo.policy.packing import pack
from gspo.types import Sequences

CPU = torch.device("cpu")
EXAMPLE = Sequences(
    prompts=(torch.tensor([5, 9]), torch.tensor([7])),
    prompt_index=torch.tensor([0, 1, 0]),
    token_ids=torch.tensor([[3, 4, 2], [8, 2, 0], [6, 0, 0]]),
    lengths=torch.tensor([3, 2, 1]),
)


def test_a_prompt_is_stored_once_and_the_last_token_of_a_response_not_at_all() -> None:
    packed = pack(EXAMPLE, CPU)
    #                                      prompt 0, prompt 1, response 0, (response 2 has no input), response 1
    assert packed.input_ids.tolist() == [5, 9, 7, 3, 4, 8]
    assert packed.position_ids.tolist() == [0, 1, 0, 2, 3, 1]
    # Tokens 3 4 2 of row 0, 8 2 of row 1, 6 of row 2, each predicted by the token before it.
    assert packed.row.tolist() == [0, 0, 0, 1, 1, 2]
    assert packed.column.tolist() == [0, 1, 2, 0, 1, 0]
    assert packed.predictor.tolist() == [1, 3, 4, 2, 5, 1]


def test_unshared_repeats_the_prompt() -> None:
    packed = pack(EXAMPLE, CPU, share_prompts=False)
    assert packed.input_ids.tolist() == [5, 9, 5, 9, 7, 3, 4, 8]
    assert packed.predictor.tolist() == [1, 5, 6, 4, 7, 3]


def test_padding_is_never_read() -> None:
    junk = dataclasses.replace(EXAMPLE, token_ids=torch.tensor([[3, 4, 2], [8, 2, 99], [6, 99, -7]]))
    assert torch.equal(pack(junk, CPU).input_ids, pack(EXAMPLE, CPU).input_ids)


def test_an_empty_prompt_is_refused() -> None:
    empty = dataclasses.replace(EXAMPLE, prompts=(torch.tensor([5, 9]), torch.tensor([], dtype=torch.int64)))
    with pytest.raises(DataError, match="prompt 1 of a batch has no tokens"):
        pack(empty, CPU)
