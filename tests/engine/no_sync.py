"""``NoSync``: notices every place where a program asks a tensor for a value, and so would wait for an accelerator.

On a CPU nothing waits, so each of these calls is caught as such: on the ways from a tensor to Python (``item``,
``tolist``, ``bool``, ``numpy``, ``cpu``) and in operators whose result has a size that depends on values (``nonzero``,
indexing with a mask, ``unique``, ``bincount``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = str(Path(__file__).parents[2] / "deepinfer")
_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
_OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")


class NoSync(TorchDispatchMode):
    """Collects, while it is entered, the lines of the package that read values.

    Attributes:
        found: for each function, such as ``"ops/moe.py: moe"``, the first line in it, ``"line 88: x.tolist()"``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> NoSync:
        for name in _METHODS:
            self._patches.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name)))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.undo()

    def _noting(self, method: Any) -> Any:
        def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._note()
            return method(tensor, *args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        counts = name == "repeat_interleave" and func._overloadname == "Tensor"
        if name in _OPERATORS or by_mask or counts:
            self._note()
        return func(*args, **(kwargs or {}))

    def _note(self) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(PACKAGE):
                where = f"{Path(name).relative_to(PACKAGE)}: {frame.f_code.co_name}"
                if where not in self.found:
                    line = Path(name).read_text(encoding="utf-8").splitlines()[frame.f_lineno - 1].strip()
                    self.found[where] = f"line {frame.f_lineno}: {line}"
                return
            frame = frame.f_back  # type: ignore[assignment]
        raise AssertionError("a value was read outside the package while the guard was on")
