"""Read, change and write safetensors files byte by byte, to make broken checkpoints. Independent of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"


@dataclass
class RawTensor:
    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class RawCheckpoint:
    """Shards by file name, and the index. ``index`` None: write none."""

    directory: Path
    shards: dict[str, dict[str, RawTensor]] = field(default_factory=dict)
    index: dict[str, str] | None = None

    def shard_of(self, name: str) -> dict[str, RawTensor]:
        return next(shard for shard in self.shards.values() if name in shard)

    def __getitem__(self, name: str) -> RawTensor:
        return self.shard_of(name)[name]

    def remove(self, *names: str) -> None:
        for name in names:
            del self.shard_of(name)[name]
            if self.index is not None:
                del self.index[name]

    def add(self, name: str, tensor: RawTensor, shard: str | None = None) -> None:
        shard = shard or next(iter(self.shards))
        self.shards[shard][name] = tensor
        if self.index is not None:
            self.index[name] = shard

    def rename(self, old: str, new: str) -> None:
        file = next(file for file, shard in self.shards.items() if old in shard)
        tensor = self[old]
        self.remove(old)
        self.add(new, tensor, file)

    def write(self) -> None:
        for file, tensors in self.shards.items():
            write_shard(self.directory / file, tensors)
        index_file = self.directory / INDEX
        if self.index is None:
            index_file.unlink(missing_ok=True)
        else:
            index_file.write_text(json.dumps({"metadata": {}, "weight_map": self.index}))


def read_raw(directory: Path) -> RawCheckpoint:
    raw = RawCheckpoint(directory)
    for path in sorted(directory.glob("*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        raw.shards[path.name] = {
            name: RawTensor(
                entry["dtype"],
                entry["shape"],
                content[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]],
            )
            for name, entry in header.items()
        }
    raw.index = json.loads((directory / INDEX).read_text())["weight_map"]
    return raw


def write_shard(path: Path, tensors: dict[str, RawTensor]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        offset += len(tensor.data)
    write_header(path, header, b"".join(tensor.data for tensor in tensors.values()))


def write_header(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
