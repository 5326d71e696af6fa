from __future__ import annotations

import math

import torch

from gspo.objectives.masking import first_true, masked_row_mean, masked_sum, select


def test_selecting_keeps_nan_out_of_value_and_gradient() -> None:
    values = torch.tensor([[1.0, math.nan], [math.inf, 4.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    assert select(values, mask).tolist() == [[1.0, 0.0], [0.0, 4.0]]
    masked_sum(values, mask).backward()
    assert values.grad.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_row_means_divide_by_the_tokens_of_the_row() -> None:
    values = torch.tensor([[1.0, 5.0, 9.0], [2.0, 2.0, 2.0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert masked_row_mean(values, mask).tolist() == [5.0, 0.0]


def test_first_true_is_in_reading_order() -> None:
    assert first_true(torch.tensor([[False, False], [False, True], [True, False]])) == (1, 1)
