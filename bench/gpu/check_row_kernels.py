"""Query and key norms, the window ring and the step tables on a GPU: against their operators, then times over floor.

    python bench/gpu/check_row_kernels.py [--json FILE]

Times as in ``check_hyper_connection.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.check_hyper_connection import CUDA, NORM_EPS, bf16, copies, guarded, report, results, share, timed
from deepinfer.kernels.attention.query_key import query_key, store_ring
from deepinfer.kernels.step_tables import step_tables
from deepinfer.layers.caches import BLOCK_TOKENS, CacheGeometry
from deepinfer.layers.fused.device_rows import RowExpander
from deepinfer.ops import number_formats as nf
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.records import Fp8Record
from deepinfer.ops.rope import rope_angles, rope_frequencies, rotate

QUERY, KEY, ROPE = 1280, 512, 64


def check_query_key() -> None:
    rows = 33
    projected, query_norm, key_norm = bf16(rows, QUERY + KEY), torch.rand(QUERY).to(CUDA), torch.rand(KEY).to(CUDA)
    positions = torch.randint(0, 2**20, (rows,), device=CUDA)
    frequencies = rope_frequencies(1e4, ROPE, None).to(CUDA)
    cos, sin = rope_angles(positions, frequencies)
    records = torch.empty(rows, KEY + KEY // 32, dtype=torch.uint8, device=CUDA)
    ring = torch.full((99, records.shape[1]), 255, dtype=torch.uint8, device=CUDA)
    slots = torch.randperm(99, device=CUDA)[:rows].int()
    slots[3] = -1
    latent, rounded = query_key(
        projected, query_norm, key_norm, NORM_EPS, cos, sin, step_records=records, ring=ring, ring_slot=slots
    )
    wrong = share(latent, rms_norm(projected[:, :QUERY], query_norm.double(), NORM_EPS))
    exact = torch.equal(rounded.float(), nf.q8_round(latent))
    key = rotate(rms_norm(projected[:, QUERY:], key_norm.double(), NORM_EPS), cos, sin)
    of_key = share(records, Fp8Record(KEY).encode(key))
    live = slots >= 0
    stored = torch.equal(ring[slots[live].long()], records[live]) and int((ring == 255).all(1).sum()) == 99 - rows + 1
    other = torch.full_like(ring, 255)
    store_ring(records, slots, other)
    stored = stored and torch.equal(other, ring)
    ok = max(wrong, of_key) < 2e-3 and exact and stored
    report("query_key, store_ring", ok, f"share latent {wrong:.1e} record {of_key:.1e}; {exact=} {stored=}")


def check_step_tables() -> None:
    rows, keys_first = 7, True
    table, blocks, frequency = step_inputs(rows)
    geometry = CacheGeometry(num_blocks=64, num_slots=64, window=128, ring_length=134, pair_ring_length=7)
    expected = RowExpander(geometry, (1, 2), *frequency).expand(table, blocks, keys_first)
    found = tables_of(table, blocks, frequency, keys_first)
    same = torch.equal(found.window_index, expected.window_index) and torch.equal(found.ring_slot, expected.ring_slot)
    pairs = [(found.plain_angles, expected.plain_angles), (found.compressed_angles, expected.compressed_angles)]
    for ratio, stream in expected.streams.items():
        for name in ("num_visible", "emit_slot", "partner", "pair_store_slot"):
            a, b = getattr(found.streams[ratio], name), getattr(stream, name)
            same = same and (a is None or torch.equal(a, b))
        pairs.append((found.streams[ratio].entry_angles, stream.entry_angles))
    bits = [(a.view(torch.int32) - b.view(torch.int32)).abs() for p in pairs for a, b in zip(*p, strict=True)]
    most, many = max(int(b.max()) for b in bits), sum(int((b > 0).sum()) for b in bits)
    report(f"step_tables rows={rows}", same and most <= 1, f"{same=}; angles off by <= {most} ulp, {many} times")


def step_inputs(rows: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """One long chunk of 6 rows, then single rows; positions up to a million."""
    position = torch.randint(0, 2**20, (rows,))
    position[:6] = 77_777 + torch.arange(6)
    slot = torch.arange(rows).clamp_min(5) - 4
    start, end = position.clone(), position + 1
    start[:6], end[:6] = 77_777, 77_783
    zero = torch.zeros(rows, dtype=torch.long)
    table = torch.stack((zero, position, slot, zero, start, end, zero, slot - 1)).int()
    blocks = torch.randint(0, 64, (rows, 8192), dtype=torch.int32)
    frequency = rope_frequencies(1e4, ROPE, None).to(CUDA), rope_frequencies(1.6e5, ROPE, None).to(CUDA)
    return table.to(CUDA), blocks.to(CUDA), frequency


def tables_of(table: Tensor, blocks: Tensor, frequency: tuple[Tensor, Tensor], keys_first: bool):
    return step_tables(
        table, blocks, *frequency, keys_first=keys_first, ratios=(1, 2), window=128, ring_length=134,
        pair_ring_length=7, block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


def time_query_key(rows: int) -> None:
    query_norm, key_norm = torch.rand(QUERY).bfloat16().to(CUDA), torch.rand(KEY).bfloat16().to(CUDA)
    cos = sin = torch.rand(rows, ROPE // 2, device=CUDA)
    ring = torch.empty(max(rows, 512), KEY + KEY // 32, dtype=torch.uint8, device=CUDA)
    slots = torch.arange(rows, dtype=torch.int32, device=CUDA)
    num_bytes = rows * (2 * (QUERY + KEY) + 4 * QUERY + 528)
    own = [bf16(rows, QUERY + KEY) for _ in range(copies(num_bytes))]
    timed(
        f"query_key rows={rows}",
        num_bytes,
        [lambda p=p: query_key(p, query_norm, key_norm, NORM_EPS, cos, sin, ring=ring, ring_slot=slots) for p in own],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    guarded("query_key, store_ring", check_query_key)
    guarded("step_tables", check_step_tables)
    for rows in (1, 64, 256):
        guarded(f"query_key {rows}", lambda rows=rows: time_query_key(rows))
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
