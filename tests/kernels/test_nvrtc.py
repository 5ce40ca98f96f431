from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.kernels import nvrtc


def test_included_files_come_once_where_they_are_first(tmp_path, monkeypatch):
    (tmp_path / "kernel.cu").write_text('// head\n#include "a.cuh"\n#include "b.cuh"\nkernel\n')
    (tmp_path / "a.cuh").write_text('// a\n#include "b.cuh"\na\n')
    (tmp_path / "b.cuh").write_text("b\n")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    assert nvrtc.read_source("kernel.cu") == "// head\n// a\nb\na\nkernel\n"


@pytest.mark.parametrize("source", sorted(path.name for path in Path(nvrtc.SOURCES).glob("*.cu")))
def test_every_included_file_exists(source):
    assert "#include" not in nvrtc.read_source(source)
