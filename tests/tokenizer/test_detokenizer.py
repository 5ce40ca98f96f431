"""Streaming text: the deltas add up, and no delta holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.tokenizer.detokenizer import IncrementalDetokenizer, _WindowStream
from deepinfer.tokenizer.tokenizer import Tokenizer

from .conftest import CHAT_TOKENS, sentencepiece_like, small_backend, wordpiece_like, wrap

SMALL = wrap(small_backend(CHAT_TOKENS))
SENTENCEPIECE = wrap(sentencepiece_like())
WORDPIECE = wrap(wordpiece_like())
SEEDED = settings(derandomize=True, deadline=None, max_examples=200)

HARD = "Příliš žluťoučký kůň 👩‍👩‍👧‍👦🏳️‍🌈 สวัสดีครับ 深度求索 e\u0301 \x00\t\u200b\ufffd 한국어 العربية"
groups = st.lists(st.integers(0, 6), min_size=1, max_size=12)


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool = False) -> list[str]:
    """Deltas of ``ids`` pushed in groups whose sizes repeat ``sizes``; the flush is the last delta."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    deltas, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)] or (turn % len(sizes) == len(sizes) - 1)  # no endless run of empty groups
        deltas.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*deltas, detokenizer.flush()]


@SEEDED
@given(st.text(max_size=30), groups)
@example(HARD, [1])
@example("👩‍👩‍👧‍👦" * 5, [1, 2, 3])
def test_text_comes_back_whatever_the_grouping(text: str, sizes: list[int]) -> None:
    deltas = stream(SMALL, SMALL.encode(text, add_bos=False, parse_special=False), sizes)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(deltas[:-1])
    assert deltas[-1] == ""  # nothing was unfinished


@SEEDED
@given(st.lists(st.integers(0, 386), max_size=40), groups, st.booleans())
@example([334, 0, 1, 2, 335], [1], True)
def test_any_tokens_add_up_to_the_decoded_text(ids: list[int], sizes: list[int], skip: bool) -> None:
    expected = SMALL.decode(ids, skip_special_tokens=skip)
    deltas = stream(SMALL, ids, sizes, skip)
    assert "".join(deltas) == expected
    for delta in deltas:
        delta.encode("utf-8")


@SEEDED
@given(st.binary(max_size=24), groups)
@example(b"\x80\x80\xe4\xb8\xff\xf0\x9f\x98", [1])
@example(b"\xed\xa0\x80\xf4\x90\x80\x80\xc0\xaf", [1])
def test_bytes_that_are_no_characters_add_up_too(data: bytes, sizes: list[int]) -> None:
    token_of = {SMALL.token_bytes(token_id): token_id for token_id in range(334)}
    ids = [token_of[bytes([byte])] for byte in data]
    assert "".join(stream(SMALL, ids, sizes)) == data.decode("utf-8", "replace") == SMALL.backend.decode(ids)


@SEEDED
@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=30), groups, st.booleans())
@example([8 + 0xE4, 8 + 0xB8, 8 + 0xAD, 8 + 0xFF, 2, 3], [1], False)
@example([1, 1, 2, 264, 2, 264, 1, 3], [1], True)
def test_sentencepiece_tokens_add_up(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(stream(SENTENCEPIECE, ids, sizes, skip)) == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


@SEEDED
@given(st.lists(st.integers(0, WORDPIECE.vocab_size - 1), max_size=30), groups, st.booleans())
def test_wordpiece_tokens_add_up(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(stream(WORDPIECE, ids, sizes, skip)) == WORDPIECE.decode(ids, skip_special_tokens=skip)


def test_half_a_character_waits_for_its_rest() -> None:
    emoji = SMALL.encode("😀", add_bos=False)
    assert len(emoji) == 4
    detokenizer = IncrementalDetokenizer(SMALL)
    assert [detokenizer.push([token_id]) for token_id in emoji] == ["", "", "", "😀"]
    assert detokenizer.push(emoji[:3]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(emoji) == "😀"  # the flush left nothing behind
    assert detokenizer.flush() == ""


def test_character_cut_by_a_control_token_is_replaced_like_in_the_decoded_text() -> None:
    emoji = SMALL.encode("😀", add_bos=False)
    user = SMALL.token_to_id("<｜User｜>")
    assert user is not None
    detokenizer = IncrementalDetokenizer(SMALL)
    assert detokenizer.push([*emoji[:2], user]) == "\ufffd<｜User｜>" == SMALL.decode([*emoji[:2], user])


def test_special_tokens_are_left_out_on_request() -> None:
    eos = SMALL.eos_token_id
    ids = [*SMALL.encode("a", add_bos=True), eos]
    assert "".join(stream(SMALL, ids, [1], skip=True)) == "a"
    assert "".join(stream(SMALL, ids, [1])) == "<｜begin▁of▁sentence｜>a<｜end▁of▁sentence｜>"


def test_byte_run_waits_until_it_is_decided() -> None:
    """This decoder replaces a whole run of bytes by U+FFFD if any of it is invalid, so the run must end first."""
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    assert detokenizer.push([8 + 0xE4, 8 + 0xB8, 8 + 0xAD]) == ""
    assert detokenizer.push([4]) == "中s"


def test_bad_id_is_refused_and_nothing_of_its_group_is_taken() -> None:
    detokenizer = IncrementalDetokenizer(SMALL)
    x = SMALL.encode("x", add_bos=False)
    with pytest.raises(RequestError, match=r"token_ids\[1\]"):
        detokenizer.push([*x, 387])
    assert detokenizer.push(x) == "x"


@pytest.mark.parametrize(
    "pattern",
    [[2, 3, 4], [8 + 0xE4], [8 + 0xFF] * 50 + [4], [1, 1, 1, 2], [0], [264, 265], [266]],
    ids=["words", "bytes", "byte runs", "spaces", "unknown", "special", "replacement characters"],
)
def test_work_per_token_does_not_grow(pattern: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the tokens that the library is asked to decode: a few per token, however long the sequence is."""
    decoded = 0
    decode = _WindowStream._decode

    def counted(self: _WindowStream, ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(_WindowStream, "_decode", counted)
    ids = (pattern * 5000)[:5000]
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    for token_id in ids:
        detokenizer.push([token_id])
    detokenizer.flush()
    assert decoded <= 8 * len(ids)


def test_bytes_are_never_decoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer = IncrementalDetokenizer(SMALL)
    monkeypatch.setattr(Tokenizer, "decode", None)
    ids = SMALL.encode(HARD, add_bos=False)
    assert "".join([detokenizer.push([token_id]) for token_id in ids]) == HARD
