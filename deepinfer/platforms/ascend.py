"""Ascend NPUs through PyTorch's plug-in: looked for, not yet used."""

from __future__ import annotations

import importlib.util

import torch

from deepinfer.platforms import host_limits


class AscendPlatform:
    """Says whether the plug-in is installed and why this version does not run on it."""

    name = "ascend"
    is_preview = True

    def unavailable_because(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "PyTorch's plug-in torch_npu is not installed"
        return "this version has no Ascend backend yet (torch_npu is installed)"

    def device(self) -> torch.device:
        return torch.device("npu")  # a name that torch knows only once torch_npu is imported

    def available_memory_bytes(self) -> int:
        free, _total = torch.get_device_module("npu").mem_get_info()
        return free

    def num_threads(self) -> int:
        return host_limits.num_processors()

    def facts(self) -> dict[str, str]:
        installed = importlib.util.find_spec("torch_npu") is not None
        return {"platform": self.name, "torch": torch.__version__, "torch_npu": "installed" if installed else "absent"}
