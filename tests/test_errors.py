"""Errors read as sentences, whatever the three parts end with."""

from __future__ import annotations

import pytest

from deepinfer.errors import EngineError


@pytest.mark.parametrize(
    ("why", "fix", "text"),
    [
        ("it is too long", "cut it", "x: it is too long. Cut it."),
        ("it is too long; cut it.", "/reset", "x: it is too long; cut it. /reset."),
        ("is it?", "did you mean y?", "x: is it? Did you mean y?"),
    ],
)
def test_every_sentence_ends_once(why, fix, text):
    assert str(EngineError("x", why=why, fix=fix)) == text
