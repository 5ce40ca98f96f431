"""Synthetic weights behind the interface of a checkpoint: for benchmarks at true widths without 510 GB of files.

Every tensor is a function of (seed, name), and every table row of (seed, name, row), so ranks and layer slices agree
without talking to one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.checkpoint.engram_table import EngramTable
from deepinfer.checkpoint.initial_values import Distribution, distribution_of, seed_of
from deepinfer.checkpoint.reader import select_parts, specs_of
from deepinfer.checkpoint.stored import StoredTensor, TensorSource, refuse_large_table
from deepinfer.checkpoint.tensor_specs import Kind, TensorSpec
from deepinfer.config.model import ModelConfig

_POOL = 262_147
"""Random elements drawn per tensor; larger tensors repeat them. Prime, so that no two rows of a weight are equal."""

E4M3_STD = 64.0  # standard deviation of e4m3 codes: 7 sigma below saturation
E2M1_STD = math.sqrt(68.5 / 8)  # of uniformly drawn e2m1 codes


class DummyCheckpoint(TensorSource):
    """Random weights for ``config``.

    Args:
        config: any model configuration; a layer slice is a configuration with fewer layers.
        seed: of all values.
        parts: as for :func:`deepinfer.checkpoint.reader.open_checkpoint`.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, *, parts: Iterable[str] | None = None) -> None:
        selected = select_parts(config, parts)
        super().__init__(config, specs_of(config, selected), selected)
        self.seed = seed

    def tensor(self, name: str, *, mapped: bool = False) -> StoredTensor:
        """Make one tensor (``mapped`` has no meaning here); see :meth:`TensorSource.tensor`."""
        spec = self.spec(name)
        if spec.kind is Kind.TABLE:
            refuse_large_table(spec)
            table = DummyEngramTable(spec, self.seed)
            codes, table_scale = table.gather(torch.arange(spec.shape[0]))
            return StoredTensor(spec.name, spec.kind, spec.shape, codes.view(torch.float8_e4m3fn), table_scale)
        rng = np.random.Generator(np.random.SFC64(seed_of(self.seed, spec.name)))
        drawn = self.distribution(spec)
        if not spec.kind.is_quantized:
            return StoredTensor(spec.name, spec.kind, spec.shape, _plain_values(spec, drawn, rng), None)
        if spec.kind is Kind.FP8:
            pool = codecs.e4m3_encode(E4M3_STD * _normal(rng, math.prod(spec.shape)))
            data, code_std = _repeat(pool, spec.stored_shape).view(torch.float8_e4m3fn), E4M3_STD
        else:
            size = min(math.prod(spec.stored_shape), _POOL)
            pool = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
            data, code_std = _repeat(pool, spec.stored_shape), E2M1_STD
        assert spec.scale_shape is not None
        exponent = math.floor(math.log2(drawn.std / code_std))
        coin = torch.from_numpy(rng.integers(0, 2, spec.scale_shape, dtype=np.uint8))
        return StoredTensor(spec.name, spec.kind, spec.shape, data, coin + (codecs.UE8M0_BIAS + exponent))

    def engram_table(self, layer_id: int) -> DummyEngramTable:
        """A table whose rows are made when they are fetched; see :meth:`TensorSource.engram_table`."""
        return DummyEngramTable(self.table_spec(layer_id), self.seed)

    def distribution(self, spec: TensorSpec) -> Distribution:
        # A router that follows the token, not a constant bias, spreads tokens evenly over the experts.
        if spec.name.endswith("gate.weight"):
            return Distribution(0.0, 0.5 / math.sqrt(spec.shape[-1]))
        if spec.name.endswith((".gate.bias", ".gate.bias_vl")):
            return Distribution(0.0, 1e-3)
        return distribution_of(spec, self.config.text.hc_mult)


def _normal(rng: np.random.Generator, wanted: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(min(wanted, _POOL), dtype=np.float32))


def _repeat(pool: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fill ``shape`` with ``pool`` over and over."""
    total = math.prod(shape)
    if total == pool.numel():
        return pool.view(shape)
    result = torch.empty(total, dtype=pool.dtype)
    whole = total // pool.numel() * pool.numel()
    result[:whole].view(-1, pool.numel()).copy_(pool.expand(whole // pool.numel(), -1))
    result[whole:] = pool[: total - whole]
    return result.view(shape)


def _plain_values(spec: TensorSpec, drawn: Distribution, rng: np.random.Generator) -> Tensor:
    dtype = torch.float32 if spec.kind is Kind.F32 else torch.bfloat16
    pool = drawn.std * _normal(rng, spec.num_parameters)
    if isinstance(drawn.mean, Tensor):
        return (_repeat(pool, spec.shape) + drawn.mean).to(dtype)
    return _repeat((pool + drawn.mean).to(dtype), spec.shape)


_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix64(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014): neighbouring counters give unrelated words."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_A
    state = (state ^ (state >> np.uint64(27))) * _MIX_B
    return state ^ (state >> np.uint64(31))


def normal_codes() -> np.ndarray:
    """256 e4m3 codes at equal steps of probability of a normal distribution."""
    quantiles = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256)
    return codecs.e4m3_encode(E4M3_STD * quantiles).numpy()


class DummyEngramTable(EngramTable):
    """Rows by hash: normal values with standard deviation near 0.5, nothing stored."""

    def __init__(self, spec: TensorSpec, seed: int) -> None:
        super().__init__(spec.name, *spec.shape)
        self.key = seed_of(seed, spec.name)
        self._code_of_byte = normal_codes()

    def _fetch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words = self.width // 8
        counters = ids.astype(np.uint64)[:, None] * np.uint64(words + 1) + np.arange(words + 1, dtype=np.uint64)
        noise = _mix64(counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self.key))  # [n, words + 1]
        codes = self._code_of_byte[noise[:, :words].view(np.uint8)]
        groups = self.width // codecs.GROUP
        spread = (noise[:, words:] >> (np.arange(groups, dtype=np.uint64) % np.uint64(32))) & np.uint64(1)
        scales = (codecs.UE8M0_BIAS - 7 - spread.astype(np.int64)).astype(np.uint8)  # 64 * 2**-7 = 0.5
        return codes, scales
