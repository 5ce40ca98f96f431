"""Token ids to text, incrementally: what a stream shows after each group of tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from deepinfer.tokenizer.byte_level import fallback_byte
from deepinfer.tokenizer.tokenizer import Tokenizer


class _TextStream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text deltas.

    For any sequence and any grouping of it, ``"".join(deltas) + flush() == tokenizer.decode(all ids)``. Half a
    character is never returned: its bytes wait for the token that completes it, or for :meth:`flush`. The cost is
    constant per token (amortised); earlier tokens are not decoded again.

    Args:
        tokenizer: any :class:`Tokenizer`; byte-level ones take a path that works on bytes.
        skip_special_tokens: leave tokens flagged special (EOS, ...) out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stream: _TextStream = _ByteStream(tokenizer) if tokenizer.is_byte_level else _WindowStream(tokenizer)

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these tokens; may be empty.

        Raises:
            RequestError: an id outside the vocabulary; nothing of the group is taken in.
        """
        checked = self._tokenizer.checked_ids(ids, "token_ids")
        return "".join([self._stream.push(token_id) for token_id in checked if token_id not in self._skipped])

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD for an unfinished character. Afterwards a new one may start."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level tokens: the text is the UTF-8 decoding of the concatenated bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: decode the last settled tokens together with the new ones and take the difference.

    A decoder may look at its neighbours (SentencePiece strips the space of the first token), so the new tokens are
    decoded after a context of tokens with text rather than alone.

    Tokens wait while their text may still change: a run of byte-fallback tokens (the decoder judges the run as a whole)
    and text that ends in U+FFFD or does not continue the settled text. While they wait, decoding is tried again only
    after the number of waiting tokens has grown by a half, which keeps the cost amortised.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._context: list[int] = []  # settled tokens with a text that is not empty
        self._waiting: list[int] = []
        self._retry_at = 1

    def push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        spelling = self._backend.id_to_token(token_id)
        in_run = spelling is not None and fallback_byte(spelling) is not None
        if in_run or len(self._waiting) < self._retry_at:
            return ""
        delta = self._difference()
        if not delta or delta.endswith("\ufffd"):
            self._retry_at = len(self._waiting) + 1 + len(self._waiting) // 2
            return ""
        self._settle()
        return delta

    def flush(self) -> str:
        rest = self._decode(self._context + self._waiting)[len(self._decode(self._context)) :]
        self._context, self._waiting, self._retry_at = [], [], 1
        return rest

    def _difference(self) -> str | None:
        """Text of the waiting tokens after the context, or None where it would change the settled text."""
        before = self._decode(self._context)
        after = self._decode(self._context + self._waiting)
        return after[len(before) :] if after.startswith(before) else None

    def _settle(self) -> None:
        self._context, self._waiting, self._retry_at = self._waiting, [], 1

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
