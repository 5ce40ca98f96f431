"""Generated text on a terminal."""

from __future__ import annotations

import sys

_SHOWN = str.maketrans(
    {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
)


def write(text: str) -> None:
    """Print a piece of generated text at once. A terminal gets no control characters: a model must not steer it."""
    print(text.translate(_SHOWN) if sys.stdout.isatty() else text, end="", flush=True)
