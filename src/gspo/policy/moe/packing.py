"""Routes of single sequences to routes of a packed row, and back.

The routes of a sequence with a prompt of p and a response of t tokens are (p + t - 1, L, K): one entry per INPUT token,
and the last response token is no input. A response without tokens has none. They are ragged and on the CPU; dense, on
the device, they exist for one micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.errors import RunError
from gspo.policy.moe.replay import RoutingShape
from gspo.policy.packing import PackedRow
from gspo.types import Sequences


def num_inputs(sequences: Sequences) -> list[int]:
    """Input tokens of each row: p + t - 1, and 0 for an empty response."""
    prompts = [len(sequences.prompts[i]) for i in sequences.prompt_index.tolist()]
    return [p + t - 1 if t else 0 for p, t in zip(prompts, sequences.lengths.tolist(), strict=True)]


def check_routes(routes: Sequence[Tensor], sequences: Sequences, shape: RoutingShape) -> None:
    """Refuses recorded ids that do not belong to these sequences and this model.

    Raises:
        RunError: names the row, what it has and what it should have.
    """
    wanted = num_inputs(sequences)
    if len(routes) != len(wanted):
        raise RunError(f"there are recorded routes of {len(routes)} rows for {len(wanted)} sequences")
    for row, (ids, length) in enumerate(zip(routes, wanted, strict=True)):
        expected = (length, shape.num_layers, shape.top_k)
        if tuple(ids.shape) != expected or ids.dtype != shape.dtype:
            raise RunError(
                f"the recorded routes of row {row} are {tuple(ids.shape)} {ids.dtype}; a prompt and response with "
                f"{length} input tokens in a model with {shape.num_layers} routers of {shape.top_k} experts have "
                f"{expected} {shape.dtype}. They belong to another sequence or model"
            )
        known = ids.long()
        wrong = (known != shape.natural) & ((known < 0) | (known >= shape.num_experts))
        if bool(wrong.any()):
            raise RunError(
                f"the recorded routes of row {row} name expert {int(known[wrong][0])}; the model has "
                f"{shape.num_experts} experts (0 to {shape.num_experts - 1})"
            )


def pack_routes(routes: Sequence[Tensor], sequences: Sequences, packed: PackedRow, fill: int) -> Tensor:
    """(S, L, K) on the CPU, in the order of the packed row; ``fill`` where no sequence says anything.

    The tokens of a shared prompt take the routes of the first of its rows that has a response.
    """
    result = routes[0].new_full((len(packed.input_ids), *routes[0].shape[1:]), fill)
    for row, (prompt, response) in reversed(list(enumerate(_places(sequences, packed)))):
        if len(prompt):
            result[prompt] = routes[row][: len(prompt)]
            result[response] = routes[row][len(prompt) :]
    return result


def unpack_routes(packed_routes: Tensor, sequences: Sequences, packed: PackedRow) -> tuple[Tensor, ...]:
    """The inverse: (S, L, K) to one (p + t - 1, L, K) per row, on the CPU."""
    values = packed_routes.cpu()
    return tuple(values[torch.cat(places)] for places in _places(sequences, packed))


def _places(sequences: Sequences, packed: PackedRow) -> list[tuple[Tensor, Tensor]]:
    """Per row: where its prompt and where its response inputs lie in the packed row.

    The predictor of a response's first token is the last token of its prompt, and a prompt is one stretch.
    """
    predictors = packed.predictor.cpu().split(sequences.lengths.tolist())
    result = []
    for row, predictor in enumerate(predictors):
        if not len(predictor):
            result.append((predictor, predictor))
            continue
        end = int(predictor[0]) + 1
        start = end - len(sequences.prompts[int(sequences.prompt_index[row])])
        result.append((torch.arange(start, end), predictor[1:]))
    return result
