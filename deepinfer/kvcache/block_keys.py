"""Keys of cached blocks: a rolling hash over everything that the content of a block depends on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import blake2b

from deepinfer.kvcache.block_pool import BLOCK_TOKENS

BlockKey = bytes
HashFunction = Callable[[bytes], BlockKey]

_KEY_BYTES = 16
_REPLAYED = b"computed after a bounded replay"


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Positions whose content is not told by their token ids: an image, delimiters included."""

    start: int
    end: int
    digest: bytes
    """Hash of the content as the model gets it (pixels after resizing), at full length."""


def hash_bytes(data: bytes) -> BlockKey:
    """The default hash: 128 bits, so that a collision is unlikely; a collision is a miss, never a wrong hit."""
    return blake2b(data, digest_size=_KEY_BYTES).digest()


def root_key(*parts: str) -> BlockKey:
    """Parent of all first blocks. What makes contents differ for equal tokens goes in here.

    Args:
        parts: numerics mode, truncation mode, tenant salt, ...; their order and their borders count.
    """
    return hash_bytes(b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts))


class TokenChain:
    """Keys of the full blocks of one sequence, extended as it grows.

    The key of a block is the hash of its parent's key and its own content, so it stands for all tokens up to the end of
    the block. A chain can turn at some block into a *replayed* one: blocks computed after a bounded replay are not
    those of a cold run, and must not be found by who wants exact results.

    Args:
        root: from :func:`root_key`.
        media: images of the sequence, in order.
        hasher: replaced in tests of collisions.
    """

    def __init__(
        self,
        root: BlockKey,
        block_tokens: int = BLOCK_TOKENS,
        media: Items[MediaSpan] = (),
        hasher: HashFunction = hash_bytes,
    ) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.replayed_from: int | None = None
        """Number of the first block whose content is not that of a cold run; None: all are."""
        self._media = tuple(media)
        self._hash = hasher
        self._contents: list[bytes] = []
        self._keys: list[BlockKey] = []

    def __len__(self) -> int:
        """Full blocks that have a key."""
        return len(self._keys)

    def extend(self, token_ids: Items[int]) -> None:
        """Make keys for all full blocks of ``token_ids``, which begin with the tokens given before."""
        for index in range(len(self._keys), len(token_ids) // self.block_tokens):
            begin = index * self.block_tokens
            ids = array("q", token_ids[begin : begin + self.block_tokens]).tobytes()
            self._contents.append(ids + self._media_of(begin, begin + self.block_tokens))
            self._keys.append(self._key(index))

    def key(self, index: int) -> BlockKey:
        """Key of block ``index``."""
        return self._keys[index]

    def content(self, index: int) -> bytes:
        """Ids and image hashes of block ``index``, to be compared on a hit."""
        return self._contents[index]

    def replayed_key(self, index: int) -> BlockKey:
        """The key that block ``index`` would have if the replayed part began there."""
        assert self.replayed_from is None, "the chain has turned already"
        return self._hash(self._parent(index) + _REPLAYED + self._contents[index])

    def turn(self, index: int | None) -> None:
        """Let the replayed part begin at block ``index``, or nowhere."""
        if index == self.replayed_from:
            return
        first = min(at for at in (index, self.replayed_from) if at is not None)
        self.replayed_from = index
        del self._keys[first:]
        for each in range(first, len(self._contents)):
            self._keys.append(self._key(each))

    def _key(self, index: int) -> BlockKey:
        mark = _REPLAYED if index == self.replayed_from else b""
        return self._hash(self._parent(index) + mark + self._contents[index])

    def _parent(self, index: int) -> BlockKey:
        return self._keys[index - 1] if index else self.root

    def _media_of(self, begin: int, end: int) -> bytes:
        """Images that reach into ``[begin, end)``: where they lie relative to the block, and their hashes."""
        parts: Iterable[bytes] = (
            (span.start - begin).to_bytes(8, "little", signed=True)
            + (span.end - begin).to_bytes(8, "little", signed=True)
            + len(span.digest).to_bytes(8, "little")
            + span.digest
            for span in self._media
            if span.start < end and begin < span.end
        )
        return b"".join(parts)
