"""Overlapped launches for Triton kernels: the rule of :mod:`deepinfer.kernels.nvrtc`, for kernels without weights."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.kernels import nvrtc


@triton.jit
def wait_for_earlier_kernels(OVERLAP: tl.constexpr):
    """Comes first in a kernel. The next one may start at once and load its weights. Of the rest it may read ahead what
    had ended when this kernel began."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def launch_options(device: torch.device) -> dict[str, Any]:
    """What a launch passes on: the kernel's ``OVERLAP``, and that the launch may begin before others have ended."""
    return {"OVERLAP": True, "launch_pdl": True} if nvrtc.is_available(device) else {"OVERLAP": False}
