"""The built-in tokenizer: exactly vocab_size ids, special tokens where the configuration wants them, lossless text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from deepinfer.checkpoint import tiny_config
from deepinfer.checkpoint.tiny_tokenizer import CHAT_TOKENS, build_tiny_tokenizer
from deepinfer.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(build_tiny_tokenizer(tiny_config()))


def test_every_id_below_the_vocabulary_size_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))
    assert all(tokenizer.id_to_token(token_id) for token_id in range(512))


def test_special_tokens_have_the_configured_ids_and_stay_whole(tokenizer: Tokenizer) -> None:
    names = {0: "<｜begin▁of▁sentence｜>", 1: "<｜end▁of▁sentence｜>", 2: "<｜▁pad▁｜>", 501: "<｜deepseek_image｜>"}
    for token_id, name in names.items():
        assert tokenizer.token_to_id(name) == token_id
        assert tokenizer.encode(f"a{name}b").ids[1] == token_id
    for name in CHAT_TOKENS:
        assert tokenizer.token_to_id(name) > 501
        assert len(tokenizer.encode(name).ids) == 1
    assert "holder" in tokenizer.id_to_token(500)


def test_any_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    text = 'The engine reads\n\ta "prompt" – naïve, 漢字 🙂 <｜User｜> 123  </think>\x00'
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert "User" not in tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True)


def test_common_words_are_merged(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" the engine and the answer").ids) < 13
    every = {tokenizer.decode([token_id]) for token_id in range(3, 500)}
    assert " the" in every


@pytest.mark.parametrize("vocab_size", [320, 1000, 5000])
def test_other_vocabulary_sizes_are_filled_exactly(vocab_size: int) -> None:
    config = tiny_config(vocab_size=vocab_size, dspark_noise_token_id=7, image_token_id=vocab_size - 3)
    tokenizer = Tokenizer.from_str(build_tiny_tokenizer(config))
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    assert tokenizer.token_to_id("<｜deepseek_image｜>") == vocab_size - 3
    assert all(tokenizer.token_to_id(name) is not None for name in CHAT_TOKENS)
    text = "hello, wörld"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_too_small_a_vocabulary_is_refused() -> None:
    config = tiny_config(vocab_size=260, dspark_noise_token_id=7, image_token_id=200)
    with pytest.raises(ConfigError, match="vocab_size is 260"):
        build_tiny_tokenizer(config)
