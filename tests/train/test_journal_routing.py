from __future__ import annotations

import json

import pytest
import torch

from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.train.journal import decode_completion, encode_completion, generation_key
from gspo.types import Completion, StopReason


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_routes_come_back_from_the_journal_bit_for_bit(dtype: torch.dtype) -> None:
    routes = torch.arange(5 * 2 * 3).reshape(5, 2, 3).to(dtype)
    written = Completion(torch.tensor([4, 5, 6]), torch.zeros(3), StopReason.EOS, 7, routes)
    read = decode_completion(json.loads(json.dumps(encode_completion(written))))
    assert read.routing is not None
    assert read.routing.dtype == dtype
    assert torch.equal(read.routing, routes)
    plain = Completion(torch.tensor([4]), torch.zeros(1), StopReason.EOS, 7)
    assert decode_completion(encode_completion(plain)).routing is None


def test_a_call_that_records_routes_is_another_call() -> None:
    asked = [GenerationRequest("p", (1, 2), (3,))]
    one, other = (generation_key(asked, SamplingParams(4, record_routing=on), 0) for on in (True, False))
    assert one != other
