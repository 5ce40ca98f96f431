"""Compressor and indexer on a GPU: equality with the references, then times over floor and a search over geometries.

    python bench/gpu/check_index.py [--json FILE] [--only check,decode,candidates,prefill,publish]

Times are medians of 5 replays of a CUDA graph whose launches rotate over more index keys than L2 holds, per launch.
Floor: 68 bytes per scored entry at 4.2 TB/s; in prefill 2 * 32 * 128 operations per row and entry at 770 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepinfer.kernels.compressor import publish_entries, publish_index_keys
from deepinfer.kernels.indexer import scores_cuda, topk_cuda
from deepinfer.kernels.indexer.query import index_query
from deepinfer.kernels.indexer.scores import score_chunks, score_rows
from deepinfer.kernels.indexer.selection import IndexView, index_candidates, index_full, long_rows
from deepinfer.kernels.indexer.topk import select_blocks, select_entries
from deepinfer.ops import index_select as reference
from deepinfer.ops.compress import pool_pairs
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.number_formats import q4u_round
from deepinfer.ops.records import Fp4Record, Fp8Record, IndexKeyRecord, RecordStore
from deepinfer.ops.rope import rotate
from deepinfer.ops.step_views import ChunkSpan, StreamView

HEADS, WIDTH, TOPK, PER_BLOCK = 32, 128, 512, 128
CANDIDATES = (8, 2048)
RECORD = 68
BYTES_PER_S, FLOPS = 4.2e12, 770e12
POOL_ENTRIES = 24 << 20  # 1.6 GB of index keys
CUDA = torch.device("cuda")
results: list[dict] = []
is_warming = False


def guarded(name: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        print(f"FAIL {name}: raised\n    " + "\n    ".join(lines[-5:]), flush=True)
        results.append({"case": name, "error": lines[-1]})


def report(name: str, ok: bool, detail: str = "") -> None:
    print(f"{'PASS' if ok else 'FAIL'} {name} {detail}", flush=True)
    results.append({"case": name, "pass": ok, "detail": detail})


def timed(launches: list[Callable[[], object]]) -> float:
    """Microseconds per launch; 0 while kernels are only being compiled."""
    launches[0]()
    if is_warming:
        return 0.0
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def timing(name: str, us: float, floor_us: float, **extra: object) -> None:
    if not is_warming:
        print(f"{name:58s} {us:9.2f} us  floor {floor_us:8.2f}  x{us / max(floor_us, 1e-9):6.2f}", flush=True)
        results.append({"case": name, "us": us, "floor_us": floor_us, **extra})


# --- inputs -----------------------------------------------------------------------------------------------------------


def random_keys(entries: int) -> Tensor:
    keys = torch.randint(0, 256, (entries, RECORD), dtype=torch.uint8, device=CUDA)
    keys[:, 64:] = torch.randint(123, 129, (entries, 4), dtype=torch.uint8, device=CUDA)
    return keys


def random_queries(rows: int) -> tuple[Tensor, Tensor]:
    query = q4u_round(torch.randn(rows, HEADS, WIDTH, device=CUDA)).bfloat16()
    return query, torch.randn(rows, HEADS, device=CUDA).bfloat16()


def small_step(
    chunks: list[tuple[int, int]], exact: bool, padding: int = 0
) -> tuple[Tensor, Tensor, Tensor, IndexView, StreamView]:
    """A step of (rows, visible entries of the last row) per sequence; unread records hold NaN scales."""
    torch.manual_seed(len(chunks) + chunks[0][1])

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, device=CUDA).float() if exact else torch.randn(shape, device=CUDA)

    per_chunk = [-(-visible // PER_BLOCK) for _, visible in chunks]
    order = torch.randperm(sum(per_chunk) + 1, device=CUDA) + 1
    tables = torch.zeros((len(chunks), max(1, *per_chunk)), dtype=torch.int64, device=CUDA)
    keys = torch.full(((sum(per_chunk) + 2) * PER_BLOCK, RECORD), 255, dtype=torch.uint8, device=CUDA)
    taken, begin = 0, 0
    spans, visible_rows, sequence = [], [], []
    for index, (count, visible) in enumerate(chunks):
        mine = order[taken : taken + per_chunk[index]]
        taken += per_chunk[index]
        tables[index, : len(mine)] = mine
        slots = (mine[:, None] * PER_BLOCK + torch.arange(PER_BLOCK, device=CUDA)).flatten()[:visible]
        keys[slots] = IndexKeyRecord(WIDTH).encode(draw(visible, WIDTH))
        spans.append(ChunkSpan(begin, begin + count, visible - 1))
        visible_rows += [max(0, visible - count + 1 + row) for row in range(count)]
        sequence += [index] * count
        begin += count
    visible_rows += [0] * padding
    sequence += [0] * padding
    query = q4u_round(draw(begin + padding, HEADS, WIDTH)).bfloat16()
    weights = draw(begin + padding, HEADS).bfloat16()
    num_visible = torch.tensor(visible_rows, device=CUDA)
    none = num_visible[:0]
    stream = StreamView(
        1, PER_BLOCK, num_visible, max(visible_rows), torch.tensor(sequence, device=CUDA), tables, tuple(spans),
        none, none, none, None,
    )  # fmt: skip
    view = IndexView(tables.int(), stream.sequence.int(), num_visible.int(), PER_BLOCK, None, long_rows(spans))
    return query, weights, keys, view, stream


def padded(selected: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(selected, (0, count - selected.shape[1]), value=-1)


STEPS = {
    "decode": [(1, 1), (1, 511), (1, 512), (1, 513), (1, 1024), (1, 8191), (1, 20001), (1, 40000), (1, 0)],
    "verify": [(6, 1030), (6, 5), (3, 9000), (6, 33000), (1, 700)],
    "prefill": [(300, 700), (1, 900), (513, 1900)],
}


# --- checks -----------------------------------------------------------------------------------------------------------


def check_selection(name: str) -> None:
    chunks = STEPS[name]
    for exact in (True, False):
        query, weights, keys, view, stream = small_step(chunks, exact, padding=5)
        got = index_full(query, weights, keys, view, TOPK, CANDIDATES, wants_entries=True)
        if is_warming:
            if got.blocks is not None:
                index_candidates(query, weights, keys, view, got.blocks, CANDIDATES[0], TOPK)
            continue
        store = RecordStore(IndexKeyRecord(WIDTH), keys)
        selected, blocks = reference.index_full(query, weights, store, stream, TOPK, True, CANDIDATES)
        compare_sets(f"{name} full exact={exact}", got.entries, padded(selected, TOPK), exact)
        slots = torch.where(got.entries >= 0, stream.entry_slots(got.entries.long(), slice(0, len(query))), -1)
        report(f"{name} slots exact={exact}", torch.equal(slots, got.slots.long()))
        if blocks is None:
            continue
        compare_sets(f"{name} blocks exact={exact}", got.blocks, blocks, exact)
        other_query, other_weights = random_queries(len(query))
        if exact:
            other_query, other_weights = query.flip(1), weights
        blocks = got.blocks.long()
        narrowed = index_candidates(
            other_query, other_weights, keys, view, got.blocks, CANDIDATES[0], TOPK, wants_entries=True
        )
        expected = reference.index_candidates(
            other_query, other_weights, store, stream, blocks, CANDIDATES[0], TOPK, True
        )
        compare_sets(f"{name} candidates exact={exact}", narrowed.entries, padded(expected, TOPK), exact)


def compare_sets(name: str, got: Tensor, expected: Tensor, exact: bool) -> None:
    if exact:
        report(name, torch.equal(got.long(), expected))
        return
    missing = 0
    for row in range(len(got)):
        missing += len(set(expected[row].tolist()) - set(got[row].tolist()))
    share = missing / max(1, int((expected >= 0).sum()))
    report(name, share < 5e-3, f"share of selected entries that differ: {share:.2e}")


def check_scores() -> None:
    """Scores against float64, and the same bits from every kernel and geometry."""
    query, weights, keys, view, stream = small_step([(7, 900), (1, 300), (12, 2100)], False)
    rows, capacity = len(query), view.capacity

    def scored(function: Callable[..., None], **options: int) -> Tensor:
        out = torch.full((rows, capacity), 77, dtype=torch.int16, device=CUDA)
        function(
            query, weights, keys, view.block_table, view.row_sequence, view.num_visible, out, 0, PER_BLOCK, **options
        )
        return out

    first = scored(score_rows)
    guarded("cuda scores", lambda: check_cuda_scores(scored, first))
    if not is_warming:
        store = RecordStore(IndexKeyRecord(WIDTH), keys)
        differing, larger, total = 0, 0, 0
        for row in range(rows):
            visible = int(view.num_visible[row])
            entries = torch.arange(visible, device=CUDA)[None]
            values = store.read(stream.entry_slots(entries, slice(row, row + 1)))
            scores = reference._scores(query[row, None, None], weights[row, None, None], values, True)[0, 0]
            bits = (scores + 0.0).bfloat16().view(torch.int16)
            difference = (torch.where(bits < 0, bits ^ 0x7FFF, bits).int() - first[row, :visible].int()).abs()
            differing, larger = differing + int((difference > 0).sum()), larger + int((difference > 1).sum())
            total += visible
            assert (first[row, visible:] == 77).all()
        report(
            "scores random", differing < 0.02 * total and larger < 0.005 * total,
            f"share one step off {differing / total:.1e}, more {larger / total:.1e}",
        )  # fmt: skip
    for options in ({"num_programs": 7}, {"tile_entries": 128, "num_warps": 8}, {"num_warps": 8}):
        same(f"rows {options}", scored(score_rows, **options), first)
    for geometry in [*CHUNK_GEOMETRIES, {"tile_entries": 64, "tile_rows": 2, "group_rows": 8, "num_warps": 4}]:
        guarded(f"chunks {geometry}", lambda g=geometry: same(f"chunks {g}", scored(score_chunks, **g), first))


def check_cuda_scores(scored: Callable[..., Tensor], triton_keys: Tensor) -> None:
    keys = scored(scores_cuda.score_rows)
    if not is_warming:
        difference = (keys.int() - triton_keys.int()).abs()
        share, larger = (difference > 0).double().mean().item(), (difference > 1).double().mean().item()
        report("cuda scores against triton", share < 0.01 and larger < 2e-3, f"share {share:.1e}, more {larger:.1e}")
    for ctas in (1, 33, 500):
        same(f"cuda rows {ctas} CTAs", scored(scores_cuda.score_rows, num_ctas=ctas), keys)


def same(name: str, got: Tensor, expected: Tensor) -> None:
    if not is_warming:
        share = (got != expected).double().mean().item()
        report(f"same bits: {name}", share == 0, f"share differing {share:.1e}")


def check_radix() -> None:
    for rows, capacity, spread in ((3, 1 << 20, 30000), (3, 1 << 20, 3), (70, 9001, 500), (600, 40000, 20000)):
        keys = torch.randint(-spread, spread + 1, (rows, capacity), device=CUDA, dtype=torch.int16)
        visible = torch.randint(0, capacity + 1, (rows,), device=CUDA, dtype=torch.int32)
        visible[0] = capacity
        table = torch.stack([torch.randperm(capacity // PER_BLOCK + 1, device=CUDA) for _ in range(rows)]).int()
        slots = torch.full((rows, TOPK), 99, dtype=torch.int32, device=CUDA)
        entries, blocks = torch.full_like(slots, 99), torch.full((rows, 2048), 99, dtype=torch.int32, device=CUDA)
        sequence = torch.arange(rows, device=CUDA, dtype=torch.int32)
        select_entries(keys, visible, sequence, table, PER_BLOCK, slots, entries)
        select_blocks(keys, visible, 8, blocks)
        guarded(
            f"cuda radix {rows}x{capacity}",
            lambda o=(keys, visible, sequence, table), e=(slots, entries, blocks): check_cuda_radix(*o, *e),
        )
        if is_warming:
            continue
        scores = torch.where(keys < 0, keys ^ 0x7FFF, keys).to(torch.int16).view(torch.bfloat16).float()
        bad = bad_blocks = 0
        for row in range(rows):
            shown = torch.arange(capacity, device=CUDA)[None] < visible[row]
            expected = reference.top_entries(scores[row, None], shown, TOPK)
            bad += int(not torch.equal(entries[row].long(), padded(expected, TOPK)[0]))
            expected = reference.top_blocks(scores[row, None], visible[row, None].long(), 8, 2048)
            bad_blocks += int(not torch.equal(blocks[row].long(), padded(expected, 2048)[0]))
        report(f"radix {rows}x{capacity} spread {spread}", bad == 0, f"{bad} rows wrong")
        report(f"radix blocks {rows}x{capacity} spread {spread}", bad_blocks == 0, f"{bad_blocks} rows wrong")


def check_cuda_radix(
    keys: Tensor, visible: Tensor, sequence: Tensor, table: Tensor, slots: Tensor, entries: Tensor, blocks: Tensor
) -> None:
    if keys.shape[1] % 8:
        keys = torch.nn.functional.pad(keys, (0, 8 - keys.shape[1] % 8), value=32767)
    for cluster in (None, 1, 2, 8):
        for threads in (256, 512):
            got, got_entries = torch.full_like(slots, 99), torch.full_like(slots, 99)
            got_blocks = torch.full_like(blocks, 99)
            topk_cuda.select(
                keys, visible, TOPK, got, got_entries, 1, sequence, table, PER_BLOCK, None, 8, cluster, threads, 2048
            )
            topk_cuda.select(
                keys, visible, blocks.shape[1], None, got_blocks, 8, cluster=cluster, threads=threads, short=1024
            )
            ok = torch.equal(got, slots), torch.equal(got_entries, entries), torch.equal(got_blocks, blocks)
            if not is_warming:
                report(f"cuda radix {tuple(keys.shape)} cluster {cluster} threads {threads}", all(ok), str(ok))


def check_publish() -> None:
    for rows in (1, 37, 300):
        torch.manual_seed(rows)
        phase = torch.rand(rows, 32, device=CUDA, dtype=torch.float64) * 1000
        cos, sin = phase.cos().float(), phase.sin().float()
        weight = (torch.rand(512, device=CUDA) + 0.5).bfloat16()
        emit = torch.randperm(rows, device=CUDA).int()
        for ratio, record in ((1, Fp4Record(512)), (1, Fp8Record(512)), (2, Fp4Record(512))):
            entries = torch.zeros((rows, record.record_elements), dtype=torch.uint8, device=CUDA)
            if ratio == 1:
                projected = torch.randn(rows, 512, device=CUDA).bfloat16()
                latent = publish_entries(projected, 1, weight, 1e-20, cos, sin, emit, entries)
                pooled = projected
            else:
                ring = torch.randn(7 * rows, 2, 512, device=CUDA)
                projected = torch.randn(rows, 1024, device=CUDA)
                partner = (-2 - 7 * torch.arange(rows, device=CUDA)).int()
                store = (7 * torch.arange(rows, device=CUDA) + 1).int()
                first = ring[::7].clone()
                latent = publish_entries(
                    projected, 2, weight, 1e-20, cos, sin, emit, entries, ring, partner, store, stores_in_place=True
                )
                pooled = pool_pairs(first, projected.view(rows, 2, 512), torch.bfloat16)
            expected = rms_norm(pooled, weight.double(), 1e-20)
            share = (latent != expected).double().mean().item()
            record_share = (entries[emit.long()] != record.encode(rotate(latent, cos, sin))).double().mean().item()
            report(
                f"publish ratio {ratio} {record.record_elements} rows {rows}", max(share, record_share) < 2e-3,
                f"latent {share:.1e} record {record_share:.1e}",
            )  # fmt: skip
        key = torch.randn(rows, 128, device=CUDA).bfloat16()
        store = torch.zeros((rows, RECORD), dtype=torch.uint8, device=CUDA)
        publish_index_keys(key, weight[:128], 1e-20, cos, sin, emit, store)
        expected = IndexKeyRecord(128).encode(rotate(rms_norm(key, weight[:128].double(), 1e-20), cos, sin))
        share = (store[emit.long()] != expected).double().mean().item()
        report(f"publish index keys rows {rows}", share < 4e-3, f"{share:.1e}")
        query = torch.randn(rows, HEADS, WIDTH, device=CUDA).bfloat16()
        share = (index_query(query, cos, sin) != q4u_round(rotate(query, cos, sin)).bfloat16()).double().mean().item()
        report(f"index query rows {rows}", share < 2e-3, f"{share:.1e}")


# --- times ------------------------------------------------------------------------------------------------------------

ROW_GEOMETRIES = [
    {"tile_entries": 64, "num_warps": 4, "num_programs": 528},
    {"tile_entries": 128, "num_warps": 8, "num_programs": 264},
]
CHUNK_GEOMETRIES = [
    {"tile_entries": 128, "tile_rows": 4, "group_rows": 64, "num_warps": 8, "num_stages": 2},
    {"tile_entries": 128, "tile_rows": 4, "group_rows": 64, "num_warps": 8, "num_stages": 3},
    {"tile_entries": 128, "tile_rows": 4, "group_rows": 128, "num_warps": 8, "num_stages": 2},
    {"tile_entries": 64, "tile_rows": 4, "group_rows": 64, "num_warps": 4, "num_stages": 2},
    {"tile_entries": 64, "tile_rows": 2, "group_rows": 64, "num_warps": 4, "num_stages": 3},
    {"tile_entries": 128, "tile_rows": 2, "group_rows": 64, "num_warps": 4, "num_stages": 3},
    {"tile_entries": 128, "tile_rows": 8, "group_rows": 64, "num_warps": 8, "num_stages": 2},
]


def rotation(rows: int, context: int) -> int:
    """Launches of a graph: enough different tables for 240 MB of keys, within limits."""
    return max(4, min(40, int(240e6 / (rows * context * RECORD)) + 1))


def tables_for(rows: int, context: int, count: int) -> Iterator[Tensor]:
    """Block tables over the pool; where rows need more blocks than it has, they share some."""
    width = -(-context // PER_BLOCK)
    pool = POOL_ENTRIES // PER_BLOCK
    for _ in range(count):
        if rows * width <= pool:
            yield torch.randperm(pool, device=CUDA)[: rows * width].view(rows, width).int()
        else:
            yield torch.randint(0, pool, (rows, width), device=CUDA, dtype=torch.int32)


DECODE_CASES = [
    (1024, (1, 8, 32, 64, 128, 256)),
    (8192, (1, 8, 32, 64, 128, 256)),
    (65536, (1, 8, 32, 64, 128, 256)),
    (1 << 20, (1, 8)),
]


def decode_times(keys: Tensor) -> None:
    for context, batches in DECODE_CASES:
        for rows in batches:
            guarded(f"decode {context} {rows}", lambda c=context, r=rows: decode_time(keys, c, r))


def decode_time(keys: Tensor, context: int, rows: int) -> None:
    floor = rows * context * RECORD / BYTES_PER_S * 1e6
    query, weights = random_queries(rows)
    tables = list(tables_for(rows, context, 1 if is_warming else rotation(rows, context)))
    sequence = torch.arange(rows, device=CUDA, dtype=torch.int32)
    visible = torch.full((rows,), context, dtype=torch.int32, device=CUDA)
    scores = torch.empty((rows, context), dtype=torch.int16, device=CUDA)
    slots = torch.empty((rows, TOPK), dtype=torch.int32, device=CUDA)
    name = f"ctx {context} B {rows}"
    operands = (sequence, visible, scores, TOPK, PER_BLOCK)
    for ctas in (264, 132):
        us = timed(
            [lambda t=t, c=ctas: scores_cuda.score_rows(query, weights, keys, t, *operands, num_ctas=c) for t in tables]
        )
        timing(f"score_rows {name} [cuda {ctas}]", us, floor)
    for geometry in ROW_GEOMETRIES if rows in (1, 64, 256) else ():
        us = timed([lambda t=t, g=geometry: score_rows(query, weights, keys, t, *operands, **g) for t in tables])
        label = "/".join(str(value) for value in geometry.values())
        timing(f"score_rows {name} [triton {label}]", us, floor)
    floor_select = rows * context * 2 / BYTES_PER_S * 1e6
    for threads in (256, 512):
        for cluster in sorted({1, topk_cuda.choose_cluster(rows, context)}):
            rest = (TOPK, slots, None, 1, sequence, tables[0], PER_BLOCK, None, 8, cluster, threads)
            us = timed([lambda r=rest: topk_cuda.select(scores, visible, *r)] * 20)
            timing(f"select {name} [cuda cluster {cluster} threads {threads}]", us, floor_select)
    if rows in (1, 64):
        us = timed([lambda: select_entries(scores, visible, sequence, tables[0], PER_BLOCK, slots)] * 10)
        timing(f"select {name} [triton]", us, floor_select)
    raw = torch.randn(rows, HEADS, WIDTH, device=CUDA).bfloat16()
    cos = torch.rand(rows, 32, device=CUDA)
    sin = torch.rand(rows, 32, device=CUDA)

    def whole(table: Tensor) -> None:
        view = IndexView(table, sequence, visible, PER_BLOCK)
        index_full(index_query(raw, cos, sin), weights, keys, view, TOPK)

    us = timed([lambda t=table: whole(t) for table in tables])
    timing(f"indexer {name} (query, scores, select)", us, floor)
    if context == 1024:
        wide = [torch.nn.functional.pad(table, (0, 8192 - table.shape[1])) for table in tables]
        us = timed([lambda t=table: whole(t) for table in wide[:8]])
        timing(f"indexer {name} in tables for 1M", us, floor)
        us = timed([lambda: index_query(raw, cos, sin)] * 20)
        timing(f"index_query {name}", us, rows * HEADS * WIDTH * 4 / BYTES_PER_S * 1e6)


def candidate_times(keys: Tensor) -> None:
    for context in (65536, 1 << 20):
        for rows in (1, 8, 64, 256) if context == 65536 else (1, 8):
            guarded(f"candidates {context} {rows}", lambda c=context, r=rows: candidate_time(keys, c, r))


def candidate_time(keys: Tensor, context: int, rows: int) -> None:
    query, weights = random_queries(rows)
    tables = list(tables_for(rows, context, 1 if is_warming else 8))
    sequence = torch.arange(rows, device=CUDA, dtype=torch.int32)
    visible = torch.full((rows,), context, dtype=torch.int32, device=CUDA)
    scores = torch.randint(-30000, 30000, (rows, context), dtype=torch.int16, device=CUDA)
    blocks = torch.empty((rows, CANDIDATES[1]), dtype=torch.int32, device=CUDA)
    floor = rows * context * 2 / BYTES_PER_S * 1e6
    us = timed([lambda: select_blocks(scores, visible, CANDIDATES[0], blocks)] * 8)
    timing(f"select_blocks ctx {context} B {rows} [triton]", us, floor)
    for threads in (256, 512):
        us = timed([lambda t=threads: topk_cuda.select(scores, visible, CANDIDATES[1], None, blocks, 8, threads=t)] * 8)
        timing(f"select_blocks ctx {context} B {rows} [cuda {threads}]", us, floor)

    def whole(table: Tensor) -> None:
        view = IndexView(table, sequence, visible, PER_BLOCK)
        index_candidates(query, weights, keys, view, blocks, CANDIDATES[0], TOPK)

    us = timed([lambda t=table: whole(t) for table in tables])
    timing(f"index_candidates ctx {context} B {rows}", us, rows * 16384 * RECORD / BYTES_PER_S * 1e6)


def prefill_times(keys: Tensor) -> None:
    for context, rows in ((8192, 8192), (4096, 8192), (32768, 8192), (131072, 8192), (8192, 384)):
        guarded(f"prefill {context} {rows}", lambda c=context, r=rows: prefill_time(keys, c, r))


def prefill_time(keys: Tensor, context: int, rows: int) -> None:
    """One chunk whose last row sees ``context`` entries (4096 for 8192 rows: the ratio-2 stream of a first chunk)."""
    query, weights = random_queries(rows)
    table = next(tables_for(1, context, 1))
    sequence = torch.zeros(rows, device=CUDA, dtype=torch.int32)
    ratio = 2 if context < rows else 1
    visible = ((torch.arange(rows, device=CUDA) + (context * ratio - rows) + 1) // ratio).int()
    flops = 2.0 * HEADS * WIDTH * int(visible.long().sum())
    floor = flops / FLOPS * 1e6
    name = f"prefill rows {rows} ctx {context}"
    slots = torch.empty((rows, TOPK), dtype=torch.int32, device=CUDA)
    if context <= 32768:
        scores = torch.empty((rows, context), dtype=torch.int16, device=CUDA)
        for geometry in CHUNK_GEOMETRIES if context == 8192 else CHUNK_GEOMETRIES[:1]:

            def launch(g: dict = geometry) -> None:
                score_chunks(
                    query, weights, keys, table, sequence, visible, scores, TOPK, PER_BLOCK, max_visible=context, **g
                )

            label = "/".join(str(value) for value in geometry.values())
            guarded(label, lambda n=label, f=launch: timing(f"score_chunks {name} [{n}]", timed([f] * 2), floor))
        for threads in (256, 512):
            rest = (TOPK, slots, None, 1, sequence, table, PER_BLOCK, None, 8, 1, threads)
            us = timed([lambda r=rest: topk_cuda.select(scores, visible, *r)] * 2)
            timing(f"select {name} [cuda {threads}]", us, float(visible.long().sum()) * 2 / BYTES_PER_S * 1e6)
    view = IndexView(table, sequence, visible, PER_BLOCK, context, (0, rows))
    us = timed([lambda: index_full(query, weights, keys, view, TOPK)])
    timing(f"index_full {name}", us, floor)


def publish_time(rows: int) -> None:
    phase = torch.rand(rows, 32, device=CUDA)
    cos, sin = phase.cos(), phase.sin()
    weight = torch.ones(512, device=CUDA, dtype=torch.bfloat16)
    emit = torch.arange(rows, device=CUDA, dtype=torch.int32)
    entries = torch.zeros((rows, 288), dtype=torch.uint8, device=CUDA)
    ring = torch.zeros((7 * rows, 2, 512), device=CUDA)
    partner, store = -2 - 7 * emit, 7 * emit + 1
    pairs, single = torch.randn(rows, 1024, device=CUDA), torch.randn(rows, 512, device=CUDA).bfloat16()
    key, keys = (
        torch.randn(rows, 128, device=CUDA).bfloat16(),
        torch.zeros((rows, 68), dtype=torch.uint8, device=CUDA),
    )
    us = timed([lambda: publish_entries(single, 1, weight, 1e-20, cos, sin, emit, entries)] * 20)
    timing(f"publish_entries ratio 1 rows {rows}", us, rows * 2336 / BYTES_PER_S * 1e6)
    us = timed(
        [lambda: publish_entries(pairs, 2, weight, 1e-20, cos, sin, emit, entries, ring, partner, store, True)] * 20
    )
    timing(f"publish_entries ratio 2 rows {rows}", us, rows * 13000 / BYTES_PER_S * 1e6)
    us = timed([lambda: publish_index_keys(key, weight[:128], 1e-20, cos, sin, emit, keys)] * 20)
    timing(f"publish_index_keys rows {rows}", us, rows * 324 / BYTES_PER_S * 1e6)


PARTS = ("check", "decode", "candidates", "prefill", "publish")


def run(parts: set[str]) -> None:
    keys = random_keys(POOL_ENTRIES) if parts & {"decode", "candidates", "prefill"} else None
    if "check" in parts:
        guarded("publish", check_publish)
        guarded("scores", check_scores)
        guarded("radix", check_radix)
        for name in STEPS:
            guarded(name, lambda n=name: check_selection(n))
    if "decode" in parts and keys is not None:
        decode_times(keys)
    if "candidates" in parts and keys is not None:
        candidate_times(keys)
    if "prefill" in parts and keys is not None:
        prefill_times(keys)
    if "publish" in parts:
        for rows in (1, 8, 64, 256, 8192):
            guarded(f"publish {rows}", lambda r=rows: publish_time(r))


def main() -> None:
    global is_warming
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--warm", action="store_true", help="compile everything, measure nothing (used by itself)")
    args = parser.parse_args()
    parts = set(args.only.split(","))
    is_warming = args.warm
    begin = time.perf_counter()
    if not is_warming:  # compile in one process per part, in parallel; their kernels are cached on disk
        command = [sys.executable, __file__, "--warm", "--only"]
        warmers = [subprocess.Popen([*command, part], stdout=subprocess.DEVNULL) for part in sorted(parts)]
        for warmer in warmers:
            warmer.wait()
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    run(parts)
    if is_warming:
        return
    failed = [each["case"] for each in results if each.get("error") or each.get("pass") is False]
    print(f"{len(results)} results, {len(failed)} failed: {failed}; {time.perf_counter() - begin:.0f} s")
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
