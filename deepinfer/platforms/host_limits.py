"""How much memory and how many processors this process may use on the host, control groups included."""

from __future__ import annotations

import os
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 control groups write "no limit" as a number near 2**63


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Free memory of the host, or what the control group leaves if that is less. Bytes.

    Args:
        root: where ``proc`` and ``sys`` are looked up; tests point it to a made-up tree.
    """
    found = [number for number in (_mem_available(root), _control_group_left(root)) if number is not None]
    if found:
        return max(0, min(found))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # no procfs (macOS): all memory of the machine


def _mem_available(root: Path) -> int | None:
    lines = _read(root / "proc/meminfo")
    for line in (lines or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_group_left(root: Path) -> int | None:
    base = root / "sys/fs/cgroup"
    for limit_file, used_file in (
        (base / "memory.max", base / "memory.current"),  # version 2
        (base / "memory/memory.limit_in_bytes", base / "memory/memory.usage_in_bytes"),  # version 1
    ):
        limit, used = _read(limit_file), _read(used_file)
        if limit is not None and used is not None and limit.isdigit() and int(limit) < _NO_LIMIT:
            return int(limit) - int(used)
    return None


def num_processors(root: Path = Path("/")) -> int:
    """Processors that this process may run on, or the whole ones of its control group's quota if fewer; >= 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _read(root / "sys/fs/cgroup/cpu.max")
    if quota is not None:
        parts = quota.split()
        if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit() and int(parts[1]) > 0:
            count = min(count, int(parts[0]) // int(parts[1]))
    return max(1, count)


def _read(file: Path) -> str | None:
    """Text of a pseudo file without the line end; None where the system has no such file or keeps it private."""
    try:
        return file.read_text().strip()
    except OSError:
        return None
