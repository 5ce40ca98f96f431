"""Sparse attention on a GPU at the released sizes: correctness against float64, then time over the floor.

    python -m bench.gpu.check_attention [--json FILE] [--quick] [--no-ablations]

Times are medians of replayed CUDA graphs whose launches rotate over enough rows to leave the L2 cold. ABLATIONS are
kernels with one stage changed or left out (most of them compute nonsense): their times tell what the kernel waits for.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.attention import sparse_attention_cuda
from deepinfer.kernels.attention.sparse_attention import sparse_attention
from deepinfer.ops import number_formats as nf
from deepinfer.ops import rope
from deepinfer.ops.attention import _attend
from deepinfer.ops.records import Fp4Record, Fp8Record, RecordFormat

HEADS, DIM, ROPE, WINDOW, TOP_K = 64, 512, 64, 128, 512
BYTES_PER_S, FLOPS_PER_S = 4.2e12, 770e12
NAN_BYTE = 0x7F
RESULTS: list[dict[str, Any]] = []
# name -> replacements (pattern, text) in the kernel's source
ABLATIONS = {
    "reader fences": [
        (r"fence_for_tensor_cores\(\);\n(\s+warp_arrive\(&small.key_full)", r"\1"),
        (r"(barrier_wait_forever\(&small.key_full\[.*\);)", r"\1 fence_for_tensor_cores();"),
    ],
    "no key fence": [(r"fence_for_tensor_cores\(\);\n(\s+warp_arrive\(&small.key_full)", r"\1")],
    "expansion unrolled": [(r"#pragma unroll 1\n(.*\n\s+copy_wait<3>)", r"#pragma unroll\n\1")],
    "no expansion": [(r"(u32 column, (const Places& places|u32 first, u32 second)\) \{)", r"\1 return;")],
    "no copies": [(r"(\) \{\n\s+const u8\* from = copy.from \+.*)", r"\1\ncopy_commit(); return;")],
    "no logits": [(r"(k < )32(; \+\+k\) \{\n\s+const u32 at)", r"\g<1>1\2")],
    "no sums": [(r"(wgmma_fence\(\);\n#pragma unroll\n\s+for \(int k = 0; k < )4", r"\g<1>0")],
    "no output": [(r"column < first_column \+ columns", "column < (row == -5) * columns")],
    "no rounding": [(r"if \(a.quantize\)", "if (a.quantize == 7)")],
}


@dataclass
class Batch:
    """Arguments of one call."""

    q: Tensor
    step_records: Tensor
    ring: Tensor
    window_index: Tensor
    entries: Tensor | None
    entry_format: str
    entry_slots: Tensor | None
    sink: Tensor
    cos: Tensor
    sin: Tensor

    def run(self, quantize: bool = True, **options: Any) -> Tensor:
        return sparse_attention(
            self.q, self.step_records, self.ring, self.window_index, self.entries, self.entry_format,  # type: ignore[arg-type]
            self.entry_slots, self.sink, self.cos, self.sin, quantize, **options,
        )  # fmt: skip

    def row(self, i: int) -> Batch:
        part = slice(i, i + 1)
        slots = None if self.entry_slots is None else self.entry_slots[part]
        return replace(
            self, q=self.q[part], window_index=self.window_index[part], entry_slots=slots, cos=self.cos[part],
            sin=self.sin[part],
        )  # fmt: skip


def make_batch(rows: int, pool: Pool, entry_format: str = "fp4", window: int = WINDOW, holes: bool = False) -> Batch:
    g, device = pool.generator, pool.ring.device

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device=device, dtype=torch.int32)

    wide = torch.randn(rows, HEADS * DIM + 256, generator=g, device=device).bfloat16()
    step_records = Fp8Record(DIM).encode(torch.randn(rows, DIM, generator=g, device=device))
    window_index = -2 - integers(0, len(pool.ring), rows, window)
    window_index[:, -1] = torch.arange(rows, device=device)
    slots = integers(0, len(pool.entries[entry_format]), rows, TOP_K)
    if holes:
        window_index[torch.rand(rows, window, generator=g, device=device) < 0.3] = -1
        slots[torch.rand(rows, TOP_K, generator=g, device=device) < 0.3] = -1
        slots[0, 64:] = -1
        if rows > 2:
            window_index[1], slots[1] = -1, -1
    positions = integers(0, 100_000, rows).long()
    cos, sin = rope.rope_angles(positions, rope.rope_frequencies(160000.0, ROPE, None).to(device))
    return Batch(
        wide[:, : HEADS * DIM].unflatten(1, (HEADS, DIM)), step_records, pool.ring, window_index,
        pool.entries[entry_format], entry_format, slots, pool.sink, cos, sin,
    )  # fmt: skip


@dataclass
class Pool:
    """What all batches share. Records past ``used`` are NaN and named by no index."""

    ring: Tensor
    entries: dict[str, Tensor]
    sink: Tensor
    generator: torch.Generator


def make_pool(device: torch.device, num_entries: int, num_ring: int) -> Pool:
    g = torch.Generator(device).manual_seed(0)

    def records(record_format: RecordFormat, count: int) -> Tensor:
        block = record_format.encode(torch.randn(4096, DIM, generator=g, device=device))
        many = block.repeat(count // 4096, 1)
        return torch.cat((many, torch.full_like(many[:1], NAN_BYTE)))[:-1]

    return Pool(
        records(Fp8Record(DIM), num_ring),
        {"fp4": records(Fp4Record(DIM), num_entries), "fp8": records(Fp8Record(DIM), num_entries // 2)},
        torch.randn(HEADS, generator=g, device=device),
        g,
    )


def expected(batch: Batch) -> Tensor:
    """Result before its rounding to bf16, float64 ``[rows, heads, dim]``, still rotated."""
    key_format = Fp8Record(DIM)
    record_format: RecordFormat = Fp4Record(DIM) if batch.entry_format == "fp4" else key_format
    parts = []
    for i in range(len(batch.q)):
        index = batch.window_index[i].long()
        old = key_format.decode(batch.ring[(-2 - index).clamp_min(0)])
        new = key_format.decode(batch.step_records[index.clamp_min(0)])
        keys, seen = torch.where((index >= 0)[:, None], new, old), index != -1
        if batch.entries is not None and batch.entry_slots is not None:
            slots = batch.entry_slots[i].long()
            keys = torch.cat((keys, record_format.decode(batch.entries[slots.clamp_min(0)])))
            seen = torch.cat((seen, slots >= 0))
        query = rope.rotate(batch.q[i : i + 1].contiguous(), batch.cos[i : i + 1], batch.sin[i : i + 1])
        parts.append(_attend(query.double(), keys.double()[None], seen[None], batch.sink.double()))
    return torch.cat(parts)


def check_correct(name: str, batch: Batch, **options: Any) -> None:
    exact = expected(batch)
    plain = rope.rotate(exact.bfloat16(), batch.cos, batch.sin, inverse=True)
    turned = rope.rotate(exact, batch.cos, batch.sin, inverse=True)
    got = batch.run(False, **options).view_as(plain)
    rounded = batch.run(True, **options)
    own = float((got.double() - turned).norm() / turned.norm())  # all roundings
    floor = float((plain.double() - turned).norm() / turned.norm())  # the output's rounding alone
    same = float((got == plain).double().mean())
    q8_same = bool(torch.equal(rounded, nf.q8_round(got).bfloat16().flatten(1)))
    alone = [torch.equal(batch.row(i).run(True, **options)[0], rounded[i]) for i in range(min(len(batch.q), 4))]
    fine = math.isfinite(own) and own < 3 * floor and q8_same and all(alone)
    report(
        "PASS" if fine else "FAIL", name, error=f"{own:.2e}", rounding_alone=f"{floor:.2e}", equal=f"{same:.4f}",
        q8_exact=q8_same, row_alone=all(alone), **options,
    )  # fmt: skip


def report(kind: str, name: str, **values: Any) -> None:
    RESULTS.append({"kind": kind, "name": name, **values})
    print(f"{kind:5} {name:24}", *(f"{key}={value}" for key, value in values.items()), flush=True)


def attempt(name: str, action: Callable[..., None], *arguments: Any, **options: Any) -> None:
    try:
        action(*arguments, **options)
    except Exception as error:
        RESULTS.append({"kind": "ERROR", "name": name, "text": repr(error)[:500]})
        print(f"ERROR {name}:", *traceback.format_exc().splitlines()[-3:], sep="\n  ", flush=True)


def time_us(batches: list[Batch], **options: Any) -> float:
    """Microseconds per launch."""
    outs = [torch.empty(len(b.q), HEADS * DIM, dtype=torch.bfloat16, device=b.q.device) for b in batches]
    for b, out in list(zip(batches, outs, strict=True))[:2]:
        b.run(out=out, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for b, out in zip(batches, outs, strict=True):
            b.run(out=out, **options)
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(batches))
    return statistics.median(times)


def check_time(rows: int, pool: Pool, entry_format: str, variants: list[dict[str, Any]]) -> None:
    entry_bytes = pool.entries[entry_format].shape[1]
    row_bytes = WINDOW * 528 + TOP_K * entry_bytes + 2 * 2 * HEADS * DIM
    num_bytes, flops = rows * row_bytes, rows * HEADS * DIM * (WINDOW + TOP_K) * 4
    rotation = max(2, min(256, math.ceil(160e6 / num_bytes)))
    batches = [make_batch(rows, pool, entry_format) for _ in range(rotation)]
    floor = max(num_bytes / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6

    def one(options: dict[str, Any]) -> None:
        us = time_us(batches, **options)
        report(
            "TIME", f"rows={rows} {entry_format}", us=round(us, 2), floor_us=round(floor, 2),
            times_floor=round(us / floor, 2), tflops=round(flops / us / 1e6, 1), **options,
        )  # fmt: skip

    for options in variants:
        attempt(f"rows={rows} {options}", one, options)


def write_ablations(folder: Path) -> list[str]:
    """Sources with one stage changed, beside a copy of the kernel's; names of the files."""
    text = nvrtc.read_source(sparse_attention_cuda.SOURCE)
    (folder / sparse_attention_cuda.SOURCE).write_text(text)
    files = []
    for name, replacements in ABLATIONS.items():
        changed = text
        for pattern, new in replacements:
            changed, count = re.subn(pattern, new, changed)
            assert count, f"{name}: the kernel has no {pattern}"
        files.append(f"{name}.cu")
        (folder / files[-1]).write_text(changed)
    return files


def compile_all(ablations: list[str]) -> None:
    variants = [(fp4, splits, rest) for fp4, splits in ((1, 1), (1, 2), (1, 4), (1, 8), (0, 1)) for rest in (0, 1)]
    defines = [sparse_attention_cuda.definitions(HEADS, ROPE, bool(f), s, bool(rest)) for f, s, rest in variants]
    jobs = [(sparse_attention_cuda.SOURCE, d) for d in defines]
    jobs += [
        (name, sparse_attention_cuda.definitions(HEADS, ROPE, True, s, True)) for name in ablations for s in (1, 8)
    ]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda job: nvrtc.compile_cubin(job[0], job[1], "sm_90a"), jobs))


def no_keys(batch: Batch) -> Batch:
    assert batch.entry_slots is not None
    hidden = (torch.full_like(batch.window_index, -1), torch.full_like(batch.entry_slots, -1))
    return replace(batch, window_index=hidden[0], entry_slots=hidden[1])


def check_ablations(pool: Pool, files: list[str]) -> None:
    usual = sparse_attention_cuda.SOURCE
    for rows, splits in ((128, 1), (8, 8)):
        batches = [make_batch(rows, pool) for _ in range(max(2, min(64, 2048 // rows)))]
        empty = [no_keys(b) for b in batches]
        options = {"implementation": "cuda", "splits": splits, "split_weights": True}
        try:
            for source in (usual, *files):
                sparse_attention_cuda.SOURCE = source
                report("TIME", f"rows={rows} splits={splits}", us=round(time_us(batches, **options), 2), kernel=source)
        finally:
            sparse_attention_cuda.SOURCE = usual
        report("TIME", f"rows={rows} splits={splits}", us=round(time_us(empty, **options), 2), kernel="no keys")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="correctness and few timings")
    parser.add_argument("--no-ablations", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    begin = time.perf_counter()
    ablations: list[str] = []
    if not arguments.no_ablations:
        folder = Path(tempfile.mkdtemp())
        ablations = write_ablations(folder)
        nvrtc.SOURCES = folder
    attempt("compile", compile_all, ablations)
    print(f"compiled in {time.perf_counter() - begin:.1f} s")
    pool = make_pool(device, 524_288, 65_536)
    implementations = ("cuda", "triton")

    for implementation in implementations:
        for splits in (1, 2, 4, 8) if implementation == "cuda" else (1,):
            options = {"implementation": implementation, "splits": splits}
            weights = (False, True) if implementation == "cuda" else (False,)
            for split_weights in weights:
                batch = make_batch(5, pool, holes=True)
                attempt(f"{options}", check_correct, "5 rows fp4", batch, split_weights=split_weights, **options)
    cuda = {"implementation": "cuda"}
    attempt("full", check_correct, "3 rows fp4, all seen", make_batch(3, pool), splits=1, **cuda)
    attempt("fp8", check_correct, "5 rows fp8", make_batch(5, pool, "fp8", holes=True), splits=1, **cuda)
    for splits in (2, 4, 8):
        wide = make_batch(5, pool, window=133)
        attempt("wide", check_correct, "5 rows window 133", wide, splits=splits, split_weights=True, **cuda)
    attempt("many", check_correct, "300 rows fp4", make_batch(300, pool, holes=True), splits=1, **cuda)
    only = replace(make_batch(7, pool), entries=None, entry_slots=None)
    attempt("window only", check_correct, "7 rows, window only", only, splits=1, **cuda)

    for rows in (1, 8, 32, 64, 128, 256):
        by_rows = {1: (8, 4), 8: (8, 4, 2), 32: (4, 2, 1), 64: (2, 1), 128: (1, 2), 256: (1, 2)}[rows]
        variants: list[dict[str, Any]] = [{**cuda, "splits": s, "split_weights": False} for s in by_rows]
        variants.append({**cuda, "splits": by_rows[0], "split_weights": True})
        if rows == 128 and not arguments.quick:
            variants.append({"implementation": "triton", "splits": 1})
        attempt(f"time {rows}", check_time, rows, pool, "fp4", variants)
    one = {**cuda, "splits": 1}
    attempt("time fp8", check_time, 128, pool, "fp8", [one])
    variants = [one, {**one, "split_weights": True}]
    attempt("time 8192", check_time, 8192, pool, "fp4", variants)
    if ablations:
        attempt("ablations", check_ablations, pool, ablations)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(RESULTS, file, indent=1)
    kinds = [result["kind"] for result in RESULTS]
    print(f"{kinds.count('PASS')} passed, {kinds.count('FAIL')} failed, {kinds.count('ERROR')} errors")


if __name__ == "__main__":
    main()
