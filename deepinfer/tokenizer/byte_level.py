"""The byte alphabet of byte-level BPE: how a vocabulary entry spells raw bytes as printable characters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 bytes stand for themselves, the others for U+0100, U+0101, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _alphabet()


def spelled_bytes(spelling: str) -> bytes:
    """Bytes of one vocabulary entry. An entry with a character outside the alphabet means its own UTF-8 bytes.

    The second rule is how added tokens such as ``<｜User｜>`` keep their text: the byte-level decoder of the
    ``tokenizers`` library applies it to every entry, added or not.
    """
    values = [BYTE_OF_CHARACTER.get(character) for character in spelling]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else spelling.encode("utf-8")


def fallback_byte(spelling: str) -> int | None:
    """The byte of a byte-fallback entry such as ``<0xE4>``, else None."""
    match = _BYTE_FALLBACK.fullmatch(spelling)
    return int(match.group(1), 16) if match else None


def is_byte_level(backend: Backend) -> bool:
    """Whether the text of a token sequence is the concatenation of its tokens' bytes."""
    return isinstance(backend.decoder, decoders.ByteLevel)


def spellings(backend: Backend, num_ids: int) -> list[str | None]:
    """Vocabulary spelling of every id below ``num_ids``; None where the tokenizer has no token."""
    table: list[str | None] = [None] * num_ids
    entries: Iterable[tuple[str, int]] = backend.get_vocab(with_added_tokens=False).items()
    for spelling, token_id in entries:
        if token_id < num_ids:
            table[token_id] = spelling
    for token_id, token in backend.get_added_tokens_decoder().items():  # an added token hides a base entry
        if token_id < num_ids:
            table[token_id] = token.content
    return table


def token_bytes_table(backend: Backend, num_ids: int) -> list[bytes]:
    """Bytes that each id below ``num_ids`` contributes to the text; empty where the tokenizer has no token.

    Exact for byte-level tokenizers. For others a token's bytes are the UTF-8 form of the token decoded alone, and
    byte-fallback tokens are their byte.
    """
    table = spellings(backend, num_ids)
    if is_byte_level(backend):
        return [b"" if spelling is None else spelled_bytes(spelling) for spelling in table]
    alone = backend.decode_batch([[token_id] for token_id in range(num_ids)], skip_special_tokens=False)
    result = []
    for spelling, text in zip(table, alone, strict=True):
        byte = None if spelling is None else fallback_byte(spelling)
        result.append(text.encode("utf-8") if byte is None else bytes([byte]))
    return result
