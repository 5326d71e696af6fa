"""The tiny models' shapes: defaults, what may be overridden, what fits together, and how many numbers it takes.

No torch here, so that a recipe is judged before anything is loaded; ``policy/tiny.py`` builds what this describes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from gspo.errors import ModelError

SPECIAL_TOKENS: Final = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
CHARACTERS: Final = "\n" + "".join(chr(code) for code in range(32, 127))

_DENSE: Final[Mapping[str, Any]] = {
    "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
}
_EXPERTS: Final[Mapping[str, Any]] = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {"qwen3": _DENSE, "qwen3_moe": {**_DENSE, **_EXPERTS}}

#: Fields of the two transformers configs that can be set besides those above.
_OTHER_FIELDS: Final = (
    "attention_bias",
    "attention_dropout",
    "hidden_act",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "use_cache",
    "use_sliding_window",
)
_OTHER_BY_NAME: Final[Mapping[str, tuple[str, ...]]] = {
    "qwen3": ("layer_types", "max_window_layers"),
    "qwen3_moe": ("mlp_only_layers", "output_router_logits", "router_aux_loss_coef"),
}
_COUNTS: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size", "num_experts",
    "num_experts_per_tok", "decoder_sparse_step",
)  # fmt: skip


def tiny_shape(name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Defaults and overrides of a tiny model together.

    Raises:
        ModelError: another name, an unknown field, or sizes that do not fit together.
    """
    if name not in DEFAULTS:
        raise ModelError(f"no tiny model is called {name!r}; there are {', '.join(DEFAULTS)}")
    known = sorted({*DEFAULTS[name], *_OTHER_FIELDS, *_OTHER_BY_NAME[name]})
    for field in overrides or {}:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ModelError(f"a {name} model has no config field {field!r}{hint}")
    shape = {**DEFAULTS[name], **(overrides or {})}
    _check_sizes(name, shape)
    return shape


def _check_sizes(name: str, shape: Mapping[str, Any]) -> None:
    for field in _COUNTS:
        value = shape.get(field, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{field} is {value!r}; a {name} model needs a whole number greater than 0")
    smallest = _DENSE["vocab_size"]
    if shape["vocab_size"] < smallest:
        raise ModelError(f"vocab_size is {shape['vocab_size']}, but the character tokenizer needs {smallest} or more")
    heads, shared = shape["num_attention_heads"], shape["num_key_value_heads"]
    if heads % shared:
        raise ModelError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {shared}")
    if shape["head_dim"] % 2:
        raise ModelError(f"head_dim = {shape['head_dim']} is odd; rotary positions turn pairs of numbers")
    active, experts = shape.get("num_experts_per_tok", 1), shape.get("num_experts", 1)
    if active > experts:
        raise ModelError(f"num_experts_per_tok = {active} is more than num_experts = {experts}")


def num_parameters(name: str, shape: Mapping[str, Any]) -> int:
    """Numbers in a tiny model of this shape, tied ones once."""
    hidden, width, layers = shape["hidden_size"], shape["head_dim"], shape["num_hidden_layers"]
    queries, keys = shape["num_attention_heads"] * width, shape["num_key_value_heads"] * width
    attention = 2 * hidden * queries + 2 * hidden * keys + 2 * width
    if shape.get("attention_bias"):
        attention += queries + 2 * keys + hidden
    dense = 3 * hidden * shape["intermediate_size"]
    total = layers * (attention + 2 * hidden)
    for layer in range(layers):
        total += _experts(shape) if name == "qwen3_moe" and _is_sparse(shape, layer) else dense
    embeddings = 1 if shape["tie_word_embeddings"] else 2
    return int(total + hidden + embeddings * shape["vocab_size"] * hidden)


def _is_sparse(shape: Mapping[str, Any], layer: int) -> bool:
    dense = shape.get("mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % shape["decoder_sparse_step"] == 0


def _experts(shape: Mapping[str, Any]) -> int:
    hidden, experts = shape["hidden_size"], shape["num_experts"]
    return int(experts * hidden + experts * 3 * hidden * shape["moe_intermediate_size"])
