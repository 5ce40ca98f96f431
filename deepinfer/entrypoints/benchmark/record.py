"""The result of one benchmark run as JSON values: measurements, ratios, and where they come from."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform as host
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.entrypoints.benchmark.measure import DecodeRecord, PrefillRecord
from deepinfer.entrypoints.benchmark.operation_counts import prefill_work
from deepinfer.platforms.selection import select_platform

LIMIT_OVERHEAD_SHARE = 0.15
"""Of the step time with 32 running sequences."""


def environment_record(config: EngineConfig) -> dict[str, Any]:
    """Machine, versions, commit and configuration of this process."""
    libraries = ("deepinfer", "torch", "numpy", "safetensors", "tokenizers")
    return {
        "machine": {
            "system": host.platform(),
            "processor": _processor(),
            **select_platform(config.device.platform).facts(),
        },
        "versions": {"python": host.python_version(), **{name: importlib.metadata.version(name) for name in libraries}},
        "commit": _commit(),
        "config": as_plain(config),
    }


def prefill_rows(records: Sequence[PrefillRecord], config: ModelConfig) -> list[dict[str, Any]]:
    """Prefill measurements, each beside what its length has to cost.

    ``required_us_per_token`` prices the two parts at the shortest length: what is outside the scan stays as it is, the
    scan grows with the entries that it has to score.
    """
    rows = []
    first = records[0]
    first_work = prefill_work(config, first.prompt_tokens)
    for record in records:
        work = prefill_work(config, record.prompt_tokens)
        fixed = first.us_per_token - first.scan_us_per_token
        scan = first.scan_us_per_token * (work.scored_entries / first_work.scored_entries if work.scored_entries else 1)
        rows.append(
            {
                "prompt_tokens": record.prompt_tokens,
                "num_steps": record.num_steps,
                "tokens_per_s": record.tokens_per_s,
                "us_per_token": record.us_per_token,
                "growth": record.us_per_token / first.us_per_token,
                "growth_of_multiplications": work.total / first_work.total,
                "required_us_per_token": fixed + scan,
                "measured_over_required": record.us_per_token / (fixed + scan),
                "us_per_token_outside_scan": record.us_per_token - record.scan_us_per_token,
                "scan_ns_per_entry": 1e3 * record.scan_us_per_token / work.scored_entries if work.scored_entries else 0,
                "multiplications_per_token": dataclasses.asdict(work),
                "op_seconds": record.op_seconds,
                "peak_rss_bytes": record.peak_rss_bytes,
            }
        )
    return rows


def decode_rows(records: Sequence[DecodeRecord]) -> list[dict[str, Any]]:
    """Decoding measurements with their phases as shares."""
    rows = []
    for record in records:
        shares = {name: seconds / record.seconds for name, seconds in record.phase_seconds.items()}
        rows.append(
            {
                "batch": record.batch,
                "num_steps": record.num_steps,
                "num_tokens": record.num_tokens,
                "tokens_per_s": record.tokens_per_s,
                "step_ms": record.step_ms,
                "overhead_share": record.overhead_share,
                "phase_shares": shares,
                "op_seconds": record.op_seconds,
            }
        )
    return rows


def load_average() -> list[float] | None:
    """Processes that ran or waited over the last 1, 5 and 15 minutes; None where the system does not say."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def as_plain(value: Any) -> Any:
    """Dataclasses, paths and tuples as JSON values."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    return short_path(value) if isinstance(value, Path) else value


def short_path(path: Path) -> str:
    """A path for a record that others read: the home directory is ``~``."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return host.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), host.processor())


def _commit() -> str | None:
    """Commit of the source tree that runs, with + for local changes; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    commands = (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in commands
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or a tree of another user
        return None
    return head + ("+" if changes else "")
