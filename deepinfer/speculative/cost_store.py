"""Cost tables on disk, so that a restart need not measure again. Torch-free.

A file is ``deepinfer-cost-<key>.<random>.<unix seconds>.json``, with ``key`` the SHA-256 of everything that the times
depend on. Files are written under a temporary name, synced and renamed, so a reader sees a whole table or none.
Housekeeping removes expired tables, and only if both name and content are ours: the directory may hold anything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.speculative.cost_table import CostTable

logger = logging.getLogger(__name__)

_NAME = re.compile(r"deepinfer-cost-(?P<key>[0-9a-f]{64})\.[0-9a-f]{32}\.(?P<written>[0-9]{1,12})\.json")
_FORMAT = "deepinfer cost table 1"
_GRACE_S = 2 * 3600
"""An expired file is kept this long, for engines whose clock is behind or who are reading it."""


def cost_key(facts: Mapping[str, Any]) -> str:
    """The hash of all that the times depend on.

    Args:
        facts: JSON values by name: at least ``device`` (name), ``driver``, ``engine_version``, ``model`` (digest of its
            configuration), ``sizes``, ``is_staircase`` and the sizes of the process groups.
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class CostStore:
    """Reads and writes the tables of one directory.

    Args:
        directory: made if it does not exist.
        ttl_s: age in seconds from which a table is measured again.
        now: clock, unix seconds.
    Raises:
        ConfigError: the directory cannot be made, or ``ttl_s`` is not positive.
    """

    def __init__(self, directory: Path, ttl_s: float, *, now: Callable[[], float] = time.time) -> None:
        if not ttl_s > 0:
            raise ConfigError(
                f"the cost table's time to live is {ttl_s} s", why="it has to be positive", fix="try 86400"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the directory for cost tables is {str(directory)!r}",
                why=f"it cannot be made ({error.strerror})",
                fix="name a directory that can be written, or leave it out",
            ) from error
        self._directory = directory
        self._ttl_s = ttl_s
        self._now = now

    def load(self, key: str) -> CostTable | None:
        """The newest valid table under ``key`` that is not too old; None if there is none."""
        found = []
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and match["key"] == key and self._now() - int(match["written"]) <= self._ttl_s:
                found.append((int(match["written"]), path))
        for _, path in sorted(found, reverse=True):
            table = _read(path)
            if table is not None:
                return table
            logger.warning("%s is not a cost table of this format: it is passed over", path)
        return None

    def save(self, key: str, table: CostTable) -> Path:
        """Write a table and remove expired ones.

        Returns:
            The new file.
        """
        pairs = [list(pair) for pair in zip(table.sizes, table.times_ms, strict=True)]
        content = {"format": _FORMAT, "is_staircase": table.is_staircase, "rows_and_ms": pairs}
        path = self._directory / f"deepinfer-cost-{key}.{secrets.token_hex(16)}.{int(self._now())}.json"
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._remove_expired()
        return path

    def _remove_expired(self) -> None:
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and self._now() - int(match["written"]) > self._ttl_s + _GRACE_S and _read(path) is not None:
                path.unlink(missing_ok=True)  # another engine may have been faster


def _read(path: Path) -> CostTable | None:
    """The table in a file; None if it is not one of ours, or gone."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            return None
        return CostTable.of(content["rows_and_ms"], is_staircase=bool(content["is_staircase"]))
    except (OSError, ValueError, KeyError, TypeError):  # unreadable in one of many ways, and that is the answer
        return None
