"""Configurations of the dense kernels worth a measurement, by shape and number of rows.

Few rows: what earlier searches over rings and over registers left. ``wgmma``: all that fit, ranked by a rough model of
what bounds a CTA (tensor cores, L2, decoding, memory), since there are thousands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.kernels.dense import plans
from deepinfer.kernels.dense.skinny_cuda import Geometry, Pipeline, SkinnyProduct
from deepinfer.kernels.dense.wgmma_cuda import Tile, WgmmaProduct

Shape = tuple[int, int, int]
"""Rows, columns and groups of a weight."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel: of the few-row family with ``geometry``, else ``wgmma``."""

    family: str
    geometry: Geometry | None = None
    pipeline: Pipeline | None = None
    slices: int = 1
    tile: Tile | None = None
    partial: bool = False
    """The sums of the slices stay apart, float32 ``[slices, rows, N]``."""

    def product(self, packed: tuple, shape: Shape) -> SkinnyProduct | WgmmaProduct:
        n, k, groups = shape
        if self.tile is not None:
            return WgmmaProduct(*packed, (n, k), groups, self.slices, (self.tile,), self.partial)
        assert self.pipeline is not None
        return SkinnyProduct(*packed, (n, k), groups, self.geometry, (self.pipeline,))

    def job(self, shape: Shape) -> tuple[str, dict[str, int]]:
        """The source and its constants for plain bf16 output, or for sums left apart."""
        n, k, _ = shape
        packed = torch.empty(-(-n // 32), -(-k // 64), 1)
        product = self.product((packed, packed), shape)
        if isinstance(product, WgmmaProduct):
            assert self.tile is not None
            return "dense_wgmma", product.defines(self.tile, self.partial, False)
        assert self.pipeline is not None
        return "dense_skinny", product.defines(self.pipeline, False, False)

    def __str__(self) -> str:
        if (t := self.tile) is not None:
            shown = f"{self.slices}, T({t.rows},{t.warpgroups},{t.fragments},{t.stages},{t.min_ctas})"
            return shown + " apart" if self.partial else shown
        g, p = self.geometry, self.pipeline
        assert p is not None
        shown = f"G({g.row_warps},{g.k_warps},{g.cluster})" if g is not None else "G by shape"
        flags = ("ring" if p.ring else "registers") + (" early" if p.early else "")
        return f"{shown} P({p.row_tiles},{p.depth},{p.min_ctas}) {flags}"


# shape -> (row warps, k warps, cluster), depths of the ring for up to 8, 16 and 32 rows, CTAs per SM
_RINGS = {
    "wq_a+wkv": [((4, 2, 8), (3, 3, 3), 1), ((4, 2, 8), (5, 5, 3), 1), ((4, 1, 8), (10, 10, 7), 1)],
    "wq_b": [((8, 2, 1), (4, 4, 2), 1), ((8, 2, 1), (2, 3, 2), 1), ((16, 1, 2), (4, 3, 2), 1), ((4, 2, 1), (4, 4), 2)],
    "wq_b+index": [((9, 2, 1), (2, 2, 2), 1), ((9, 2, 1), (4, 4, 2), 1), ((9, 2, 2), (2, 2), 2)],
    "wo_a": [((4, 3, 2), (4, 4, 2), 1), ((4, 4, 2), (3, 3), 1), ((2, 8, 1), (3, 3), 1), ((4, 2, 2), (3, 3, 3), 1)],
    "wo_b": [((11, 1, 8), (4, 4, 4), 1), ((11, 1, 8), (6, 6, 2), 1), ((5, 1, 8), (4, 4), 2)],
    "gate_up": [((5, 3, 4), (3, 2, 2), 1), ((10, 2, 8), (2, 2, 2), 1), ((10, 1, 8), (2, 2, 2), 1)],
    "main_proj": [((11, 1, 8), (4, 4, 2), 1), ((10, 1, 8), (3, 3, 2), 1)],
    "engram": [((13, 1, 2), (4, 3), 1), ((7, 2, 1), (4, 2), 1)],
    "down": [((3, 2, 4), (2, 2, 2), 2), ((5, 2, 4), (4, 2, 2), 1), ((3, 4, 4), (2, 2), 2), ((5, 1, 8), (4, 4, 2), 2)],
}  # fmt: skip
# shape -> geometry, depth and CTAs per SM with the weights in flight in registers
_REGISTERS = {
    "wq_a+wkv": ((1, 2, 8), 2, 10),
    "wq_b": ((2, 2, 1), 2, 5),
    "wq_b+index": ((1, 4, 1), 2, 5),
    "wo_a": ((2, 4, 2), 2, 2),
    "wo_b": ((4, 1, 8), 3, 4),
    "gate_up": ((4, 1, 8), 3, 4),
    "down": ((1, 4, 2), 2, 5),
    "main_proj": ((2, 2, 8), 4, 4),
    "engram": ((2, 2, 4), 4, 4),
}


def few(name: str, rows: int) -> list[Candidate]:
    """Rings, and up to 16 rows the variant with registers."""
    row_tiles = -(-rows // 8)
    found = []
    for geometry, depths, ctas in _RINGS[name]:
        place = 0 if rows <= 8 else 1 if rows <= 16 else 2
        if place < len(depths):
            pipeline = Pipeline(row_tiles, depths[place], ctas, ring=True, early=True)
            found.append(Candidate("ring", Geometry(*geometry), pipeline))
    if rows <= 16:
        geometry, depth, ctas = _REGISTERS[name]
        for early in (False, True):
            pipeline = Pipeline(row_tiles, depth, ctas if row_tiles == 1 else max(1, ctas * 3 // 4), early=early)
            found.append(Candidate("registers", Geometry(*geometry), pipeline))
    return found


_WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384)
# (warpgroups, fragments) -> most activation rows that their registers hold
_SHAPES = {(2, 1): 384, (3, 1): 128, (4, 1): 128, (5, 1): 64, (2, 2): 128}
_SM_SHARED_BYTES = 227 * 1024
_SM_GROUPS = (18, 18, 18, 16, 16, 16, 16, 14)


# shapes whose output the hyper-connection takes in parts, and the most slices that it should read
_READ_IN_PARTS = {(5120, 8192, 1)}
_MAX_PARTS = 4


def apart(shape: Shape, rows: int, count: int) -> list[Candidate]:
    """The ``count`` that the model likes best of those that leave sums apart."""
    if shape not in _READ_IN_PARTS or rows < 32:
        return []
    return _ranked(shape, rows, True, _MAX_PARTS)[:count]


def many(shape: Shape, rows: int, count: int) -> list[Candidate]:
    """The ``count`` that the model likes best; among them two for which :func:`is_pair`."""
    ranked = _ranked(shape, rows, False, 8)
    plain = [candidate for candidate in ranked if is_pair(candidate)]
    kept: list[Candidate] = []
    seen: dict[tuple, int] = {}
    for candidate in ranked:  # few with the same shape: the model knows the differences within one least
        t = candidate.tile
        assert t is not None
        kind = t.rows, t.warpgroups, t.fragments
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2 and len(kept) < count - 2:
            kept.append(candidate)
    return kept + [c for c in plain if c not in kept][:2]


def _ranked(shape: Shape, rows: int, partial: bool, most_slices: int) -> list[Candidate]:
    found: dict[Candidate, float] = {}
    least = min(-(-rows // w) * w for w in _WIDTHS)
    for width in _WIDTHS:
        passes = -(-rows // width)
        if passes > 4 or passes * width > 1.34 * least:
            continue
        for (warpgroups, fragments), most in _SHAPES.items():
            if width <= most:
                for slices in range(1, most_slices + 1):
                    best = _best_ring(shape, rows, width, warpgroups, fragments, slices, partial)
                    if best is not None:
                        found[best[1]] = best[0]
    return sorted(found, key=lambda candidate: found[candidate])


def is_pair(candidate: Candidate) -> bool:
    """A ``wgmma`` kernel with two warpgroups: the simplest."""
    t = candidate.tile
    return t is not None and (t.warpgroups, t.fragments) == (2, 1)


def _best_ring(
    shape: Shape, rows: int, width: int, warpgroups: int, fragments: int, slices: int, partial: bool
) -> tuple[float, Candidate] | None:
    """The predicted time with the better of a ring for one CTA per SM and one for two."""
    n, k, groups = shape
    chunks = -(-k // 64)
    if chunks < 3 * slices:
        return None
    options = []
    packed = torch.empty(-(-n // 32), chunks, 1)
    for per_sm in (1, 2):
        if per_sm == 2 and ((warpgroups, fragments) != (2, 1) or width > 96):
            continue
        for stages in range(8, 2, -1):
            tile = Tile(width, warpgroups, fragments, stages, per_sm)
            candidate = Candidate("wgmma", slices=slices, tile=tile, partial=partial)
            product = WgmmaProduct(packed, packed, (n, k), groups, slices, (tile,), partial)
            room = _SM_SHARED_BYTES // 2 if width <= 64 or per_sm == 2 else _SM_SHARED_BYTES - 16 * 1024
            if product.tiles and product.shared_bytes(tile) + 1024 <= room:
                options.append((_predict(shape, rows, candidate), candidate))
                break
    return min(options, key=lambda option: option[0]) if options else None


def _predict(shape: Shape, rows: int, candidate: Candidate) -> float:
    """Clocks, roughly."""
    n, k, _ = shape
    tile, slices = candidate.tile, candidate.slices
    assert tile is not None
    chunks, width, cluster = -(-k // 64), tile.rows, 1 if candidate.partial else slices
    ctas = -(-n // tile.weight_rows) * slices * -(-rows // width)
    clusters, most = ctas // cluster, _most_ctas(slices, tile, chunks)
    together = next((p for p in range(1, most) if clusters <= clusters_at_once(cluster, p)), most)
    waves = -(-clusters // max(1, clusters_at_once(cluster, together)))
    tensor = tile.weight_rows * width / 32
    l2 = (tile.weight_rows * 64 + width * 128) / 28
    alone = 220 * tile.fragments if tile.warpgroups < 4 else 180 + 2 * width
    ending = 2500 + width * tile.weight_rows / 16 + (1000 + width * tile.weight_rows / 16 if cluster > 1 else 0)
    per_cta = chunks / slices * max(together * max(tensor, l2), alone) + together * ending
    return max(waves * per_cta, n * k / 2500 + ending)


def clusters_at_once(cluster: int, per_sm: int) -> int:
    """A cluster stays within one group of SMs; the size of the groups is inferred from times."""
    return sum(sms * per_sm // cluster for sms in _SM_GROUPS)


def _most_ctas(slices: int, tile: Tile, chunks: int) -> int:
    """CTAs that fit one SM by registers (estimated) and shared memory."""
    registers = 168 if tile.is_register_bound else 64 + tile.rows // 2 * tile.fragments
    warps = tile.threads // 32
    packed = torch.empty(1, chunks, 1)
    shared = WgmmaProduct(packed, packed, (32, 64 * chunks), 1, slices).shared_bytes(tile) + 2048
    fits = [p for p in (1, 2, 3) if -(-warps * p // 4) * registers * 32 <= 16384 and p * shared <= 228 * 1024]
    return max(fits, default=1)


def planned(shape: Shape, rows: int) -> Candidate | None:
    """What plans.py says."""
    step = next((s for s in plans.plan(*shape) if rows <= s.max_rows), None)
    if step is None:
        return None
    if isinstance(step, plans.Few):
        pipeline = next(p for p in step.pipelines if rows <= 8 * p.row_tiles)
        return Candidate("ring" if pipeline.ring else "registers", step.geometry, pipeline)
    n, k, groups = shape
    packed = torch.empty(-(-n // 32), -(-k // 64), 1)
    product = WgmmaProduct(packed, packed, (n, k), groups, step.slices, step.tiles, step.leaves_partial)
    return Candidate("wgmma", slices=product.slices, tile=product.tile(rows), partial=step.leaves_partial)
