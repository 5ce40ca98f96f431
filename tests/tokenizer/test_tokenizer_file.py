"""Reading the tokenizer files of a checkpoint: policy, errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import processors

from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError, CheckpointFileError
from deepinfer.tokenizer.compressed_vocab import load_compressed_vocab
from deepinfer.tokenizer.tokenizer import Tokenizer

from .conftest import DATA, small_backend, with_text


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copyfile(DATA / "s1_basic.tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path


def add_token(checkpoint: Path, token_id: int, content: str) -> None:
    file = checkpoint / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["added_tokens"].append(data["added_tokens"][-1] | {"id": token_id, "content": content})
    file.write_text(json.dumps(data), encoding="utf-8")


def native(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, tokenizer_compatibility="native")


def test_directory_and_file_give_the_same_tokenizer(checkpoint: Path, config: ModelConfig) -> None:
    first = Tokenizer.from_directory(checkpoint, config)
    second = Tokenizer.from_directory(str(checkpoint / "tokenizer.json"), config)
    assert first.encode("the same", add_bos=True) == second.encode("the same", add_bos=True)
    assert (first.vocab_size, first.bos_token_id, first.eos_token_id, first.image_token_id) == (384, 0, 1, 368)


def test_release_pads_with_its_own_token_whatever_the_files_alias(checkpoint: Path, config: ModelConfig) -> None:
    aliased = {"pad_token": {"content": "<｜end▁of▁sentence｜>"}, "eos_token": "<｜User｜>", "add_bos_token": False}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(aliased), encoding="utf-8")
    released = Tokenizer.from_directory(checkpoint, config)
    assert (released.pad_token_id, released.eos_token_id) == (2, 1)
    assert released.encode("a", add_bos=True)[0] == 0
    asis = Tokenizer.from_directory(checkpoint, native(config))
    assert (asis.pad_token_id, asis.eos_token_id) == (1, 334)
    assert asis.encode("a", add_bos=True) == asis.encode("a", add_bos=False)


def test_native_puts_bos_where_the_files_say_so(checkpoint: Path, config: ModelConfig) -> None:
    (checkpoint / "tokenizer_config.json").write_text('{"add_bos_token": true}', encoding="utf-8")
    assert Tokenizer.from_directory(checkpoint, native(config)).encode("a", add_bos=True)[0] == 0
    (checkpoint / "tokenizer_config.json").unlink()
    backend = small_backend()
    bos = "<｜begin▁of▁sentence｜>"
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    backend.save(str(checkpoint / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(checkpoint, native(config))
    assert tokenizer.encode("a", add_bos=True) == [0, *tokenizer.encode("a", add_bos=False)]


def test_release_drops_span_tokens_stored_above_the_vocabulary(checkpoint: Path, config: ModelConfig) -> None:
    before = load_compressed_vocab(Tokenizer.from_directory(checkpoint, config), config.text)
    add_token(checkpoint, 384, "<|place_holder_mm_span_0000|>")
    tokenizer = Tokenizer.from_directory(checkpoint, config)
    assert tokenizer.token_to_id("<|place_holder_mm_span_0000|>") is None
    assert max(tokenizer.encode("x<|place_holder_mm_span_0000|>", add_bos=True)) < 384
    after = load_compressed_vocab(tokenizer, config.text)
    assert after.size == before.size
    assert (after.token_map == before.token_map).all()
    with pytest.raises(CheckpointError, match=r"place_holder_mm_span_0000.*384"):
        Tokenizer.from_directory(checkpoint, native(config))


def test_ids_beyond_the_embedding_are_refused(checkpoint: Path, config: ModelConfig) -> None:
    add_token(checkpoint, 384, "<|place_holder_mm_span_0000|>")
    add_token(checkpoint, 385 + 20, "<far>")
    with pytest.raises(CheckpointError, match="384 embedding rows"):
        Tokenizer.from_directory(checkpoint, with_text(config, engram_compressed_vocab_size=None))


def test_missing_tokenizer_names_the_file(tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(CheckpointFileError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path, config)
    with pytest.raises(FileNotFoundError):
        Tokenizer.from_directory(tmp_path / "nowhere", config)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"added_tokens": []}', b"\xff\xfe", b'{"added_tokens": [3]}']
)
def test_broken_tokenizer_is_a_checkpoint_error(tmp_path: Path, config: ModelConfig, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read") as caught:
        Tokenizer.from_directory(tmp_path, config)
    assert len(caught.value.why) > 20, "a sentence, not the text of a KeyError"


def test_broken_side_file_matters_and_a_missing_special_token_too(checkpoint: Path, config: ModelConfig) -> None:
    side = checkpoint / "tokenizer_config.json"
    side.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        Tokenizer.from_directory(checkpoint, config)
    side.write_text("[1]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="list"):
        Tokenizer.from_directory(checkpoint, config)
    side.write_text('{"eos_token": "<nope>"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"<nope>.*eos_token"):
        Tokenizer.from_directory(checkpoint, native(config))


def test_eos_without_a_token_is_refused(checkpoint: Path, config: ModelConfig) -> None:
    wider = with_text(config, vocab_size=512, engram_compressed_vocab_size=None)
    with pytest.raises(CheckpointError, match="eos_token_id 500"):
        Tokenizer.from_directory(checkpoint, dataclasses.replace(wider, eos_token_id=500))
