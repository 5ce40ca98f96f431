"""A benchmark record as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer.entrypoints.benchmark.record import LIMIT_OVERHEAD_SHARE

_NUM_OPS_SHOWN = 8


def render(record: dict[str, Any]) -> str:
    """Everything that a reader wants first: speed, growth, overhead, operators, memory."""
    load = record["load_average"]
    parts = [
        f"model {record['model']}, {record['num_threads']} threads, load average {load['before']} to {load['after']}"
    ]
    if record["prefill"]:
        parts += ["\nPrefill, one prompt at a time:", _prefill(record["prefill"])]
        parts += [_ops("Operators in the longest prompt", record["prefill"][-1])]
    if record["prefix_cache"]:
        parts += ["\nThe same prompt again, from the prefix cache:", _hits(record["prefix_cache"])]
    if record["decode"]:
        parts += ["\nDecode:", _decode(record["decode"])]
        parts += [_ops(f"Operators with {record['decode'][-1]['batch']} sequences", record["decode"][-1])]
    memory = record["memory"]
    parts.append(
        f"\nMemory: caches {memory['cache_bytes']:,} bytes, peak resident {memory['peak_rss_bytes']:,} bytes"
        f" ({memory['peak_rss_after_load_bytes']:,} after loading)"
    )
    parts.append("Times of a shared or busy machine are noise: compare ratios, not milliseconds.")
    return "\n".join(parts)


def _prefill(rows: Sequence[dict[str, Any]]) -> str:
    head = ("tokens", "tokens/s", "µs/token", "growth", "required", "measured/required", "outside scan", "ns/entry")
    body = [
        (
            f"{row['prompt_tokens']}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['us_per_token']:.0f}",
            f"{row['growth']:.2f}x",
            f"{row['required_us_per_token']:.0f}",
            f"{row['measured_over_required']:.2f}",
            f"{row['us_per_token_outside_scan']:.0f}",
            f"{row['scan_ns_per_entry']:.0f}",
        )
        for row in rows
    ]
    last = rows[-1]
    note = (
        f"Multiplications per token grow {last['growth_of_multiplications']:.2f}x. 'required' keeps the cost outside"
        " the index scan as at the shortest\nprompt and lets the scan grow with the entries that it has to score."
    )
    return _table(head, body) + "\n" + note


def _hits(rows: Sequence[dict[str, Any]]) -> str:
    head = ("tokens", "cached", "hit/cold")
    body = [
        (f"{row['prompt_tokens']}", f"{100 * row['cached_share']:.0f} %", f"{row['hit_over_cold']:.3f}") for row in rows
    ]
    return _table(head, body)


def _decode(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["phase_shares"]))
    head = ("sequences", "tokens/s", "ms/step", *names, "overhead")
    body = [
        (
            f"{row['batch']}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['step_ms']:.1f}",
            *(f"{100 * row['phase_shares'].get(name, 0.0):.1f} %" for name in names),
            f"{100 * row['overhead_share']:.1f} %",
        )
        for row in rows
    ]
    limit = f"{LIMIT_OVERHEAD_SHARE:.0%}"
    note = f"Overhead is everything but forward, sampler and draft; with 32 sequences it has to stay below {limit}."
    return _table(head, body) + "\n" + note


def _ops(title: str, row: dict[str, Any]) -> str:
    total = sum(row["op_seconds"].values()) or 1.0
    largest = sorted(row["op_seconds"].items(), key=lambda item: -item[1])[:_NUM_OPS_SHOWN]
    return f"{title}: " + ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in largest)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
