"""What the model is run on: token ids, which of them belong to images, and the images' vectors (spec 8.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.errors import RequestError


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence from its first token on."""

    ids: Tensor
    """``[T]`` int64; any number at image positions when there are ``image_embeddings``."""
    image_mask: Tensor
    """``[T]`` booleans, true on every position of an image span, delimiters included."""
    image_embeddings: Tensor | None = None
    """``[image positions, d]`` in order; None: image positions take the embeddings of their ids."""

    @classmethod
    def checked(
        cls,
        text: TextConfig,
        token_ids: Sequence[int] | Tensor,
        image_mask: Sequence[bool] | Tensor | None,
        image_embeddings: Tensor | None,
    ) -> TokenSequence:
        """Raises RequestError where the three do not fit one another or the vocabulary."""
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        if ids.dim() != 1 or len(ids) == 0:
            raise RequestError("token_ids", token_ids, why="it has to be one non-empty sequence", fix="pass [T] ids")
        mask = torch.zeros(len(ids), dtype=torch.bool)
        if image_mask is not None:
            mask = torch.as_tensor(image_mask, dtype=torch.bool)
        if mask.shape != ids.shape:
            raise RequestError("image_mask", tuple(mask.shape), why=f"there are {len(ids)} tokens", fix="one per token")
        from_table = ids if image_embeddings is None else ids[~mask]
        outside = from_table[(from_table < 0) | (from_table >= text.vocab_size)]
        if len(outside):
            why = f"ids lie in [0, {text.vocab_size})"
            raise RequestError("token_ids", int(outside[0]), why=why, fix="check the tokenizer")
        wanted = (int(mask.sum()), text.hidden_size)
        if image_embeddings is not None and tuple(image_embeddings.shape) != wanted:
            given = tuple(image_embeddings.shape)
            raise RequestError("image_embeddings", given, why=f"image_mask asks for {wanted}", fix="one per position")
        return cls(ids, mask, image_embeddings)

    def __len__(self) -> int:
        return len(self.ids)

    def prefix(self, length: int) -> TokenSequence:
        """The first ``length`` tokens."""
        images = self.image_embeddings
        if images is not None:
            images = images[: int(self.image_mask[:length].sum())]
        return TokenSequence(self.ids[:length], self.image_mask[:length], images)

    def embed(self, table: Tensor) -> Tensor:
        """``[T, d]``: rows of the embedding table ``[vocab, d]``, image positions replaced."""
        if self.image_embeddings is None:
            return table[self.ids]
        embedded = table[self.ids.masked_fill(self.image_mask, 0)]
        return embedded.index_put((self.image_mask,), self.image_embeddings.to(table.dtype))
