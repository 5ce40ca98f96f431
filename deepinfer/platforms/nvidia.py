"""NVIDIA GPUs: fused kernels for Hopper, the reference operators where these do not reach (see docs/nvidia.md)."""

from __future__ import annotations

import torch

from deepinfer.platforms import host_limits


class NvidiaPlatform:
    """Runs the engine on one GPU. Taken only when asked for by name, until all of it has been tried on hardware."""

    name = "nvidia"
    is_preview = True

    def unavailable_because(self) -> str | None:
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is a build without CUDA"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no NVIDIA GPU (driver missing, or CUDA_VISIBLE_DEVICES hides it)"
        return None

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def available_memory_bytes(self) -> int:
        free, _total = torch.cuda.mem_get_info()
        return free

    def num_threads(self) -> int:
        return host_limits.num_processors()

    def facts(self) -> dict[str, str]:
        facts = {"platform": self.name, "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
        if torch.cuda.is_available():
            facts["GPU"] = self._gpu()
        return facts

    def _gpu(self) -> str:
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()}, SM{major}{minor}"
