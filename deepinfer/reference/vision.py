"""The vision tower and the aligner: patches of one image to vectors of its span (spec 8.3 to 8.5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import VisionConfig
from deepinfer.reference.building_blocks import linear, rms_norm
from deepinfer.reference.number_formats import bf16
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.roundings import Roundings

EPSILON = 1e-6
"""Of the norms in the tower; the text model's comes from the configuration."""


def rotate_2d(x: Tensor, grid: tuple[int, int], theta: float) -> Tensor:
    """Split-half rotation of ``[patches, heads, width]``: the first pairs turn by row, the others by column."""
    num_rows, num_columns = grid
    width = x.shape[-1]
    frequencies = theta ** (-2 * torch.arange(width // 4, dtype=torch.float64) / (width // 2))
    row = torch.arange(num_rows).repeat_interleave(num_columns)
    column = torch.arange(num_columns).repeat(num_rows)
    angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), 1)[
        :, None
    ]  # [patches, 1, width / 2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class VisionTower:
    """Everything between the pixels of one image and its vectors in the text model."""

    def __init__(self, config: VisionConfig, parameters: Parameters, roundings: Roundings) -> None:
        self._config = config
        self._parameters = parameters
        self._round = roundings.bf16_vision

    def _linear(self, x: Tensor, parameters: Parameters, *, bias: bool) -> Tensor:
        return bf16(linear(x, parameters["weight"], parameters["bias"] if bias else None), self._round)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPSILON, self._round)

    def patch_features(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """The ViT.

        Args:
            patches: ``[rows * columns, 3 * P * P]`` normalised pixels, channel first, row by row.
            grid: patch rows and columns.
        Returns:
            ``[rows * columns, vision width]``.
        """
        tower = self._parameters.scope("vision")
        projection = tower["patch_embed.proj.weight"].flatten(1)
        x = bf16(linear(patches.to(tower.dtype), projection, tower["patch_embed.proj.bias"]), self._round)
        for number in range(self._config.num_hidden_layers):
            block = tower.scope(f"blocks.{number}")
            attended = self._attention(self._norm(x, block["norm1.weight"]), grid, block.scope("attn"))
            x = bf16(x + attended, self._round)
            x = bf16(x + self._mlp(self._norm(x, block["norm2.weight"]), block.scope("mlp")), self._round)
        return self._norm(x, tower["norm.weight"])

    def _attention(self, x: Tensor, grid: tuple[int, int], parameters: Parameters) -> Tensor:
        """Every patch sees every patch of the image."""
        heads, theta = self._config.num_attention_heads, self._config.rope_theta
        joined = self._linear(x, parameters.scope("wqkv"), bias=True)
        query, key, value = joined.unflatten(1, (3, heads, -1)).unbind(1)  # each [patches, heads, width]
        query = bf16(rotate_2d(query, grid, theta), self._round)
        key = bf16(rotate_2d(key, grid, theta), self._round)
        logits = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        context = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1), value).flatten(1)
        return self._linear(bf16(context, self._round), parameters.scope("wo"), bias=True)

    def _mlp(self, x: Tensor, parameters: Parameters) -> Tensor:
        gate, up = self._linear(x, parameters.scope("w1"), bias=False).chunk(2, -1)
        return self._linear(bf16(F.silu(gate) * up, self._round), parameters.scope("w2"), bias=False)

    def image_vectors(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Aligner: one vector per cell of r x r patches, ``[cells, d]``, row by row. Arguments as the ViT's."""
        size, (num_rows, num_columns) = self._config.downsample_ratio, grid
        features = self.patch_features(patches, grid).unflatten(0, grid)
        padded = F.pad(features, (0, 0, 0, -num_columns % size, 0, -num_rows % size))
        cells = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [row, dy, column, dx, channel]
        cells = cells.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)  # channel-major inside a cell
        aligner = self._parameters.scope("aligner")
        hidden = bf16(F.gelu(self._linear(cells, aligner.scope("w1"), bias=True)), self._round)
        return self._linear(hidden, aligner.scope("w2"), bias=True)

    def span(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """The vectors of a whole image span: START, (IMAGE x columns, NEWLINE) x rows, END: ``[positions, d]``."""
        vectors = self.image_vectors(patches, grid)
        rows = vectors.unflatten(0, (-(-grid[0] // self._config.downsample_ratio), -1))
        newline = self._parameters["image_newline"].expand(len(rows), 1, -1)
        body = torch.cat((rows, newline), 1).flatten(0, 1)
        return torch.cat((self._parameters["image_start"][None], body, self._parameters["image_end"][None]))
