"""Layout in which the routed experts' kernels read FP4 weights: tiles of 64 rows and 64 columns, by tensor-core lane.

A tile is 2,176 bytes: 4 pieces of 512 bytes of codes, then 128 bytes of scales. Piece ``m`` belongs to the 16 rows
``16 m ..``; lane ``4 g + t`` finds there, in 16 bytes, a pair of words for each half ``h`` of the columns: u for row g,
v for row g + 8. They hold 8 codes each, of the columns ``32 h + 8 t ..``: so a lane's activations are 16 neighbouring
bytes, and the columns of a 16-column step of the tensor cores are these in another order (both operands are renamed
alike):

    step s = 0, 1 of the half, operand columns 2t, 2t + 1, 2t + 8, 2t + 9  <->  columns 32 h + 8 t + 4 s + 0, 1, 2, 3

Codes ``2 j`` and ``2 j + 1`` of a row become one register of two bf16. With a code's bits s e e m at bits 15, 8, 7, 6
of its half, that is a bf16 of 2**-126 times the code (subnormal codes too), and a product with 2**126 times the scale
is exact. The bits lie where few operations find them; rotations are those of the whole word, ``rest`` has bits 3, 4,
10, 11 of both halves of u, the others from v shifted left by 2:

    j = 0: in place   j = 1: rotated left by 6   j = 2: shifted right by 6
    j = 3 of u: ``rest`` rotated left by 4       j = 3 of v: ``rest`` shifted right by 2

Scales: 16 bytes for each ``g``; byte ``4 m + 2 h + r`` is the exponent field of 2**126 times the scale of row
``16 m + 8 r + g``, half ``h``: the ue8m0 byte plus 126.

Tiles of an expert follow each other down the rows, then along the columns: warps and CTAs that work on neighbouring
rows read neighbouring memory at the same time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

TILE = 64
"""Rows and columns of a tile."""
CODE_BYTES, SCALE_BYTES = 2048, 128
TILE_BYTES = CODE_BYTES + SCALE_BYTES
MAX_SCALE_BYTE = 128
"""Largest ue8m0 byte whose scale times 2**126 is a finite bf16."""
_BITS = 15, 8, 7, 6
"""Of a code in its half of a register."""
_KEPT = 0x0C180C18
"""Bits of ``rest`` that come from u."""


def _places() -> list[tuple[int, int, int, int, int]]:
    """(row half r, j, bit of the byte with the two codes, word 0 = u or 1 = v, its bit) for every stored bit."""
    found = []
    for r in range(2):
        for j in range(4):
            for code in range(2):
                for bit, place in enumerate(_BITS):
                    place += 16 * code
                    word, at = r, place
                    if j == 1:
                        at = (place + 6) % 32
                    elif j == 2:
                        at = place - 6
                    elif j == 3:
                        at = (place + 4) % 32 if r == 0 else place - 2
                        word = 0 if _KEPT >> at & 1 else 1
                        at -= 2 * word
                    found.append((r, j, 3 - bit + 4 * code, word, at))
    return found


def accepts(n: int, k: int, device: torch.device) -> bool:
    """Whether the kernels take matrices of this shape there: whole tiles, in pairs along the columns."""
    return n % TILE == 0 and k % (2 * TILE) == 0 and nvrtc.is_available(device)


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Matrices as the checkpoint stores them to tiles.

    Args:
        codes: uint8 ``[..., N, K / 2]``, the even column in the low nibble.
        scales: uint8 ``[..., N, K / 32]``, ue8m0, none above ``MAX_SCALE_BYTE``.
    Returns:
        uint8 ``[..., K / 64, N / 64, 2176]``
    """
    *lead, n, half = codes.shape
    rows, columns = n // TILE, 2 * half // TILE
    # Bytes of [tile row, m, r, g, tile column, h, t, j]: a byte has the two codes of one register.
    pairs = codes.reshape(-1, rows, 4, 2, 8, columns, 2, 4, 4).to(torch.int32)
    words = torch.zeros_like(pairs[..., 0])  # r: u or v
    for r, j, bit, word, place in _places():
        words[:, :, :, word] |= (pairs[:, :, :, r, ..., j] >> bit & 1) << place
    # to [tile column, tile row, m, g, t, h, r]
    ordered = words.permute(0, 5, 1, 2, 4, 7, 6, 3).contiguous()
    fields = scales.reshape(-1, rows, 4, 2, 8, columns, 2) + 126  # [tile row, m, r, g, tile column, h]
    packed = torch.empty(len(ordered), columns, rows, TILE_BYTES, dtype=torch.uint8, device=codes.device)
    packed[..., :CODE_BYTES] = ordered.view(torch.uint8).reshape(-1, columns, rows, CODE_BYTES)
    packed[..., CODE_BYTES:] = fields.permute(0, 5, 1, 4, 2, 6, 3).reshape(-1, columns, rows, SCALE_BYTES)
    return packed.view(*lead, columns, rows, TILE_BYTES)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`pack`: codes and scales."""
    *lead, columns, rows, _ = packed.shape
    tiles = packed.reshape(-1, columns, rows, TILE_BYTES)
    words = tiles[..., :CODE_BYTES].contiguous().view(torch.int32).view(-1, columns, rows, 4, 8, 4, 2, 2)
    words = words.permute(0, 2, 3, 7, 4, 1, 6, 5)  # [tile row, m, r, g, tile column, h, t]
    pairs = torch.zeros(*words.shape, 4, dtype=torch.int32, device=packed.device)
    for r, j, bit, word, place in _places():
        pairs[:, :, :, r, ..., j] |= (words[:, :, :, word] >> place & 1) << bit
    codes = pairs.to(torch.uint8).reshape(*lead, rows * TILE, columns * TILE // 2)
    fields = tiles[..., CODE_BYTES:].reshape(-1, columns, rows, 8, 4, 2, 2).permute(0, 2, 4, 6, 3, 1, 5)
    return codes, (fields - 126).reshape(*lead, rows * TILE, columns * TILE // 32)


def pair_gate_and_up(rows: Tensor) -> Tensor:
    """Rows ``[..., 2 * width, x]``, gate rows first, to the order in which gate and up of a column meet in one lane.

    Row ``64 i + 16 m + 8 r + g`` of the result is column ``32 i + 8 m + g`` of gate (``r`` = 0) or up (1): a tile has
    the 32 columns that share a scale of the activation behind it.
    """
    *lead, double, size = rows.shape
    return rows.view(*lead, 2, double // 64, 4, 8, size).movedim(-5, -3).reshape(*lead, double, size)


def pack_expert(codes: Tensor, scales: Tensor, packed: Tensor, *, is_paired: bool) -> None:
    """Fill ``packed`` with one expert's matrix in one launch.

    Args:
        codes, scales: ``[N, K / 2]`` and ``[N, K / 32]`` as for :func:`pack`, contiguous; no part of ``packed``.
        packed: uint8 ``[K / 64, N / 64, 2176]``, contiguous.
        is_paired: the rows are gate, then up, and go into the order of :func:`pair_gate_and_up`.
    """
    if not nvrtc.is_available(codes.device):
        order = pair_gate_and_up if is_paired else lambda rows: rows
        packed.copy_(pack(order(codes), order(scales)))
        return
    (n, half), threads = codes.shape, 256
    kernel = nvrtc.load_kernel("moe_pack.cu", "moe_pack", {}, codes.device)
    grid = -(-n // 16 * 2 * half // threads), 1, 1
    kernel.launch(grid, threads, (codes, scales, packed, n, 2 * half, int(is_paired)))
