"""Texts and program values become typed values, or an explanation."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.config.values import Kind, check_value, nearest, parse_text


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Kind.BOOL, "0", False),
        (Kind.BOOL, "", False),
        (Kind.BOOL, "false", False),
        (Kind.BOOL, "False", False),
        (Kind.BOOL, "1", True),
        (Kind.BOOL, "true", True),
        (Kind.BOOL, "True", True),
        (Kind.INT, " 12 ", 12),
        (Kind.INT, "-3", -3),
        (Kind.FLOAT, "0.5", 0.5),
        (Kind.FLOAT, "1e-3", 1e-3),
        (Kind.STR, "cpu", "cpu"),
        (Kind.PATH, "/a/b", Path("/a/b")),
        (Kind.FLOATS, "1.0", (1.0,)),
        (Kind.FLOATS, "1, 0.5,2", (1.0, 0.5, 2.0)),
        (Kind.ID_RANGES, "5,10-12", ((5, 5), (10, 12))),
    ],
)
def test_text_is_parsed_by_its_kind(kind, text, value):
    found = parse_text(kind, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.BOOL, "no"),
        (Kind.BOOL, "2"),
        (Kind.INT, "1.5"),
        (Kind.INT, "many"),
        (Kind.INT, ""),
        (Kind.FLOAT, "nan"),
        (Kind.FLOAT, "inf"),
        (Kind.FLOATS, "1,,2"),
        (Kind.ID_RANGES, "5-"),
        (Kind.ID_RANGES, "-5"),
        (Kind.ID_RANGES, "12-10"),
        (Kind.ID_RANGES, "a"),
    ],
)
def test_text_that_does_not_fit_is_explained(kind, text):
    with pytest.raises(ValueError, match=r"has to be|ends before"):
        parse_text(kind, text)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Kind.INT, 3, 3),
        (Kind.INT, "3", 3),
        (Kind.FLOAT, 1, 1.0),
        (Kind.BOOL, True, True),
        (Kind.PATH, Path("x"), Path("x")),
        (Kind.ID_RANGES, [5, (10, 12)], ((5, 5), (10, 12))),
        (Kind.ID_RANGES, (), ()),
    ],
)
def test_program_values_pass_in_their_own_type(kind, value, expected):
    assert check_value(kind, value) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.INT, True),
        (Kind.INT, 1.0),
        (Kind.FLOAT, float("nan")),
        (Kind.FLOAT, True),
        (Kind.BOOL, 1),
        (Kind.STR, 3),
        (Kind.PATH, 3),
        (Kind.ID_RANGES, [(3, 1)]),
        (Kind.ID_RANGES, [-1]),
        (Kind.ID_RANGES, [("1", 2)]),
    ],
)
def test_program_values_of_another_type_are_refused(kind, value):
    with pytest.raises(ValueError, match="has to be"):
        check_value(kind, value)


def test_nearest_name_is_found_only_when_it_is_near():
    names = ["max_num_seqs", "max_model_len", "seed"]
    assert nearest("max_num_seq", names) == "max_num_seqs"
    assert nearest("sead", names) == "seed"
    assert nearest("xyzzy", names) is None
