"""Stop strings: earliest completion, no leak, the same answer for every cut into tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.tokenizer.stop_strings import StopMatcher

SEEDED = settings(derandomize=True, deadline=None, max_examples=400)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None, int]:
    """Brute force: emitted text, stop string, number of characters read."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop, end
    return text, None, len(text)


def run(deltas: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None, int, list[str]]:
    matcher = StopMatcher(stops, include)
    pieces = []
    for number, delta in enumerate(deltas, start=1):
        step = matcher.push(delta)
        pieces.append(step.text)
        assert step.num_tokens == number
        if step.stop is not None:
            break
    last = matcher.flush()
    assert last.num_released_tokens == last.num_tokens == len(pieces)
    pieces.append(last.text)
    return "".join(pieces), last.stop, last.num_tokens, pieces


def cuts(text: str) -> list[list[str]]:
    """Every way to cut ``text`` into consecutive pieces."""
    result = []
    for marks in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        pieces = [text[:1]]
        for character, mark in zip(text[1:], marks, strict=True):
            if mark:
                pieces.append(character)
            else:
                pieces[-1] += character
        result.append(pieces)
    return result


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("this, a", ["a", "is", ","]),
        ("abcDEFGHIJ", ["DEFGHIJ"]),
        ("xabcd", ["abcd", "ab", "abc"]),
        ("xabcd", ["bc", "abc"]),
        ("ok</think>", ["think>", "</thin"]),
        ("aabaab!", ["aabaac", "baab"]),
        ("DEFDEFGH", ["DEFG", "FD"]),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_every_cut_gives_the_same_answer(text: str, stops: list[str], include: bool) -> None:
    want_text, want_stop, characters = expected(text, stops, include)
    assert want_stop is not None
    for order in (stops, stops[::-1]):
        for pieces in cuts(text):
            got_text, got_stop, num_tokens, _ = run(pieces, order, include)
            assert (got_text, got_stop) == (want_text, want_stop)
            ends = list(itertools.accumulate(map(len, pieces)))
            assert ends[num_tokens - 1] >= characters
            assert num_tokens == 1 or ends[num_tokens - 2] < characters


@SEEDED
@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
@example(["ab", "", "c"], ["abc", "b"], False)
def test_random_texts_agree_with_brute_force(deltas: list[str], stops: list[str], include: bool) -> None:
    got_text, got_stop, _, pieces = run(deltas, stops, include)
    want_text, want_stop, _ = expected("".join(deltas), stops, include)
    assert (got_text, got_stop) == (want_text, want_stop)
    emitted = ""
    for piece in pieces:  # what was sent is always a prefix of the final text: nothing has to be taken back
        emitted += piece
        assert want_text.startswith(emitted)


@SEEDED
@given(st.lists(st.text("ab", max_size=3), max_size=10), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_nothing_more_is_held_than_could_become_a_stop_string(deltas: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    read = emitted = ""
    for delta in deltas:
        step = matcher.push(delta)
        if step.stop is not None:
            return
        read, emitted = read + delta, emitted + step.text
        held = read[len(emitted) :]
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert held in beginnings | {""}
        assert held == max((start for start in beginnings if read.endswith(start)), key=len, default="")


def test_the_longest_of_the_strings_that_end_together_wins() -> None:
    assert run(["ab", "cd"], ["cd", "bcd", "d"])[:2] == ("a", "bcd")
    assert run(["ab", "cd"], ["cd", "bcd", "d", "c"])[:2] == ("ab", "c")


def test_held_text_is_flushed_at_the_end() -> None:
    text, stop, num_tokens, pieces = run(["say </", "thin"], ["</think>"])
    assert (text, stop, num_tokens) == ("say </thin", None, 2)
    assert pieces == ["say ", "", "</thin"]


def test_text_of_the_last_flush_is_searched_too() -> None:
    matcher = StopMatcher(["x\ufffd"])
    matcher.push("ax")
    step = matcher.flush("\ufffdb")
    assert (step.text, step.stop, step.num_tokens) == ("", "x\ufffd", 1)
    assert matcher.flush("c").text == ""
    other = StopMatcher(["xy"])
    assert other.push("ax").text == "a"
    step = other.flush("\ufffd")
    assert (step.text, step.stop, step.num_tokens, step.num_released_tokens) == ("x\ufffd", None, 1, 1)


def test_included_stop_strings_are_not_held_back() -> None:
    assert run(["say </", "think>", "more"], ["</think>"], include=True)[3] == ["say </", "think>", ""]


def test_released_tokens_follow_the_text() -> None:
    matcher = StopMatcher(["xyz"])
    released = [matcher.push(delta).num_released_tokens for delta in ("a", "bx", "", "y", "q", "x")]
    assert released == [1, 1, 1, 1, 5, 5]
    assert matcher.flush().num_released_tokens == 6


def test_rest_of_the_completing_token_is_discarded() -> None:
    step = StopMatcher(["\n\n"]).push("one\n\ntwo\n\n")
    assert (step.text, step.stop, step.num_tokens) == ("one", "\n\n", 1)


def test_no_stops_pass_everything_through() -> None:
    assert run(["a", "b"], []) == ("ab", None, 2, ["a", "b", ""])


@pytest.mark.parametrize(
    ("stops", "field"),
    [([""], r"stop\[0\]"), (["a", "\ud83d"], r"stop\[1\]"), (["a", 3], r"stop\[1\]"), ("abc", "stop is")],
)
def test_bad_stop_strings_are_refused(stops: list[str], field: str) -> None:
    with pytest.raises(RequestError, match=field):
        StopMatcher(stops)


def test_text_after_a_match_is_our_own_mistake() -> None:
    matcher = StopMatcher(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError, match="'a'"):
        matcher.push("b")
