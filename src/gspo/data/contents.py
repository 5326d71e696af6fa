"""What a prompt column may hold, and when two prompts are the same one. Nothing here needs torch or a tokenizer."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gspo.errors import DataError

if TYPE_CHECKING:
    from gspo.types import Message

_MARKUP = re.compile(r"\\[()\[\],;:! ]|\$")  # delimiters and spacing of LaTeX
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "−": "-", "–": "-", "—": "-", "×": "*", "·": "*"})


def prompt_content(value: Any, place: str, name: str = "prompt") -> str | tuple[Message, ...]:
    """Text or chat messages, checked.

    Raises:
        DataError: anything else, an empty prompt, or messages that do not end with the user's turn.
    """
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{place}: the column {name!r} is empty")
        return value
    if not isinstance(value, (list, tuple)):
        raise DataError(
            f"{place}: the column {name!r} is a {type(value).__name__}; text or a list of messages is needed"
        )
    messages = tuple(_message(message, index, place) for index, message in enumerate(value))
    if not messages:
        raise DataError(f"{place}: the column {name!r} has no messages")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{place}: the messages end with the assistant's; a prompt ends before the answer")
    return messages


def _message(message: Any, index: int, place: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or message.get("content") is None:
        raise DataError(f'{place}: message {index} is not {{"role": ..., "content": ...}} but {message!r:.80}')
    return dict(message)


def comparable(content: Any) -> str:
    """A key that two prompts share when they differ in layout only.

    Layout is case, blanks (but one between two words), quotes and dashes, compatible forms of characters, delimiters
    and spacing of LaTeX, punctuation at the end, and whether text stands alone or in a user's message. A system message
    is not looked at.

    >>> comparable("What is $1 + 1$?") == comparable([{"role": "user", "content": "what is 1+1 ?"}])
    True
    >>> comparable("1 1") == comparable("11")
    False
    """
    if isinstance(content, (list, tuple)) and all(isinstance(message, Mapping) for message in content):
        turns = [message for message in content if message.get("role") != "system"]
        if all(isinstance(message.get("content"), str) for message in turns):
            return "\x00".join(_plain(message["content"]) for message in turns)
    if isinstance(content, str):
        return _plain(content)
    return json.dumps(content, sort_keys=True, default=str)


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text.translate(_QUOTES)).casefold()
    text = " ".join(_MARKUP.sub(" ", text).split())
    text = re.sub(r"(?<!\w) | (?!\w)", "", text)
    return text.rstrip(".?!:") or text
