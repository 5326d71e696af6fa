"""The private tests of a LiveCodeBench problem: base64 of zlib of a pickled string, read without unpickling.

A pickle is a program for a stack machine, and loading one can run anything. A pickled string needs a handful of its
instructions; here the instructions are listed and anything else is refused, so nothing of the file is ever executed.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from pickletools import genops

#: Encoded text and decoded bytes; the largest problems of release_v6 stay well below.
MAX_ENCODED_BYTES = 256 * 2**20
MAX_DECODED_BYTES = 1024 * 2**20
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
#: Framing, and the memo, in which a pickler notes what it wrote.
_IGNORED = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")


def decode_private(
    text: str, max_encoded_bytes: int = MAX_ENCODED_BYTES, max_decoded_bytes: int = MAX_DECODED_BYTES
) -> str:
    """The JSON text in an encoded ``private_test_cases``.

    Raises:
        ValueError: too large before or after unpacking (the latter is noticed while unpacking), not base64, not zlib,
            cut short, or a pickle of anything but one string.
    """
    if len(text) > max_encoded_bytes:
        raise ValueError(f"{len(text)} characters, more than {max_encoded_bytes}")
    try:
        packed = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"neither JSON nor base64 ({error})") from error
    return _pickled_string(_inflate(packed, max_decoded_bytes))


def _inflate(packed: bytes, limit: int) -> bytes:
    machine = zlib.decompressobj()
    try:
        data = machine.decompress(packed, limit + 1)
    except zlib.error as error:
        raise ValueError(f"not compressed by zlib ({error})") from error
    if len(data) > limit:
        raise ValueError(f"unpacks to more than {limit} bytes")
    if not machine.eof:
        raise ValueError("the compressed data are cut short")
    if machine.unused_data:
        raise ValueError(f"{len(machine.unused_data)} bytes follow the compressed data")
    return data


def _pickled_string(data: bytes) -> str:
    found: list[str] = []
    try:
        for opcode, argument, at in genops(data):
            position = at or 0
            if opcode.name in _STRINGS:
                found.append(str(argument))
            elif opcode.name not in _IGNORED:
                raise ValueError(
                    f"the pickle has the instruction {opcode.name} at byte {position}; only strings are read"
                )
            if opcode.name == "STOP" and position + 1 < len(data):
                raise ValueError(f"{len(data) - position - 1} bytes follow the pickle")
    except (UnicodeDecodeError, IndexError, OverflowError) as error:
        raise ValueError(f"the pickle is damaged ({error})") from error
    if len(found) != 1:
        raise ValueError(f"the pickle holds {len(found)} strings instead of one")
    return found[0]
