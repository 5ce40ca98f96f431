"""Index scores of long chunks on a GPU, wgmma against Triton: equal bits where sums are exact, then TFLOP/s.

    python bench/gpu/check_index_chunks.py [--json FILE] [--only check,times,geometries]

Times are medians of 5 replays of a CUDA graph, per launch; 2 * 32 * 128 operations per row and entry that it sees.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import check_index as common
from bench.gpu.check_index import CUDA, FLOPS, HEADS, PER_BLOCK, TOPK, WIDTH, guarded, report
from deepinfer.kernels.indexer import chunks_cuda
from deepinfer.kernels.indexer.chunks_cuda import Geometry
from deepinfer.kernels.indexer.scores import score_chunks
from deepinfer.kernels.indexer.selection import IndexView, index_full
from deepinfer.ops import index_select as reference
from deepinfer.ops.records import IndexKeyRecord, RecordStore
from deepinfer.ops.step_views import StreamView

UNWRITTEN = 77
GEOMETRIES = [
    Geometry(),
    Geometry(stages=3),
    Geometry(stages=5),
    Geometry(group_rows=256, piece_units=64),
    Geometry(group_rows=1024, piece_units=256),
    Geometry(piece_units=64),
    Geometry(piece_units=1 << 20),  # one piece for each CTA
    Geometry(columns=96, stages=5, group_rows=384),
    Geometry(columns=64, stages=8, piece_units=256),
    Geometry(columns=64, warpgroups=3, stages=8, piece_units=256),
]

# --- checks -----------------------------------------------------------------------------------------------------------

STEPS = {
    "one": [(77, 900)],
    "prompt": [(700, 700), (1, 3000), (130, 130)],
    "mixed": [(13, 5000), (1, 2100), (300, 1111), (6, 257), (6, 6), (2, 256), (45, 2049)],
    "long": [(515, 20011)],
}


def scored(step: tuple, function: Callable[..., None], min_scored: int = 0, **options: object) -> Tensor:
    """Order keys ``[rows, capacity]`` int16."""
    query, weights, keys, view, _ = step
    out = torch.full((len(query), view.capacity), UNWRITTEN, dtype=torch.int16, device=CUDA)
    operands = (query, weights, keys, view.block_table, view.row_sequence, view.num_visible, out, min_scored, PER_BLOCK)
    function(*operands, **options)
    return out


def expected_keys(query: Tensor, weights: Tensor, keys: Tensor, view: IndexView, stream: StreamView) -> Tensor:
    """Order keys of float64 sums rounded once."""
    store = RecordStore(IndexKeyRecord(WIDTH), keys)
    out = torch.full((len(query), view.capacity), UNWRITTEN, dtype=torch.int16, device=CUDA)
    for row, visible in enumerate(view.num_visible.tolist()):
        entries = torch.arange(visible, device=CUDA)[None]
        values = store.read(stream.entry_slots(entries, slice(row, row + 1)))
        scores = reference._scores(query[row, None, None], weights[row, None, None], values, True)[0, 0]
        bits = (scores + 0.0).bfloat16().view(torch.int16)
        out[row, :visible] = torch.where(bits < 0, bits ^ 0x7FFF, bits)
    return out


def check(name: str) -> None:
    exact = common.small_step(STEPS[name], True, padding=5)
    expected = expected_keys(*exact)
    report(f"{name}: bits of exact sums", torch.equal(scored(exact, chunks_cuda.score_chunks), expected))
    expected[exact[3].num_visible <= TOPK] = UNWRITTEN
    report(f"{name}: rows left out", torch.equal(scored(exact, chunks_cuda.score_chunks, TOPK), expected))

    step = common.small_step(STEPS[name], False, padding=5)
    keys = scored(step, chunks_cuda.score_chunks)
    expected = expected_keys(*step)
    written = expected != UNWRITTEN
    difference = (keys.int() - expected.int()).abs()
    share, larger = ((difference > limit).sum().item() / written.sum().item() for limit in (0, 1))
    report(f"{name}: random", share < 0.02 and larger < 0.005, f"share one step off {share:.1e}, more {larger:.1e}")
    for ctas in (1, 31, 500):
        guarded(f"{ctas} CTAs", lambda c=ctas: same(f"{name}: {c} CTAs", step, keys, num_ctas=c))
    for geometry in GEOMETRIES:
        guarded(f"{geometry}", lambda g=geometry: same(f"{name}: {astuple(g)}", step, keys, geometry=g))
    rows = range(0, len(step[0]), 37)
    alone = [scored(row_of(step, row), chunks_cuda.score_chunks)[0] for row in rows]
    report(f"{name}: rows alone", all(torch.equal(one, keys[row]) for one, row in zip(alone, rows, strict=True)))


def same(name: str, step: tuple, expected: Tensor, **options: object) -> None:
    got = [scored(step, chunks_cuda.score_chunks, **options) for _ in range(3)]
    report(name, all(torch.equal(each, expected) for each in got))


def row_of(step: tuple, row: int) -> tuple:
    query, weights, keys, view, stream = step
    one = slice(row, row + 1)
    shown = IndexView(view.block_table, view.row_sequence[one], view.num_visible[one], PER_BLOCK)
    return query[one], weights[one], keys, shown, stream


# --- times ------------------------------------------------------------------------------------------------------------

CASES = [(8192, 2048), (8192, 4096), (8192, 8192), (8192, 32768), (4096, 32768), (384, 8192), (64, 32768)]


class Chunk:
    """Rows of one sequence whose last sees ``context`` entries; with fewer entries than rows those of a ratio."""

    def __init__(self, keys: Tensor, rows: int, context: int) -> None:
        self.name = f"rows {rows} ctx {context}"
        self.query, self.weights = common.random_queries(rows)
        self.keys, self.table, self.context = keys, next(common.tables_for(1, context, 1)), context
        self.sequence = torch.zeros(rows, device=CUDA, dtype=torch.int32)
        ratio = max(1, rows // context)
        self.visible = ((torch.arange(rows, device=CUDA) + (context * ratio - rows) + 1) // ratio).int()
        self.scored = int(self.visible[self.visible > TOPK].long().sum())
        self.out = torch.empty((rows, context), dtype=torch.int16, device=CUDA)

    def launch(self, function: Callable[..., None], **options: object) -> None:
        operands = (self.query, self.weights, self.keys, self.table, self.sequence, self.visible, self.out)
        function(*operands, TOPK, PER_BLOCK, self.context, **options)

    def time(self, label: str, launch: Callable[[], None]) -> None:
        us = common.timed([launch] * 2)
        flops = 2.0 * HEADS * WIDTH * self.scored
        tflops = flops / us * 1e-6
        print(f"{self.name:24s} {label:36s} {us:9.1f} us {tflops:6.0f} TFLOP/s", flush=True)
        common.results.append(
            {"case": f"{self.name} [{label}]", "us": us, "floor_us": flops / FLOPS * 1e6, "tflops": tflops}
        )

    def times(self, geometries: list[Geometry], triton: bool) -> None:
        for geometry in geometries:
            label = f"wgmma {'/'.join(map(str, astuple(geometry)))}"
            launch = partial(self.launch, chunks_cuda.score_chunks, geometry=geometry)
            guarded(f"{self.name} {label}", lambda n=label, f=launch: self.time(n, f))
        if triton:
            guarded(f"{self.name} triton", lambda: self.time("triton", partial(self.launch, score_chunks)))
            view = IndexView(self.table, self.sequence, self.visible, PER_BLOCK, self.context, (0, len(self.query)))
            whole = partial(index_full, self.query, self.weights, self.keys, view, TOPK)
            guarded(f"{self.name} index_full", lambda: self.time("index_full (scores, select)", whole))

    def compare(self) -> None:
        """All scores of a large launch against Triton's."""
        found = []
        for function in (chunks_cuda.score_chunks, score_chunks):
            self.out.fill_(UNWRITTEN)
            self.launch(function)
            found.append(self.out.int())
        difference = (found[0] - found[1]).abs()
        share, larger = ((difference > limit).sum().item() / self.scored for limit in (0, 1))
        report(f"{self.name}: against triton", share < 0.01 and larger < 2e-3, f"share {share:.1e}, more {larger:.1e}")


PARTS = ("check", "times", "geometries")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    args = parser.parse_args()
    parts = set(args.only.split(","))
    if "check" in parts:
        for name in STEPS:
            guarded(name, lambda n=name: check(n))
    if parts & {"times", "geometries"}:
        keys = common.random_keys(common.POOL_ENTRIES)
        for rows, context in CASES:
            chunk = Chunk(keys, rows, context)
            if "check" in parts and context <= 8192:
                guarded(chunk.name, chunk.compare)
            searches = "geometries" in parts and rows == 8192 and context in (2048, 8192, 32768)
            chunk.times(GEOMETRIES if searches else GEOMETRIES[:1], "times" in parts)
    failed = [each["case"] for each in common.results if each.get("error") or each.get("pass") is False]
    print(f"{len(common.results)} results, {len(failed)} failed: {failed}")
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "results": common.results}, indent=1))


if __name__ == "__main__":
    main()
