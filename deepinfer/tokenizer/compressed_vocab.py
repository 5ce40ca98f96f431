"""The compressed vocabulary of the n-gram memory: token ids that read alike share one id (spec 4.10 a)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as Backend

from deepinfer.config.model import TextConfig
from deepinfer.errors import CheckpointError
from deepinfer.tokenizer.byte_level import spellings
from deepinfer.tokenizer.tokenizer import Tokenizer

_ONE_SPACE = "\ue000"  # private-use stand-in, so that stripping does not empty the key of a single space


@dataclass(frozen=True, slots=True, eq=False)
class CompressedVocab:
    """Map from token id to compressed id."""

    token_map: np.ndarray
    """int32 ``[vocab]``, read-only; values in ``[0, size)``, numbered in order of first appearance."""
    size: int
    """Number of distinct compressed ids. Seeds the hash multipliers, so it has to be right (spec 4.10 c)."""

    @classmethod
    def identity(cls, vocab_size: int) -> CompressedVocab:
        """The map of a model that does not compress."""
        return cls(_read_only(np.arange(vocab_size, dtype=np.int32)), vocab_size)


def _read_only(token_map: np.ndarray) -> np.ndarray:
    token_map.setflags(write=False)
    return token_map


def _key_normalizer() -> normalizers.Normalizer:
    """N of spec 4.10 (a) step 3.

    Built from the tokenizer library's own steps: Python's ``str.lower`` treats a final sigma by context, ``str.strip``
    removes U+001C to U+001F and ``unicodedata`` is tied to the interpreter's Unicode version, and each of these could
    shift an id.
    """
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),  # every character of category Mn, Mc and Me
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"\A \z"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )


def build_compressed_vocab(backend: Backend) -> CompressedVocab:
    """Compress the vocabulary of a raw tokenizer backend.

    Every id of the backend takes part, added tokens included, special tokens decoded as text. About two seconds for
    129,280 ids.

    Args:
        backend: the tokenizer as stored in ``tokenizer.json``. Tokens that an engine adds (image span ids) must not be
            in it: they would enter the map and change every hash.
    Source: spec 4.10 (a); checked against Appendix A.3.
    """
    num_ids = backend.get_vocab_size(with_added_tokens=True)
    texts = backend.decode_batch([[token_id] for token_id in range(num_ids)], skip_special_tokens=False)
    normalize = _key_normalizer().normalize_str
    compressed_id: dict[str, int] = {}
    token_map = np.empty(num_ids, dtype=np.int32)
    for token_id, (text, spelling) in enumerate(zip(texts, spellings(backend, num_ids), strict=True)):
        if "\ufffd" in text and spelling is not None:
            key = spelling  # part of a character: its bytes have no text to normalise
        else:
            key = normalize(text) or text
        token_map[token_id] = compressed_id.setdefault(key, len(compressed_id))
    return CompressedVocab(_read_only(token_map), len(compressed_id))


def load_compressed_vocab(tokenizer: Tokenizer, text: TextConfig) -> CompressedVocab:
    """The map that the model of ``text`` was trained with: built and checked, or the identity.

    Raises:
        CheckpointError: the tokenizer does not give ``engram_compressed_vocab_size`` ids over ``vocab_size`` tokens.
    """
    expected = text.engram_compressed_vocab_size
    if not expected:
        return CompressedVocab.identity(text.vocab_size)
    built = build_compressed_vocab(tokenizer.backend)
    if len(built.token_map) != text.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {len(built.token_map)} tokens",
            why=f"the n-gram memory needs a compressed id for each of the {text.vocab_size} embedding rows",
            fix="use the tokenizer.json that belongs to this checkpoint",
        )
    if built.size != expected:
        raise CheckpointError(
            f"the tokenizer compresses to {built.size} ids",
            why=f"text_config.engram_compressed_vocab_size is {expected}, and another size gives another hash",
            fix="use the tokenizer.json that belongs to this checkpoint",
        )
    return built
