"""Sparse attention of few rows: correctness against float64, then its time alone and between its neighbours.

    python -m bench.gpu.check_attention_few [--json FILE]

Between its neighbours: a graph of (query projection, attention, output projection), each with its own weights, so that
every launch finds a cold L2 as in the model. The cost of attention is what such a link takes longer than one without
it. Alone: launches of attention one after another.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.gpu.check_attention import (
    DIM,
    HEADS,
    NAN_BYTE,
    RESULTS,
    ROPE,
    TOP_K,
    WINDOW,
    Batch,
    Pool,
    attempt,
    expected,
    make_batch,
    make_pool,
    report,
    time_us,
)  # fmt: skip
from bench.gpu.dense_cases import random_fp8
from deepinfer.kernels import nvrtc
from deepinfer.kernels.attention import sparse_attention_few
from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.ops import number_formats as nf
from deepinfer.ops import rope

LINKS = 8
ROWS = (1, 2, 4, 6, 8, 12, 16, 24)
# name -> window and entries per row, what becomes of the indices
CASES = {
    "all seen": (WINDOW, TOP_K, "all"),
    "holes": (WINDOW, TOP_K, "holes"),
    "odd counts": (117, 499, "holes"),
    "window only": (WINDOW, 0, "all"),
    "one key": (WINDOW, TOP_K, "one"),
    "no key": (WINDOW, TOP_K, "none"),
    "few entries": (3, 9, "holes"),
}


def poison(named: Tensor, records: Tensor) -> Tensor:
    """A copy in which records that no index names are NaN."""
    unused = torch.ones(len(records), dtype=torch.bool, device=records.device)
    unused[named.long()] = False
    return torch.where(unused[:, None], NAN_BYTE, records)


def make_case(rows: int, pool: Pool, entry_format: str, window: int, top_k: int, kind: str) -> Batch:
    batch = make_batch(rows, pool, entry_format, window, kind == "holes")
    slots = batch.entry_slots[:, :top_k].contiguous() if batch.entry_slots is not None else None
    assert slots is not None
    assert batch.entries is not None
    index = batch.window_index
    if kind in ("one", "none"):
        index = torch.full_like(index, -1)
        kept = slots[:, -1].clone()
        slots = torch.full_like(slots, -1)
        if kind == "one":
            slots[:, -1] = kept
    index_of_ring, index_of_step = -2 - index[index <= -2], index[index >= 0]
    return replace(
        batch, window_index=index, ring=poison(index_of_ring, batch.ring),
        step_records=poison(index_of_step, batch.step_records),
        entries=poison(slots[slots >= 0], batch.entries) if top_k else None, entry_slots=slots if top_k else None,
    )  # fmt: skip


def check(name: str, batch: Batch, splits: int, split_weights: bool) -> None:
    exact = expected(batch)
    plain = rope.rotate(exact.bfloat16(), batch.cos, batch.sin, inverse=True)
    turned = rope.rotate(exact, batch.cos, batch.sin, inverse=True)
    options: dict[str, Any] = {"implementation": "few", "splits": splits, "split_weights": split_weights}

    def run(part: Batch, quantize: bool) -> Tensor:
        out = torch.full((len(part.q), HEADS * DIM), torch.nan, dtype=torch.bfloat16, device=part.q.device)
        return part.run(quantize, out=out, **options)

    got = run(batch, False).view_as(plain)
    own = float((got.double() - turned).norm() / turned.norm().clamp_min(1e-30))
    floor = float((plain.double() - turned).norm() / turned.norm().clamp_min(1e-30))
    rounded = run(batch, True)
    q8_same = bool(torch.equal(rounded, nf.q8_round(got).bfloat16().flatten(1)))
    alone = all(torch.equal(run(batch.row(i), True)[0], rounded[i]) for i in {0, len(batch.q) - 1})
    again = all(torch.equal(run(batch, True), rounded) for _ in range(3))
    fine = own <= (1.2 if split_weights else 2) * floor and q8_same and alone and again
    report(
        "PASS" if fine else "FAIL", name, rows=len(batch.q), splits=splits, parts=1 + split_weights, error=f"{own:.2e}",
        rounding_alone=f"{floor:.2e}", q8_exact=q8_same, row_alone=alone, repeats=again,
    )  # fmt: skip


class Chain:
    """Links of query projection, attention and output projection, with weights of their own."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.query = [Fp8Linear(*random_fp8(HEADS * DIM, 1280, False, i)) for i in range(LINKS)]
        self.output = [Fp8Linear(*random_fp8(8192, 4096, False, 100 + i), groups=8) for i in range(LINKS)]

    def link_us(self, rows: int, options: dict[str, Any] | None) -> float:
        """Microseconds per link; without options, without attention."""
        batches = [make_batch(rows, self.pool) for _ in range(LINKS)]
        latent = torch.randn(rows, 1280, device="cuda").bfloat16()
        context = torch.randn(rows, HEADS * DIM, device="cuda").bfloat16()

        def run() -> None:
            for query, output, batch in zip(self.query, self.output, batches, strict=True):
                q = query.forward(latent, overlap=True)
                out = context
                if options is not None:
                    out = replace(batch, q=q.view(rows, HEADS, DIM)).run(True, **options)
                output.forward(out.view(rows, 8, 4096), quantize_output=True, overlap=True)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
            run()
        times = []
        for i in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i:
                times.append(begin.elapsed_time(end) * 1000 / (2 * LINKS))
        return statistics.median(times)


def measure(rows: int, pool: Pool, chain: Chain) -> dict[str, Any]:
    """Microseconds: of a link without attention, and what attention adds to it and takes alone."""
    batches = [make_batch(rows, pool) for _ in range(max(8, 64 // rows))]
    bare = chain.link_us(rows, None)
    result: dict[str, Any] = {"rows": rows, "bare_link_us": round(bare, 2)}

    def one(name: str, options: dict[str, Any]) -> None:
        options = {"split_weights": True, **options}
        added = round(chain.link_us(rows, options) - bare, 2)
        result[name] = (added, round(time_us(batches, **options), 2))

    one("wgmma", {"implementation": "cuda"})
    one("chosen", {"implementation": "few"})
    for splits in sparse_attention_few.SPLITS:
        if rows * 4 * splits <= 1100:
            one(f"few/{splits}", {"implementation": "few", "splits": splits})
    one("one part", {"implementation": "few", "split_weights": False})
    result["bare_again_us"] = round(chain.link_us(rows, None), 2)
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=list(ROWS))
    arguments = parser.parse_args()
    device = torch.device("cuda")
    for fp4 in (True, False):
        for parts in (True, False):
            defines = sparse_attention_few.definitions(HEADS, ROPE, fp4, parts)
            nvrtc.compile_cubin(sparse_attention_few.SOURCE, defines, "sm_90a")
    small = make_pool(device, 8192, 4096)
    for rows, splits in ((1, 16), (2, 8), (6, 8), (8, 8), (16, 4)):
        for name, (window, top_k, kind) in CASES.items():
            entry_format = "fp8" if rows == 2 else "fp4"
            case = make_case(rows, small, entry_format, window, top_k, kind)
            attempt(f"{name} {rows}", check, f"{name} {entry_format}", case, splits, True)
    attempt("one part", check, "all seen, one part", make_case(3, small, "fp4", WINDOW, TOP_K, "all"), 16, False)
    kinds = [result["kind"] for result in RESULTS]
    failed = len(kinds) - kinds.count("PASS")
    print(f"{kinds.count('PASS')} passed, {failed} failed", flush=True)
    if failed:
        raise SystemExit(1)
    pool = make_pool(device, 524_288, 65_536)
    chain = Chain(pool)
    table = [measure(rows, pool, chain) for rows in arguments.rows]
    names = list(dict.fromkeys(name for result in table for name in result if isinstance(result[name], tuple)))
    print("microseconds that attention adds between its neighbours (alone)")
    print(f"{'':24s}" + "".join(f"{result['rows']:>16d}" for result in table))
    for name in names:
        cells = ("{:.1f} ({:.1f})".format(*result[name]) if name in result else "" for result in table)
        print(f"{name:24s}" + "".join(f"{cell:>16s}" for cell in cells))
    print(f"{'link without':24s}" + "".join(f"{result['bare_link_us']:>16.1f}" for result in table))
    if arguments.json:
        record = {"gpu": torch.cuda.get_device_name(), "checks": RESULTS, "times": table}
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
