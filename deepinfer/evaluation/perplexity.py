"""Perplexity of held-out text, from the log-probabilities of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.evaluation.subject import Subject
from deepinfer.sampling.params import SamplingParams

TEXTS = Path(__file__).parent / "texts"
"""Held-out texts that come with the package: novels, a bible, documentation of Python."""
WINDOW_TOKENS = 512
QUICK_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of text that was scored on its own, behind BOS."""

    text: str
    """Name of the text it comes from."""
    nats: float
    """Negative log-likelihood of its tokens."""
    num_tokens: int
    num_bytes: int
    """Of the scored tokens."""


def load_texts(folder: Path = TEXTS) -> dict[str, str]:
    """Held-out texts by name."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))}


def score_texts(
    subject: Subject,
    texts: dict[str, str],
    *,
    window_tokens: int = WINDOW_TOKENS,
    max_windows: int | None = None,
    batch: int = 16,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Window]:
    """Score every text in windows that do not overlap; what does not fill the last one is left out.

    Args:
        window_tokens: of one window, BOS included.
        max_windows: per text, from its beginning; None: all.
        on_done: called with the number of windows of each batch.
    """
    pieces = [
        (name, piece)
        for name, text in texts.items()
        for piece in split_windows(subject, text, window_tokens, max_windows)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True, logprobs_mode="raw")
    windows = []
    for begin in range(0, len(pieces), batch):
        part = pieces[begin : begin + batch]
        outputs = subject.generate(
            prompt_token_ids=[piece for _, piece in part], sampling_params=params, use_tqdm=False
        )
        for (name, piece), output in zip(part, outputs, strict=True):
            assert output.prompt_logprobs is not None, f"a window of {name} was not scored: {output.error}"
            scored = zip(piece[1:], output.prompt_logprobs[1:], strict=True)
            nats = -sum(entry[token].logprob for token, entry in scored if entry is not None)
            windows.append(Window(name, nats, len(piece) - 1, _num_bytes(subject, piece[1:])))
        on_done(len(part))
    return windows


def split_windows(subject: Subject, text: str, window_tokens: int, max_windows: int | None) -> list[list[int]]:
    """Ids of the windows of a text, each beginning with BOS."""
    tokenizer = subject.get_tokenizer()
    ids = tokenizer.encode(text, add_bos=False, parse_special=False)
    size = window_tokens - 1
    starts = range(0, len(ids) - size + 1, size)[:max_windows]
    return [[tokenizer.bos_token_id, *ids[start : start + size]] for start in starts]


def _num_bytes(subject: Subject, ids: Sequence[int]) -> int:
    tokenizer = subject.get_tokenizer()
    return sum(len(tokenizer.token_bytes(token)) for token in ids)


def perplexity(windows: Sequence[Window]) -> float:
    """Per token; NaN without windows."""
    num_tokens = sum(window.num_tokens for window in windows)
    return math.exp(sum(window.nats for window in windows) / num_tokens) if num_tokens else math.nan


def bits_per_byte(windows: Sequence[Window]) -> float:
    """Does not depend on how a tokenizer cuts the text; NaN without windows."""
    num_bytes = sum(window.num_bytes for window in windows)
    return sum(window.nats for window in windows) / (math.log(2) * num_bytes) if num_bytes else math.nan
