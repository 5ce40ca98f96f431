"""Read ``tokenizer.json`` and ``tokenizer_config.json`` under the "release" or "native" policy (spec 9)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError, CheckpointFileError

NUM_SPAN_IDS = 21
"""Ids just above the vocabulary that the "release" policy keeps for the tokens of an image span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """What the files say, after the policy was applied."""

    backend: Backend
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    inserts_bos: bool


def read_tokenizer(path: str | Path, config: ModelConfig) -> TokenizerFile:
    """Read the tokenizer of a checkpoint directory (or a ``tokenizer.json``).

    "release": BOS, EOS and PAD are those of the model configuration even when the files alias them, BOS is put before
    plain text, and image span tokens stored above the vocabulary are dropped, so that they can neither be typed by a
    user nor enter the compressed vocabulary. "native": ids and BOS as the files have them.

    Raises:
        CheckpointFileError: there is no such file.
        CheckpointError: it is no tokenizer, or its ids do not fit the model.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointFileError(
            f"no tokenizer at {file}",
            why="a checkpoint directory holds tokenizer.json",
            fix="download it from the model's repository, or give the directory that has it",
        )
    release = config.tokenizer_compatibility == "release"
    vocab_size = config.text.vocab_size
    backend = _parse(file, drop_ids=range(vocab_size, vocab_size + NUM_SPAN_IDS) if release else range(0))
    _check_ids(backend, file, vocab_size)
    side = _side_file(file.with_name("tokenizer_config.json"))
    if release:
        parts = TokenizerFile(
            backend=backend,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            inserts_bos=True,
        )
    else:
        bos = _named_id(backend, side, "bos_token", config.bos_token_id)
        parts = TokenizerFile(
            backend=backend,
            bos_token_id=bos,
            eos_token_id=_named_id(backend, side, "eos_token", config.eos_token_id),
            pad_token_id=_named_id(backend, side, "pad_token", config.pad_token_id),
            inserts_bos=bool(side.get("add_bos_token")) or backend.encode("").ids[:1] == [bos],
        )
    for name in ("bos_token_id", "eos_token_id"):
        token_id = getattr(parts, name)
        if backend.id_to_token(token_id) is None:
            raise CheckpointError(
                f"{file} has no token for {name} {token_id}",
                why="every prompt starts with BOS and every answer ends with EOS",
                fix="use the tokenizer.json that belongs to this checkpoint",
            )
    return parts


def _broken(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read", why=f"{error}", fix="download the file again")


def _parse(file: Path, drop_ids: range) -> Backend:
    """Load the tokenizer without the added tokens whose ids lie in ``drop_ids``."""
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(file, error) from error
    try:
        added = data["added_tokens"]
        kept = [token for token in added if token["id"] not in drop_ids]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} cannot be read",
            why="it is no tokenizer: that is an object with a list 'added_tokens' of objects with an 'id'",
            fix="use the tokenizer.json that belongs to this checkpoint, or download it again",
        ) from error
    if len(kept) != len(added):
        text = json.dumps(data | {"added_tokens": kept}, ensure_ascii=False)
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises the bare class
        raise _broken(file, error) from error


def _check_ids(backend: Backend, file: Path, vocab_size: int) -> None:
    spelling, largest = max(
        backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1], default=("", -1)
    )
    if largest >= vocab_size:
        raise CheckpointError(
            f"{file} gives {spelling!r} the id {largest}",
            why=f"the model has {vocab_size} embedding rows",
            fix="use the tokenizer.json that belongs to this checkpoint",
        )


def _side_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(file, error) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{file} is a {type(data).__name__}", why="it has to be an object", fix="download it again"
        )
    return data


def _named_id(backend: Backend, side: dict[str, Any], key: str, default: int) -> int:
    """Id of the token that ``tokenizer_config.json`` names under ``key``, or ``default`` when it names none."""
    entry = side.get(key)
    spelling = entry.get("content") if isinstance(entry, dict) else entry
    if spelling is None:
        return default
    token_id = backend.token_to_id(spelling) if isinstance(spelling, str) else None
    if token_id is None:
        raise CheckpointError(
            f"tokenizer_config.json names {spelling!r} as {key}",
            why="tokenizer.json has no such token",
            fix="use two files of the same checkpoint",
        )
    return token_id
