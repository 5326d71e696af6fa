"""Small models with random weights and a character tokenizer: everything works without a download.

The tokenizer has 100 entries: four special tokens, newline, and the 95 printable ASCII characters. Its chat
template spends one character on the role, so that a short question stays short::

    <|im_start|>u1+1=<|im_end|><|im_start|>a2<|im_end|>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gspo.errors import ModelError
from gspo.policy.shapes import CHARACTERS, SPECIAL_TOKENS, tiny_shape

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'][0] }}{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)


def tiny_model(name: str, overrides: Mapping[str, Any] | None = None, seed: int = 0) -> tuple[Any, Any]:
    """A transformers model of about a million parameters and its tokenizer.

    name: "qwen3" (dense) or "qwen3_moe" (8 experts, 2 active).
    overrides: fields of the transformers config, e.g. ``{"hidden_size": 64}``.
    Raises ModelError for another name, an unknown field or values that do not fit together.
    """
    from huggingface_hub.errors import StrictDataclassError as StrictError
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = tiny_shape(name, overrides)
    kinds: dict[str, tuple[Any, Any]] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    }
    config_class, model_class = kinds[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            config = config_class(**shape)
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
            raise ModelError(f"no {name} model can be built with {dict(overrides or {})}: {reason}") from error
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model, character_tokenizer(config.max_position_embeddings)


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
