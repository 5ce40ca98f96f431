"""The CPU: always there, and the platform on which every feature is tested."""

from __future__ import annotations

import platform as host

import torch

from deepinfer.platforms import host_limits


class CpuPlatform:
    """Runs the whole engine with PyTorch's CPU operators."""

    name = "cpu"
    is_preview = False

    def unavailable_because(self) -> str | None:
        return None

    def device(self) -> torch.device:
        return torch.device("cpu")

    def available_memory_bytes(self) -> int:
        return host_limits.available_memory_bytes()

    def num_threads(self) -> int:
        """Threads that torch would use (``OMP_NUM_THREADS`` counts), but no more than the processors we may use.

        torch counts the machine's cores; under a container's quota more threads than processors only wait for one
        another.
        """
        return min(torch.get_num_threads(), host_limits.num_processors())

    def facts(self) -> dict[str, str]:
        return {
            "platform": self.name,
            "machine": host.machine(),
            "processors": str(host_limits.num_processors()),
            "threads": str(self.num_threads()),
            "available memory": f"{self.available_memory_bytes() / 2**30:.1f} GiB",
            "torch": torch.__version__,
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
        }
