"""Shared by the tests of structured output: a byte-level vocabulary, grammars compiled here, and random walks."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from tokenizers import Tokenizer as Backend

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.checkpoint.tiny_tokenizer import build_tiny_tokenizer
from deepinfer.structured import native
from deepinfer.structured.grammar_cache import CompiledGrammar
from deepinfer.structured.grammar_text import GrammarKey, grammar_text
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.structured.spec import StructuredSpec
from deepinfer.structured.vocabulary import Vocabulary
from deepinfer.tokenizer.tokenizer import Tokenizer

EXTRA_IDS = 7
"""Ids of the model that the tokenizer has no tokens for."""
_CLOSING = b'"}]0'


@cache
def tiny_tokenizer() -> Tokenizer:
    config = tiny_config()
    return Tokenizer(
        Backend.from_str(build_tiny_tokenizer(config)),
        vocab_size=config.text.vocab_size + EXTRA_IDS,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        image_token_id=config.image_token_id,
    )


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of(tiny_tokenizer())


@cache
def byte_ids() -> dict[int, int]:
    """The token of each single byte."""
    return {entry[0]: index for index, entry in enumerate(vocabulary().token_bytes) if len(entry) == 1}


def compile_key(key: GrammarKey) -> CompiledGrammar:
    """Compile in this process; for grammars that are known to be harmless."""
    text, root = grammar_text(key)
    handle = native.compile_ebnf(vocabulary().info, text, root, 1)
    return CompiledGrammar(key, handle, int(handle.memory_size_bytes()))


def matcher_for(spec: StructuredSpec, **options: object) -> GrammarMatcher:
    return GrammarMatcher(compile_key(spec.grammar_key), vocabulary(), **options)


def accepts(matcher: GrammarMatcher, text: str) -> bool:
    """Whether a text is in the language. The matcher is left at its start."""
    matcher.replay(())
    num_bytes = len(text.encode())
    fits = matcher.replay([byte_ids()[byte] for byte in text.encode()]) == num_bytes and matcher.can_end
    matcher.replay(())
    return fits


def allowed_ids(matcher: GrammarMatcher) -> list[int] | None:
    """Ids that may come next; None for all."""
    row = np.full(vocabulary().num_words, 0x5A5A5A5A, dtype=np.int32)
    if not matcher.fill_mask(row):
        return None
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def pick(allowed: list[int], rng: random.Random, hurry: bool, closing_bytes: bytes = _CLOSING) -> int:
    """A random allowed token; in a hurry one that brings the end nearer: EOS or ``closing_bytes``."""
    eos = vocabulary().eos_id
    if hurry:
        if eos in allowed:
            return eos
        closing = [byte_ids()[byte] for byte in closing_bytes if byte_ids()[byte] in allowed]
        if closing and rng.random() < 0.9:
            return rng.choice(closing)
    # Uniform over tokens would be mostly letters: give marks and digits, of which structure is made, a fair share.
    if rng.random() < 0.4:
        marks = [index for index in allowed if not vocabulary().token_bytes[index].isalpha()]
        allowed = marks or allowed
    return rng.choice(allowed)


def random_walk(
    matcher: GrammarMatcher, rng: random.Random, hurry_after: int = 40, closing: bytes = _CLOSING, limit: int = 600
) -> list[int] | None:
    """Tokens chosen at random among those allowed, up to EOS, which is the last of them; None after ``limit``."""
    ids: list[int] = []
    while not matcher.is_finished:
        if len(ids) == limit:
            return None
        allowed = allowed_ids(matcher)
        assert allowed, f"dead end after {ids}"
        token = pick(allowed, rng, len(ids) >= hurry_after, closing)
        assert matcher.accept(token), f"the mask allows {token}, the matcher does not"
        ids.append(token)
    return ids


def text_of(ids: list[int]) -> str:
    """The text of a walk. Fails where it is no UTF-8."""
    return b"".join(vocabulary().token_bytes[index] for index in ids).decode()
