"""Inputs of products in FP8 that leave their makers as codes (numerics ``fast``), on a GPU at the released sizes.

    python bench/gpu/check_row_codes.py [--json FILE] [--rows 513,8192]

Each maker's codes and scales against the two steps that they stand for: values in bf16, and ``row_codes`` of them. They
have to be equal bit for bit. Then the times of both ways in microseconds, medians of replayed graphs whose launches
rotate over inputs that the L2 does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import check_attention
from bench.gpu.check_hyper_connection import HC_EPS, HIDDEN, ITERATIONS, NORM_EPS
from bench.gpu.dense_cases import guarded, report, results, time_us
from deepinfer.kernels.attention.query_key import query_key, query_key_codes
from deepinfer.kernels.attention.sparse_attention import sparse_attention_codes
from deepinfer.kernels.dense.row_scaled import RowCodes, row_codes
from deepinfer.kernels.hyper_connection.finish import hc_finish
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from deepinfer.kernels.moe import grouped_fp8
from deepinfer.kernels.moe.expert_blocks import order_pairs
from deepinfer.kernels.moe.swiglu import swiglu_rounded, swiglu_row_codes
from deepinfer.ops.number_formats import q8_round

GROUPS, EXPERTS, TOP, LIMIT, QUERY, KEY, WIDTH = 8, 384, 6, 10.0, 1280, 512, 2304
NUM_INPUTS = 3


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def two_steps(values: Tensor, groups: int = 1) -> None:
    """As a product converts its input without codes."""
    for part in values.chunk(groups, dim=1):
        row_codes(part)


def compare(name: str, found: RowCodes, values: Tensor, groups: int = 1, limit: float = 0.0) -> None:
    """``limit``: of the share that may differ."""
    expected = RowCodes.of(values, groups)
    codes = (found.codes != expected.codes).float().mean().item()
    scales = (found.scales != expected.scales).float().mean().item()
    report(name, max(codes, scales) <= limit, f"share of codes that differ {codes:.1e}, of scales {scales:.1e}")


def compare_times(name: str, rows: int, ways: dict[str, Callable[[int], Any]]) -> None:
    times = {way: round(time_us(launch, NUM_INPUTS), 1) for way, launch in ways.items()}
    results.append({"case": name, "rows": rows, "us": times})
    print(f"     {name} rows {rows}: {times} us", flush=True)


def check_attention_output(rows: int) -> None:
    pool = check_attention.make_pool(torch.device("cuda"), 1 << 18, 1 << 14)
    for entry_format in ("fp4", "fp8"):
        batches = [check_attention.make_batch(rows, pool, entry_format, holes=True) for _ in range(NUM_INPUTS)]

        def codes_of(i: int, split_weights: bool = False, batches: list[check_attention.Batch] = batches) -> RowCodes:
            b = batches[i % NUM_INPUTS]
            return sparse_attention_codes(
                b.q, b.step_records, b.ring, b.window_index, b.entries, b.entry_format,  # type: ignore[arg-type]
                b.entry_slots, b.sink, b.cos, b.sin, GROUPS, split_weights=split_weights,
            )  # fmt: skip

        def values_of(i: int, split_weights: bool = False, batches: list[check_attention.Batch] = batches) -> Tensor:
            return batches[i % NUM_INPUTS].run(True, split_weights=split_weights)

        for split_weights in (False, True):
            name = f"attention rows {rows} {entry_format} split weights {split_weights}"
            compare(name, codes_of(0, split_weights), values_of(0, split_weights), GROUPS)
        ways = {"codes": codes_of, "values": values_of, "two steps": lambda i: two_steps(values_of(i), GROUPS)}
        compare_times(f"attention {entry_format}", rows, ways)


def check_finish(rows: int) -> None:
    norm = (torch.rand(HIDDEN, device="cuda") + 0.5).bfloat16()
    scale, base, fn = torch.ones(3, device="cuda"), randn(24), randn(24, 4 * HIDDEN) * HIDDEN**-0.5
    reads = []
    for seed in range(NUM_INPUTS):
        read = hc_write_read(randn(rows, 4, HIDDEN, seed=seed).bfloat16(), torch.rand(rows, 4, device="cuda"), fn)
        reads.append((read.partial, read.h))

    def finish(i: int, **wants: bool) -> Any:
        return hc_finish(*reads[i % NUM_INPUTS], norm, scale, base, NORM_EPS, HC_EPS, ITERATIONS, **wants)  # type: ignore[arg-type]

    usual = finish(0)
    for wants_xq in (False, True):
        found = finish(0, wants_xq=wants_xq, wants_row_codes=True)
        compare(f"hc_finish rows {rows} with values {wants_xq}", found.row_codes, usual.xq)
        same = all(torch.equal(a, b) for a, b in zip((found.x, *found.mixes), (usual.x, *usual.mixes), strict=True))
        report(f"hc_finish rows {rows} input and mixes", same)
    ways: dict[str, Callable[[int], Any]] = {
        "codes": lambda i: finish(i, wants_xq=False, wants_row_codes=True),
        "codes and values": lambda i: finish(i, wants_row_codes=True),
        "values": finish,
        "two steps": lambda i: two_steps(finish(i).xq),
    }
    compare_times("hc_finish", rows, ways)


def check_gather(rows: int) -> None:
    given = [q8_round(randn(rows, HIDDEN, seed=seed).bfloat16()).bfloat16() for seed in range(NUM_INPUTS)]
    codes = [RowCodes.of(x) for x in given]
    chosen = torch.rand(rows, EXPERTS, device="cuda").topk(TOP).indices.int()
    weights, blocks = torch.rand(rows, TOP, device="cuda"), order_pairs(chosen, EXPERTS, grouped_fp8.BLOCK)
    counters = torch.empty(2, dtype=torch.int32, device="cuda")

    def gather(inputs: list[Any], i: int) -> Any:
        return grouped_fp8.gather(inputs[i % NUM_INPUTS], weights, blocks, counters)

    (lines, of_pairs), (expected, expected_weights) = gather(codes, 0), gather(given, 0)
    places = blocks.place[blocks.place >= 0].long()
    same = torch.equal(lines.codes[:, places], expected.codes[:, places])
    same &= torch.equal(lines.powers[places], expected.powers[places])
    report(f"gather rows {rows}", same and torch.equal(of_pairs[places], expected_weights[places]))
    compare_times("gather", rows, {"codes": lambda i: gather(codes, i), "values": lambda i: gather(given, i)})


def check_small(rows: int) -> None:
    """The query's latent and the shared expert's activation."""
    projected = [randn(rows, QUERY + KEY, seed=seed).bfloat16() for seed in range(NUM_INPUTS)]
    norms = (torch.rand(QUERY, device="cuda") + 0.5).bfloat16(), (torch.rand(KEY, device="cuda") + 0.5).bfloat16()
    angles = randn(rows, 32).cos(), randn(rows, 32).sin()
    records = torch.empty(rows, KEY + KEY // 32, dtype=torch.uint8, device="cuda")

    def latent(make: Callable[..., Any], i: int) -> Any:
        return make(projected[i % NUM_INPUTS], *norms, NORM_EPS, *angles, step_records=records)

    # Triton lays the threads of its two kernels out apart, so the squares under the norm are added in another order: a
    # value next to a rounding boundary may fall on its other side.
    compare(f"latent rows {rows}", latent(query_key_codes, 0), latent(query_key, 0)[1], limit=1e-6)
    ways: dict[str, Callable[[int], Any]] = {
        "codes": lambda i: latent(query_key_codes, i),
        "two steps": lambda i: two_steps(latent(query_key, i)[1]),
    }
    compare_times("latent", rows, ways)
    gate_up = [randn(rows, 2 * WIDTH, seed=seed) * 3 for seed in range(NUM_INPUTS)]
    compare(f"swiglu rows {rows}", swiglu_row_codes(gate_up[0], LIMIT), swiglu_rounded(gate_up[0], LIMIT))
    ways = {
        "codes": lambda i: swiglu_row_codes(gate_up[i % NUM_INPUTS], LIMIT),
        "two steps": lambda i: two_steps(swiglu_rounded(gate_up[i % NUM_INPUTS], LIMIT)),
    }
    compare_times("swiglu", rows, ways)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[513, 8192])
    args = parser.parse_args()
    for rows in args.rows:
        for check in (check_attention_output, check_finish, check_gather, check_small):
            guarded(f"{check.__name__} {rows}", lambda check=check, rows=rows: check(rows))  # type: ignore[misc]
            torch.cuda.empty_cache()
    if args.json is not None:
        args.json.write_text(json.dumps({"command": " ".join(sys.argv), "results": results}, indent=1) + "\n")
    failed = [each for each in results if "error" in each or each.get("pass") is False]
    print(f"{len(failed)} failed" if failed else "all equal")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
