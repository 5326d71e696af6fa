"""What the model of a recipe is, without loading it: its sizes, its context, whether it has experts, its tokenizer.

Reads config.json, the headers of the weights and tokenizer.json; no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gspo.config.findings import Finding
from gspo.config.memory import ModelSizes, estimate_memory, machine_memory, model_sizes, readable, sizes_from_config
from gspo.config.schema import DataConfig, Recipe
from gspo.errors import InputError, ModelError
from gspo.policy.shapes import num_parameters, tiny_shape

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONTEXT: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def path_findings(recipe: Recipe) -> Iterator[Finding]:
    """Whether model.path is a model directory or could be the name of one."""
    path, gguf_file = recipe.model.path, recipe.model.gguf_file
    if path is None:
        return
    directory = Path(path)
    if directory.is_dir():
        wanted = gguf_file or "config.json"
        if not (directory / wanted).is_file():
            yield Finding("error", "model.path", f'"{path}" is not a model directory: it has no {wanted}')
        elif pickles := _only_pickles(directory):
            text = (
                f'"{path}" has its weights as a pickle only ({pickles}), which can run anything; convert to safetensors'
            )
            yield Finding("error", "model.path", text, ("model.gguf_file",))
    elif directory.exists():
        yield Finding("error", "model.path", f'"{path}" is a file; give the directory that it is in')
    elif not _HUB_NAME.fullmatch(path):
        yield Finding("error", "model.path", f'"{path}" is neither a directory nor a hub name like "Qwen/Qwen3-0.6B"')


def _only_pickles(directory: Path) -> str | None:
    """A file of pickled weights beside which there is no other form."""
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.gguf")):
        return None
    return next((file.name for file in sorted(directory.glob("*.bin")) if file.name.startswith("pytorch_model")), None)


def model_findings(recipe: Recipe) -> Iterator[Finding]:
    """Faults that only the model's own files show: damage, no room for a response, no experts, too little memory."""
    key = "model.path" if recipe.model.tiny is None else "model.tiny_config"
    if (recipe.model.tiny is None) == (recipe.model.path is None) or next(path_findings(recipe), None) is not None:
        return
    try:
        config = model_config(recipe)
        sizes = recipe_sizes(recipe)
        token_counter(recipe, recipe.data)
    except InputError as error:
        yield Finding("error", key, str(error), ("model.tiny", "model.path", "model.gguf_file"))
        return
    yield from _context_findings(recipe, context_length(recipe))
    if config is not None and recipe.model.tiny is None:
        yield from _replay_findings(recipe, config)
    if sizes is not None:
        yield from _memory_findings(recipe, sizes)


def model_config(recipe: Recipe) -> Mapping[str, Any] | None:
    """The fields of the model's transformers config; None for a GGUF file or a model that is not on this disk.

    Raises:
        ModelError: a tiny model that cannot be built, or a config.json that is none.
    """
    model = recipe.model
    if model.tiny is not None:
        return tiny_shape(model.tiny, model.tiny_config)
    file = Path(model.path or "") / "config.json"
    if model.gguf_file is not None or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: holds a {type(config).__name__}, not the fields of a model")
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def recipe_sizes(recipe: Recipe) -> ModelSizes | None:
    """Sizes of the recipe's model; None for one that is not on this disk. Raises ModelError as ``model_sizes``."""
    model = recipe.model
    if model.tiny is not None:
        shape = tiny_shape(model.tiny, model.tiny_config)
        return sizes_from_config(shape, num_parameters(model.tiny, shape))
    path = Path(model.path or "")
    return model_sizes(path, model.gguf_file) if path.is_dir() else None


def context_length(recipe: Recipe) -> int | None:
    """Most tokens of prompt and response together; None where the files do not tell, or are damaged."""
    try:
        config = model_config(recipe) or {}
    except ModelError:  # said by model_findings
        return None
    return next((int(config[name]) for name in _CONTEXT if isinstance(config.get(name), int) and config[name]), None)


def prompt_limit(recipe: Recipe, data: DataConfig) -> int | None:
    """Most tokens of a prompt of this section: as it says, or what the context leaves."""
    context = context_length(recipe)
    left = None if context is None else context - recipe.rollout.max_new_tokens
    return data.max_prompt_tokens or left


def _context_findings(recipe: Recipe, context: int | None) -> Iterator[Finding]:
    if context is None:
        return
    related = ("model.tiny_config", "model.path")
    longest = recipe.rollout.max_new_tokens
    for key, tokens in (("rollout.max_new_tokens", longest), ("eval.max_new_tokens", recipe.eval.max_new_tokens or 0)):
        if tokens >= context:
            text = f"{tokens} leaves no room for a prompt in the model's context of {context} tokens; take fewer"
            yield Finding("error", key, text, related)
    sections = [("data", recipe.data), *([("data.eval", recipe.data.eval)] if recipe.data.eval else [])]
    for name, data in sections:
        limit = data.max_prompt_tokens
        if limit is not None and longest < context < limit + longest:
            text = (
                f"{limit} and rollout.max_new_tokens = {longest} are {limit + longest} tokens together, more than the "
                f"model's context of {context}; take at most {context - longest}"
            )
            yield Finding("error", f"{name}.max_prompt_tokens", text, (*related, "rollout.max_new_tokens"))


def _replay_findings(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Finding]:
    if any(config.get(name) for name in _EXPERTS):
        return
    if recipe.moe.replay != "none":
        text = f'"{recipe.moe.replay}" has no effect: the model in {recipe.model.path} has no experts; take "none"'
        yield Finding("error", "moe.replay", text, ("model.path",))
    if recipe.moe.load_balancing_coefficient:
        text = f"has no effect: the model in {recipe.model.path} has no experts; leave it out"
        yield Finding("error", "moe.load_balancing_coefficient", text, ("model.path",))


def _memory_findings(recipe: Recipe, sizes: ModelSizes) -> Iterator[Finding]:
    """Weights, gradients, optimizer and reference have to fit; the rest is an estimate, and a warning."""
    device, available = recipe.run.device, machine_memory()
    if available is None or not (device == "cpu" or (device == "auto" and not has_accelerator())):
        return
    if sizes.num_parameters is None:
        return
    parts = estimate_memory(recipe, **asdict(sizes))
    fixed = sum(parts[name] for name in ("weights", "gradients", "optimizer", "reference"))
    related = ("model.path", "model.tiny_config", "run.device")
    key = "model.path" if recipe.model.tiny is None else "model.tiny_config"
    if fixed > available:
        text = (
            f"weights, gradients and optimizer take {readable(fixed)}, and this machine has {readable(available)}; "
            "take a smaller model or another machine"
        )
        yield Finding("error" if device == "cpu" else "warning", key, text, related)
    elif parts["peak"] > available:
        text = (
            f"about {readable(parts['peak'])} are needed at most, and this machine has {readable(available)}; lower "
            "rollout.max_slots, train.micro_batch_tokens or rollout.max_new_tokens"
        )
        yield Finding("warning", key, text, related)


def has_accelerator() -> bool:
    """Whether the system shows a device that torch may find: asked without loading torch."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/kfd", "/dev/dri/renderD128")) or (
        os.uname().sysname == "Darwin"
    )


def token_counter(recipe: Recipe, data: DataConfig) -> Callable[[Any], int] | None:
    """Counts the tokens of a prompt's content: exactly for a tiny model, else those of its text alone.

    None where that would need the transformers library (no tokenizer.json).
    """
    if recipe.model.tiny is not None:
        return lambda content: _tiny_tokens(content, data)
    file = Path(recipe.model.path or "") / "tokenizer.json"
    if not file.is_file():
        return None
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare class
        raise ModelError(f"{file}: not a tokenizer: {error}") from error
    return lambda content: sum(
        len(tokenizer.encode(text, add_special_tokens=False).ids) for text in _texts(content, data)
    )


def _texts(content: Any, data: DataConfig) -> list[str]:
    if isinstance(content, str):
        return [content + (data.instruction or "")]
    return [message["content"] for message in content if isinstance(message["content"], str)]


def _tiny_tokens(content: Any, data: DataConfig) -> int:
    """A character is a token; a message has three more, and the opening of the answer two (policy/tiny.py)."""
    texts = _texts(content, data)
    if data.chat_template == "never":
        return sum(map(len, texts))
    begins_with_system = not isinstance(content, str) and content[0]["role"] == "system"
    if data.system_prompt is not None and not begins_with_system:
        texts = [data.system_prompt, *texts]
    return sum(len(text) + 3 for text in texts) + 2
