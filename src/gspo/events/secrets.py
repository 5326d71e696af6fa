"""Secrets of the environment: kept from what a run writes and from the processes that judge what a model wrote.

A variable is one by its name, e.g. HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, DB_PASSWORD.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from typing import Final

_NAME: Final = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|\d|$)", re.IGNORECASE
)
#: A shorter value is a word like "1" or "yes" that text has by chance.
MIN_LENGTH: Final = 6


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret.

    >>> [name for name in ("HF_TOKEN", "OPENAI_API_KEY", "TOKENIZERS_PARALLELISM", "PWD") if is_secret(name)]
    ['HF_TOKEN', 'OPENAI_API_KEY']
    """
    return _NAME.search(name) is not None


def without_secrets(environment: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """The variables that another process may have: all but secrets, and those that are kept by name."""
    return {name: value for name, value in environment.items() if name in keep or not is_secret(name)}


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """``text`` with the name of the variable in place of its value, plain or as JSON writes it.

    >>> redact("401 for hf_abcdef", {"HF_TOKEN": "hf_abcdef"})
    '401 for [HF_TOKEN]'
    """
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= MIN_LENGTH and is_secret(name):
            for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
                text = text.replace(form, f"[{name}]")
    return text
