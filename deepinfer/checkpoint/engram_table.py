"""The n-gram tables: hundreds of gigabytes of which a step needs a few thousand rows, so they stay on disk.

Rows are e4m3 codes with one ue8m0 scale per 32 columns (spec 3.2, TABLE), which is already the input format of the
projection that follows (spec 4.10 f).
"""

from __future__ import annotations

import abc
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.errors import CheckpointError

_CHUNK_ROWS = 256
"""Rows that one thread fetches at a time: large enough to hide the hand-over, small enough to spread page faults."""


class EngramTable(abc.ABC):
    """Random access to the rows of one table.

    Args:
        name: canonical tensor name, for messages.
        rows: number of rows.
        width: values per row, a multiple of 32.
    """

    def __init__(self, name: str, rows: int, width: int) -> None:
        self.name = name
        self.rows = rows
        self.width = width

    def gather(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Fetch rows.

        Args:
            ids: integer row numbers ``[n]``, on the CPU, in ``[0, rows)``; repeats are fine.
        Returns:
            codes uint8 ``[n, width]`` (e4m3) and scales uint8 ``[n, width/32]`` (ue8m0), in new CPU memory.
        Raises:
            IndexError: an id is outside the table.
            CheckpointError: a fetched scale is the NaN byte 255.
        """
        flat = ids.to(torch.int64).reshape(-1).numpy()
        if flat.size and not (flat.min() >= 0 and flat.max() < self.rows):
            raise IndexError(f"row ids {flat.min()} to {flat.max()} reach outside {self.name} with {self.rows} rows")
        codes, scales = self._fetch(flat)
        if scales.size and scales.max() == codecs.UE8M0_NAN:
            bad = int(flat[(scales == codecs.UE8M0_NAN).any(1)][0])
            raise CheckpointError(
                f"row {bad} of {self.name} has the scale byte 255",
                why="in ue8m0 that is NaN, which no row may have",
                fix="download the shard of this table again",
            )
        return torch.from_numpy(codes), torch.from_numpy(scales)

    def gather_dequantized(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Exact values ``[n, width]`` of rows; arguments and errors as :meth:`gather`."""
        return codecs.dequantize_table_rows(*self.gather(ids), dtype)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows ``[start, stop)``, for copying a whole table; results and errors as :meth:`gather`."""
        return self.gather(torch.arange(start, stop))

    @abc.abstractmethod
    def _fetch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of checked int64 ids, as new arrays."""


def map_readonly(path: Path, start: int, shape: tuple[int, int]) -> np.ndarray:
    """Map uint8 ``shape`` from byte ``start`` of a file, read-only, without read-ahead: access is random."""
    window = start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), window + shape[0] * shape[1], access=mmap.ACCESS_READ, offset=start - window)
    if hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapping, np.uint8, count=shape[0] * shape[1], offset=window).reshape(shape)


class MappedEngramTable(EngramTable):
    """A table in a shard. Memory holds only the pages of rows that were fetched, and the system may drop those.

    Args:
        codes: read-only map ``[rows, width]``.
        scales: read-only map ``[rows, width/32]``.
        num_threads: fetchers of a large gather; a cold row costs a disk access, and these run side by side.
    """

    def __init__(self, name: str, codes: np.ndarray, scales: np.ndarray, num_threads: int = 8) -> None:
        super().__init__(name, *codes.shape)
        self._codes = codes
        self._scales = scales
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="engram")

    def _fetch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = np.empty((ids.size, self.width), np.uint8)
        scales = np.empty((ids.size, self._scales.shape[1]), np.uint8)

        def fetch(begin: int) -> None:
            chunk = slice(begin, begin + _CHUNK_ROWS)
            # The ids are checked, and only the modes without a check write straight into ``out``.
            np.take(self._codes, ids[chunk], axis=0, out=codes[chunk], mode="clip")
            np.take(self._scales, ids[chunk], axis=0, out=scales[chunk], mode="clip")

        begins = range(0, ids.size, _CHUNK_ROWS)
        if len(begins) <= 1:
            for begin in begins:
                fetch(begin)
        else:
            list(self._threads.map(fetch, begins))  # the list makes an exception of a thread surface here
        return codes, scales
