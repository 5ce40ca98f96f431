"""Memory and processors as a container sees them."""

from __future__ import annotations

import os

import pytest

from deepinfer.platforms.host_limits import available_memory_bytes, num_processors


def _write(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


MEMINFO = "MemTotal:       2000 kB\nMemAvailable:   1000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": MEMINFO}, 1_024_000),
        (
            {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5"},
            1_024_000,
        ),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "9000", "sys/fs/cgroup/memory.current": "5000"}, 4000),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "20"}, 0),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
            },
            1_024_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "8000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
            },
            7000,
        ),
    ],
)
def test_memory_is_the_smaller_of_host_and_control_group(tmp_path, files, expected):
    _write(tmp_path, files)
    assert available_memory_bytes(tmp_path) == expected


def test_without_procfs_the_whole_memory_counts(tmp_path):
    assert available_memory_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_processors_respect_the_quota(tmp_path):
    unlimited = num_processors(tmp_path)
    assert unlimited >= 1
    _write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000"})
    assert num_processors(tmp_path) == unlimited
    _write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000"})
    assert num_processors(tmp_path) == 1
