"""From text or chat messages to token ids, through the tokenizer's own template, with BOS exactly once.

Whether a BOS is still to be added is decided by looking at the first id of the rendered prompt: a template that
writes it and a tokenizer that would add it again make one, not two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo.errors import DataError
from gspo.types import Message

_PROBE = "GSPO-PROBE"


@dataclass(frozen=True)
class Rendering:
    """How prompts are written for the model; the names are those of ``[data]``."""

    chat_template: Literal["auto", "always", "never"] = "auto"
    system_prompt: str | None = None
    instruction: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)


def render_prompt(
    tokenizer: Any, content: str | Sequence[Message], rendering: Rendering | None = None, where: str = "the prompt"
) -> tuple[int, ...]:
    """Token ids of one prompt, (p,).

    Args:
        tokenizer: a Hugging Face tokenizer.
        content: text, or chat messages that end with the user's.
        rendering: template, system prompt, instruction.
        where: names the row in messages of errors.

    Raises:
        DataError: chat data or a system prompt without a chat template, a template that fails, or no tokens at all.
    """
    rendering = rendering or Rendering()
    if isinstance(content, str):
        content = content + (rendering.instruction or "")
    text = _to_text(tokenizer, content, rendering, where)
    ids = encode(tokenizer, text)
    if not ids:
        raise DataError(f"{where} has no tokens")
    return with_bos(tokenizer, ids)


def _to_text(tokenizer: Any, content: str | Sequence[Message], rendering: Rendering, where: str) -> str:
    if _uses_template(tokenizer, content, rendering, where):
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(m) for m in content]
        if rendering.system_prompt is not None and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": rendering.system_prompt})
        return _apply(tokenizer, messages, rendering.template_options, where)
    assert isinstance(content, str)
    if rendering.system_prompt is not None:
        raise DataError(f"{where}: a system_prompt needs a chat template, and none is applied here")
    if rendering.template_options:
        raise DataError(f"{where}: template_options need a chat template, and none is applied here")
    return content


def _uses_template(tokenizer: Any, content: str | Sequence[Message], rendering: Rendering, where: str) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    is_chat = not isinstance(content, str)
    if rendering.chat_template == "never":
        if is_chat:
            raise DataError(
                f'{where} holds chat messages, which need a chat template; chat_template = "never" forbids it'
            )
        return False
    wanted = is_chat or rendering.chat_template == "always"
    if wanted and not has_template:
        what = "holds chat messages" if is_chat else 'is text with chat_template = "always"'
        raise DataError(
            f"{where} {what}, but the tokenizer has no chat template; use text prompts or another tokenizer"
        )
    return has_template


def _apply(tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any], where: str) -> str:
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(f"{where}: the chat template refuses the messages: {error}") from error


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a text, nothing added."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def with_bos(tokenizer: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Puts BOS in front if this tokenizer uses one and the ids do not begin with it."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or ids[:1] == (bos,) or not adds_bos(tokenizer):
        return ids
    return (bos, *ids)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts BOS in front of a text by itself."""
    return bool(tuple(tokenizer("a")["input_ids"])[:1] == (tokenizer.bos_token_id,))


def closing_ids(tokenizer: Any, chat: bool) -> tuple[int, ...]:
    """What ends a response: the template's end-of-turn token for chat prompts, else the end-of-text token.

    Raises:
        DataError: the tokenizer has neither.
    """
    if chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        for token in encode(tokenizer, text.rpartition(_PROBE)[2]):
            if token in set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {})):
                return (token,)
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-text token, so a response could not be ended; set eos_token")
    return (int(tokenizer.eos_token_id),)


def is_templated(tokenizer: Any, content: str | Sequence[Message], rendering: Rendering) -> bool:
    """Whether a prompt is rendered through the chat template."""
    return _uses_template(tokenizer, content, rendering, "the prompt")
