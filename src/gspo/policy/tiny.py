"""Small models with random weights and a character tokenizer: everything works without a download.

The tokenizer has 100 entries: four special tokens, newline, and the 95 printable ASCII characters. Its chat
template spends one character on the role, so that a short question stays short::

    <|im_start|>u1+1=<|im_end|><|im_start|>a2<|im_end|>
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from gspo.errors import ModelError

SPECIAL_TOKENS = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'][0] }}{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)

_SHAPE: dict[str, Any] = {
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
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def tiny_model(name: str, overrides: Mapping[str, Any] | None = None, seed: int = 0) -> tuple[Any, Any]:
    """A transformers model of about a million parameters and its tokenizer.

    name: "qwen3" (dense) or "qwen3_moe" (8 experts, 2 active).
    overrides: fields of the transformers config, e.g. ``{"hidden_size": 64}``.
    Raises ModelError for another name, an unknown field or values that do not fit together.
    """
    from huggingface_hub.errors import StrictDataclassError as StrictError
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, _SHAPE),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _SHAPE | _EXPERTS),
    }
    if name not in kinds:
        raise ModelError(f"no tiny model is called {name!r}; there are {', '.join(kinds)}")
    config_class, model_class, defaults = kinds[name]
    fields = dict(overrides or {})
    _check_fields(name, fields, config_class(), defaults)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            config = config_class(**(defaults | fields))
            model = model_class(config)
        except (
            TypeError,
            ValueError,
            RuntimeError,
            ArithmeticError,
            AttributeError,
            LookupError,
            StrictError,
        ) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"no {name} model can be built with {fields}: {reason}") from error
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model, character_tokenizer(config.max_position_embeddings)


def _check_fields(name: str, fields: Mapping[str, Any], plain: Any, defaults: Mapping[str, Any]) -> None:
    known = sorted({*plain.to_dict(), *defaults} - {"architectures", "model_type", "transformers_version", "dtype"})
    for field in fields:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ModelError(f"a {name} model has no config field {field!r}{hint}")
    size = fields.get("vocab_size", defaults["vocab_size"])
    if not isinstance(size, int) or size < defaults["vocab_size"]:
        raise ModelError(f"vocab_size is {size!r}, but the character tokenizer needs {defaults['vocab_size']} or more")


def character_tokenizer(model_max_length: int = 2048) -> Any:
    """A transformers tokenizer with one token per character; other characters become <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
