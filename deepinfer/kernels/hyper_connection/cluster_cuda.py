"""Launches of ``cuda/hyper_connection_cluster.cu``, one between two sublayers, and of ``cuda/hyper_connection_mixes.cu``.

The bits are those of the two launches of :mod:`.launches_cuda`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.hyper_connection import launches_cuda
from deepinfer.kernels.hyper_connection.parts import Mixes, MixLogits

_SOURCE, _ENTRY = "hyper_connection_cluster.cu", "hc_cluster"
_COLUMNS, _TILE_ROWS = 32, 16
_FN_BYTES = 4 * 3 * 3 * 32 * 16
_STAGE_BYTES = 16 * 28 * 4
_MAX_SHARED_BYTES = 227 * 1024
_MIX_THREADS = 64
_SCALES = {None: 0, torch.uint8: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How the kernel is cut; no influence on any result."""

    size: int
    """CTAs that share the columns: 2, 4, 8 or 16."""
    clusters: int = 0
    """At most so many, each with several tiles of 16 rows one after the other; 0: as many as run at once."""

    def warps(self, hidden: int) -> int:
        """With columns, in a CTA; it has one more."""
        return hidden // (_COLUMNS * self.size)

    def shared_bytes(self, hidden: int) -> int:
        warps, pairs = self.warps(hidden), hidden // (2 * _COLUMNS)
        floats = 2 * (16 // self.size) * pairs * 26 + 2 * 16 * (pairs + 4) + 16
        return warps * _FN_BYTES + (2 + warps // 2) * _STAGE_BYTES + 4 * floats

    def accepts(self, hidden: int) -> bool:
        return hidden % (2 * _COLUMNS * self.size) == 0 and self.shared_bytes(hidden) <= _MAX_SHARED_BYTES


def choose_shape(hidden: int) -> ClusterShape | None:
    """As many CTAs as share the columns evenly: their time is what one multiprocessor can load."""
    return next((shape for shape in map(ClusterShape, (16, 8, 4, 2)) if shape.accepts(hidden)), None)


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("trunk", "update", "shared", "experts", "write_mix", "stream_mix", "read_mix", "logits", "fn"),
                *("norm", "scale", "base", "new_trunk", "h", "feature", "x", "rounded", "codes", "scales", "mixes"),
            )
        ),
        *((name, ctypes.c_int) for name in ("rows", "mix_stride", "read_stride", "clusters", "early")),
        *((name, ctypes.c_float) for name in ("norm_eps", "hc_eps")),
    )


class _MixArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "mixes")),
        ("rows", ctypes.c_int),
        ("hc_eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Sublayer:
    """What one sublayer's hyper-connection is made of."""

    fn: Tensor
    """``[24, 4 * hidden]`` float32."""
    norm_weight: Tensor
    """``[hidden]`` bf16 or float32."""
    scale: Tensor
    """``[3]`` float32."""
    base: Tensor
    """``[24]`` float32."""
    norm_eps: float
    hc_eps: float
    iterations: int
    """Of Sinkhorn."""


@dataclass(frozen=True, slots=True)
class Results:
    """What the kernel fills; None where not asked for."""

    trunk: Tensor
    feature: Tensor | None
    x: Tensor
    rounded: Tensor | None
    codes: Tensor | None
    scales: Tensor | None
    mixes: Tensor
    """``[rows, 24]`` float32: mixes or logits."""


def enter(
    trunk: Tensor,
    read_mix: Tensor | None,
    prior: Mixes | MixLogits | None,
    update: tuple[int, int, Tensor | None, Tensor | None, Tensor | None],
    sublayer: Sublayer,
    results: Results,
    leaves_logits: bool,
    shape: ClusterShape,
    early: bool,
    overlap: bool,
) -> bool:
    """Fill ``results``; other arguments as of ``hc_enter``.

    Args:
        read_mix: None with :class:`MixLogits`, which hold it.
        update: from ``update_arguments``.
    Returns:
        False, with nothing done, where such clusters do not fit the GPU.
    """
    rows, _, hidden = trunk.shape
    if rows == 0:
        return True
    kind, parts, *pointers = update
    is_lazy, tensors = isinstance(prior, MixLogits), prior if isinstance(prior, Mixes) else None
    defines = {
        "HIDDEN": hidden, "CLUSTER": shape.size, "WARPS": shape.warps(hidden), "LOOPS": 0, "KIND": kind, "K": parts,
        "FEATURE": int(results.feature is not None), "FROM_LOGITS": int(is_lazy), "TO_LOGITS": int(leaves_logits),
        "ITERATIONS": sublayer.iterations, "NORM_BF16": int(sublayer.norm_weight.dtype == torch.bfloat16),
        "ROUNDED": int(results.rounded is not None), "CODES": int(results.codes is not None),
        "SCALES": _SCALES[None if results.scales is None else results.scales.dtype],
    }  # fmt: skip
    threads, shared = 32 * (shape.warps(hidden) + 1), shape.shared_bytes(hidden)
    kernel = nvrtc.load_kernel(_SOURCE, _ENTRY, defines, trunk.device, shared_bytes=shared)
    limit = kernel.max_clusters(threads, shape.size, shared_bytes=shared)
    if limit == 0:
        return False
    tiles, clusters = -(-rows // _TILE_ROWS), min(limit, shape.clusters or limit)
    if tiles > clusters:
        kernel = nvrtc.load_kernel(_SOURCE, _ENTRY, defines | {"LOOPS": 1}, trunk.device, shared_bytes=shared)
    clusters = min(clusters, tiles)
    arguments = _Arguments(
        trunk.data_ptr(), *map(nvrtc.pointer, pointers),
        *((tensors.write.data_ptr(), tensors.stream.data_ptr()) if tensors else (0, 0)), nvrtc.pointer(read_mix),
        prior.logits.data_ptr() if isinstance(prior, MixLogits) else 0, sublayer.fn.data_ptr(),
        *map(nvrtc.pointer, (sublayer.norm_weight, sublayer.scale, sublayer.base, results.trunk, None)),
        *map(nvrtc.pointer, (results.feature, results.x, results.rounded, results.codes, results.scales)),
        results.mixes.data_ptr(), rows, tensors.write.stride(0) if tensors else 0,
        0 if read_mix is None else read_mix.stride(0), clusters, early, sublayer.norm_eps, sublayer.hc_eps,
    )  # fmt: skip
    kernel.launch(
        (clusters * shape.size, 1, 1), threads, [arguments], shared_bytes=shared, cluster=shape.size, overlap=overlap
    )
    return True


def make_mixes(prior: MixLogits, packed: Tensor) -> None:
    """Fill ``packed`` ``[rows, 24]`` with the mixes of ``prior``."""
    rows = packed.shape[0]
    if rows == 0:
        return
    arguments = _MixArguments(prior.logits.data_ptr(), packed.data_ptr(), rows, prior.eps)
    defines = {"ITERATIONS": prior.iterations}
    kernel = nvrtc.load_kernel("hyper_connection_mixes.cu", "hc_mixes", defines, packed.device)
    kernel.launch((-(-rows // _MIX_THREADS), 1, 1), _MIX_THREADS, [arguments], overlap=True)


def accepts(streams: int, hidden: int, device: torch.device) -> bool:
    """Whether the kernel takes this shape on this kind of device, if the clusters fit."""
    return launches_cuda.accepts(streams, hidden, device) and choose_shape(hidden) is not None
