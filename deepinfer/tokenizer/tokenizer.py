"""Text to token ids and back, with the policy that the model's vendor applies to the tokenizer files (spec 9)."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from deepinfer.config.model import ModelConfig
from deepinfer.errors import RequestError
from deepinfer.tokenizer.byte_level import is_byte_level, token_bytes_table
from deepinfer.tokenizer.tokenizer_file import read_tokenizer
from deepinfer.tokenizer.valid_text import refusal, require_text


class Tokenizer:
    """A checkpoint's tokenizer. Read-only after construction, so it may be shared between threads.

    Args:
        backend: what ``tokenizer.json`` describes. Its truncation and padding are switched off.
        vocab_size: rows of the embedding; every id in ``[0, vocab_size)`` is valid, named by the backend or not.
        bos_token_id, eos_token_id, pad_token_id: what this engine uses, whatever the files alias.
        image_token_id: the placeholder of one image in a rendered prompt.
        inserts_bos: whether ``encode(add_bos=True)`` puts BOS in front.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        bos_token_id: int,
        eos_token_id: int,
        pad_token_id: int,
        image_token_id: int,
        inserts_bos: bool = True,
    ) -> None:
        backend.no_truncation()  # a file may ask for either; a silently shortened prompt is a wrong answer
        backend.no_padding()
        self.backend = backend
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.image_token_id = image_token_id
        self.inserts_bos = inserts_bos
        self.is_byte_level = is_byte_level(backend)
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        """Tokens matched as whole strings before splitting: turn marks, ``<think>``, BOS, ..."""
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """The added tokens that ``skip_special_tokens`` leaves out of the text."""

    @classmethod
    def from_directory(cls, path: str | Path, config: ModelConfig) -> Tokenizer:
        """Read the tokenizer of a checkpoint directory.

        Raises:
            CheckpointFileError: there is no ``tokenizer.json``.
            CheckpointError: it is broken, or its ids do not fit the model.
        """
        parts = read_tokenizer(path, config)
        return cls(
            parts.backend,
            vocab_size=config.text.vocab_size,
            bos_token_id=parts.bos_token_id,
            eos_token_id=parts.eos_token_id,
            pad_token_id=parts.pad_token_id,
            image_token_id=config.image_token_id,
            inserts_bos=parts.inserts_bos,
        )

    def encode(self, text: str, *, add_bos: bool, parse_special: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any Unicode text; NUL and unassigned characters are fine.
            add_bos: start with BOS. A text that already begins with the BOS string does not get a second one.
            parse_special: True turns the spelling of an added token (``<｜User｜>``) into that token, as a prompt
                rendered by hand expects. False encodes it like any other text: use it for text that a user typed.
            field: name of the argument, for the error.
        Raises:
            RequestError: not a string, or a lone surrogate in it.
        """
        require_text(text, field)
        backend = self.backend if parse_special else self._plain_backend
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if not parse_special and not self.added_token_ids.isdisjoint(ids):
            token_id = next(token_id for token_id in ids if token_id in self.added_token_ids)
            raise RequestError(
                field,
                text,
                why=f"this tokenizer can only write {self.backend.id_to_token(token_id)!r} as a control token",
                fix="remove it from the text",
            )
        if add_bos and self.inserts_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of a token sequence; bytes that form no character become U+FFFD.

        Raises:
            RequestError: an id outside ``[0, vocab_size)``.
        """
        checked = self.checked_ids(ids, "token_ids")
        if not self.is_byte_level:
            return self.backend.decode(checked, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            checked = [token_id for token_id in checked if token_id not in self.special_token_ids]
        return b"".join([self._token_bytes[token_id] for token_id in checked]).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; U+FFFD for a part of a character. Raises as :meth:`decode`."""
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to the text (exact for byte-level tokenizers). Raises as :meth:`decode`."""
        return self._token_bytes[self.checked_ids([token_id], "token_id")[0]]

    def token_to_id(self, spelling: str) -> int | None:
        """Id of a vocabulary entry by its spelling in the file, such as ``<think>``; None if there is none."""
        return self.backend.token_to_id(spelling)

    def checked_ids(self, ids: Iterable[int], field: str) -> list[int]:
        """``ids`` as a list of plain integers (NumPy integers and arrays are fine).

        Raises:
            RequestError: an entry that is no integer or lies outside ``[0, vocab_size)``; names ``field[index]``.
        """
        result = []
        for index, value in enumerate(ids):
            try:
                token_id = operator.index(value)
            except TypeError as error:
                raise self._bad_id(f"{field}[{index}]", value, f"it is a {type(value).__name__}") from error
            if not 0 <= token_id < self.vocab_size:
                raise self._bad_id(f"{field}[{index}]", token_id, "there is no such token")
            result.append(token_id)
        return result

    def _bad_id(self, field: str, value: object, why: str) -> RequestError:
        return refusal(field, value, why=why, fix=f"token ids are integers from 0 to {self.vocab_size - 1}")

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return token_bytes_table(self.backend, self.vocab_size)

    @cached_property
    def _plain_backend(self) -> Backend:
        """The backend without added tokens: it cannot produce a control token from text.

        The library's own switch (``encode_special_tokens``) covers only tokens flagged special, and the released file
        flags ``<｜User｜>`` or ``<think>`` as ordinary added tokens.
        """
        data: dict[str, Any] = json.loads(self.backend.to_str())
        data |= {"added_tokens": [], "post_processor": None}
        return Backend.from_str(json.dumps(data, ensure_ascii=False))
