"""The model's vocabulary as grammars see it: which bytes each id adds to the text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepinfer.structured import native
from deepinfer.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of every id, and the id that ends an output. Shared by all requests of an engine.

    Args:
        token_bytes: one entry per id of the model (``vocab_size``, which may be more than the tokenizer names). Empty
            for special tokens, added tokens and ids without a token: a grammar never allows them.
    """

    token_bytes: tuple[bytes, ...]
    eos_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """The vocabulary of a tokenizer, over all ids of the model."""
        hidden = tokenizer.added_token_ids | tokenizer.special_token_ids
        entries = (b"" if index in hidden else tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size))
        return cls(tuple(entries), tokenizer.eos_token_id)

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    @property
    def num_words(self) -> int:
        """int32 words of one mask."""
        return -(-self.size // 32)

    @cached_property
    def info(self) -> Any:
        """The library's form of it."""
        return native.tokenizer_info(self.token_bytes, self.eos_id)
