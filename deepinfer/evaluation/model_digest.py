"""A short name for exactly this checkpoint, so that a score says what it is a score of."""

from __future__ import annotations

import hashlib
from pathlib import Path

MAX_CONTENT_BYTES = 1 << 30
_HEAD_BYTES = 1 << 20
_SUFFIXES = {".json", ".safetensors"}


def model_digest(directory: Path) -> str:
    """``sha256:...`` over names, sizes and contents of the checkpoint's files.

    Of a checkpoint of more than 1 GiB only the first MiB of each file counts (headers, configuration, tokenizer); the
    result then begins with ``sha256-heads:``.
    """
    files = sorted(file for file in directory.iterdir() if file.suffix in _SUFFIXES)
    sizes = [file.stat().st_size for file in files]
    is_whole = sum(sizes) <= MAX_CONTENT_BYTES
    digest = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if is_whole:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
            else:
                digest.update(hashlib.sha256(stream.read(_HEAD_BYTES)).digest())
    return f"{'sha256' if is_whole else 'sha256-heads'}:{digest.hexdigest()[:32]}"
