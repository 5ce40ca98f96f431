"""Encoding, decoding and the checks on ids and text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.tokenizer.tokenizer import Tokenizer

from .conftest import CHAT_TOKENS, sentencepiece_like, small_backend, wrap

SMALL = wrap(small_backend(CHAT_TOKENS))
SEEDED = settings(derandomize=True, deadline=None, max_examples=150)


def test_bos_is_put_in_front_on_request_and_never_twice(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("hello", add_bos=False)
    assert tokenizer.encode("hello", add_bos=True) == [0, *plain]
    assert tokenizer.encode("<｜begin▁of▁sentence｜>hello", add_bos=True) == [0, *plain]
    assert tokenizer.encode("", add_bos=True) == [0]
    assert tokenizer.encode("", add_bos=False) == []


def test_control_strings_become_tokens_only_when_parsed(tokenizer: Tokenizer) -> None:
    text = "a<｜User｜>b<think>c｜DSML｜<｜end▁of▁sentence｜>"
    parsed = tokenizer.encode(text, add_bos=False)
    for spelling in ("<｜User｜>", "<think>", "｜DSML｜", "<｜end▁of▁sentence｜>"):
        assert tokenizer.token_to_id(spelling) in parsed
    plain = tokenizer.encode(text, add_bos=False, parse_special=False)
    assert not tokenizer.added_token_ids & set(plain)
    assert tokenizer.decode(plain) == text == tokenizer.decode(parsed)


def test_every_added_token_can_be_written_as_plain_text(v41_tokenizer: Tokenizer) -> None:
    """Most of the released tokens are not flagged special, so the library's own switch would let them through."""
    added = v41_tokenizer.added_token_ids
    assert v41_tokenizer.token_to_id("<｜User｜>") in added - v41_tokenizer.special_token_ids
    text = " ".join(v41_tokenizer.backend.id_to_token(token_id) for token_id in sorted(added))
    plain = v41_tokenizer.encode(text, add_bos=False, parse_special=False)
    assert not added & set(plain)
    assert v41_tokenizer.decode(plain) == text
    assert set(v41_tokenizer.encode(text, add_bos=False)) >= added


@SEEDED
@given(st.text(max_size=40), st.booleans())
def test_text_survives_the_round_trip(text: str, parse_special: bool) -> None:
    assert SMALL.decode(SMALL.encode(text, add_bos=False, parse_special=parse_special)) == text


@SEEDED
@given(st.lists(st.integers(0, 386), max_size=30), st.booleans())
def test_decoding_agrees_with_the_library(ids: list[int], skip: bool) -> None:
    expected = SMALL.backend.decode(ids, skip_special_tokens=skip)
    assert SMALL.decode(ids, skip_special_tokens=skip) == expected


def test_released_vocabulary_decodes_like_the_library(v41_tokenizer: Tokenizer) -> None:
    ids = np.random.default_rng(0).integers(0, 129280, 20000)
    assert v41_tokenizer.decode(ids) == v41_tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)
    text = "Příliš žluťoučký kůň 👩‍👩‍👧‍👦 สวัสดีครับ 深度求索 \x00\t\u200b é e\u0301"
    assert v41_tokenizer.decode(v41_tokenizer.encode(text, add_bos=True), skip_special_tokens=True) == text


@pytest.mark.parametrize(("text", "position"), [("\ud83d", 0), ("abc\udc00", 3), ("😀\ud800x", 1)])
def test_lone_surrogates_are_refused_by_field_and_position(tokenizer: Tokenizer, text: str, position: int) -> None:
    with pytest.raises(RequestError, match=rf"^prompts\[3\] .*character {position} is the lone surrogate"):
        tokenizer.encode(text, add_bos=True, field="prompts[3]")


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError, match="not a string"):
        tokenizer.encode(text, add_bos=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 387, 2**31, 2**70, 1.5, "7", None])
def test_ids_that_do_not_exist_are_refused(tokenizer: Tokenizer, bad: object) -> None:
    with pytest.raises(RequestError, match=r"token_ids\[2\] .*integers from 0 to 386"):
        tokenizer.decode([5, 386, bad])  # type: ignore[list-item]
    with pytest.raises(RequestError):
        tokenizer.token_bytes(bad)  # type: ignore[arg-type]


def test_numpy_ids_are_fine(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("numpy", add_bos=False)
    assert tokenizer.decode(np.array(ids, dtype=np.int32)) == "numpy"
    checked = tokenizer.checked_ids(np.array(ids), "prompt_token_ids")
    assert checked == ids
    assert {type(token_id) for token_id in checked} <= {int}


def test_single_tokens_have_bytes_and_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("中", add_bos=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == "中".encode()
    assert len(ids) == 3  # no merges for these: every byte is a token
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    user = tokenizer.token_to_id("<｜User｜>")
    assert user is not None
    assert tokenizer.token_text(user) == "<｜User｜>"
    assert tokenizer.token_bytes(user) == "<｜User｜>".encode()


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    assert single >= {bytes([byte]) for byte in range(256)}


def test_embedding_rows_without_a_token_are_empty_text() -> None:
    tokenizer = wrap(small_backend(), vocab_size=400)
    assert tokenizer.token_bytes(399) == b""
    assert tokenizer.decode([399, *tokenizer.encode("x", add_bos=False), 390]) == "x"


def test_bytes_of_other_tokenizers(tokenizer: Tokenizer) -> None:
    other = wrap(sentencepiece_like())
    assert not other.is_byte_level
    assert other.token_bytes(8 + 0xE4) == b"\xe4"
    assert other.token_bytes(6) == "中".encode()


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    backend = small_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(wrap(backend).encode("x" * 10, add_bos=False)) == len(
        wrap(small_backend()).encode("x" * 10, add_bos=False)
    )


def test_tokenizer_that_cannot_avoid_a_control_token_refuses_the_text() -> None:
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.WordLevel({"[UNK]": 0, "stop": 1}, unk_token="[UNK]"))
    backend.add_special_tokens([AddedToken("stop")])
    with pytest.raises(RequestError, match=r"content .*'stop' as a control token"):
        wrap(backend).encode("stop", add_bos=False, parse_special=False, field="content")
