"""Synthetic weights made where they are used: tens of gigabytes a second on a GPU, and the same bits on a CPU.

The random words are a counter hash (SplitMix64's finaliser, Steele, Lea & Flood 2014) in 64-bit integer arithmetic, so
a value depends on (seed, tensor name, place) and on nothing else. Normal values come from tables of quantiles that are
made on the CPU. Distributions are those of :class:`~deepinfer.checkpoint.dummy.DummyCheckpoint`, the values are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.checkpoint.dummy import E2M1_STD, E4M3_STD, DummyCheckpoint, DummyEngramTable, normal_codes
from deepinfer.checkpoint.expert_stack import ExpertStack, empty_stack, expert_specs
from deepinfer.checkpoint.initial_values import Distribution, seed_of
from deepinfer.checkpoint.stored import StoredTensor, refuse_large_table
from deepinfer.checkpoint.tensor_specs import Kind, TensorSpec
from deepinfer.config.model import ModelConfig

_SLAB_WORDS = 1 << 24
"""64-bit words at a time: bounds the temporaries to half a gigabyte."""

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
_QUANTILES = 1 << 16


class DeviceDummyCheckpoint(DummyCheckpoint):
    """Random weights for ``config`` on ``device``.

    Args:
        config: any model configuration; a layer slice is a configuration with fewer layers.
        device: where tensors are made and stay.
        seed: of all values.
        parts: as for :func:`deepinfer.checkpoint.reader.open_checkpoint`.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, seed: int = 0, *, parts: Iterable[str] | None = None
    ) -> None:
        super().__init__(config, seed, parts=parts)
        self.device = device

    def tensor(self, name: str, *, mapped: bool = False) -> StoredTensor:
        """Make one tensor on the device; see :meth:`TensorSource.tensor`."""
        spec = self.spec(name)
        if spec.kind is Kind.TABLE:
            refuse_large_table(spec)
            codes, scales = self.table_rows(spec.name, torch.arange(spec.shape[0], device=self.device))
            return StoredTensor(spec.name, spec.kind, spec.shape, codes.view(torch.float8_e4m3fn), scales)
        drawn = self.distribution(spec)
        key = self._keys([spec.name])
        if not spec.kind.is_quantized:
            return StoredTensor(spec.name, spec.kind, spec.shape, self._plain(spec, drawn, key), None)
        data = torch.empty((1, math.prod(spec.stored_shape)), dtype=torch.uint8, device=self.device)
        fill_with_bytes(data, key)
        if spec.kind is Kind.FP8:
            data = _look_up(_normal_codes(self.device), data).view(torch.float8_e4m3fn)
        return StoredTensor(
            spec.name, spec.kind, spec.shape, data.view(spec.stored_shape), self._scales(spec, drawn, key)[0]
        )

    def expert_stack(self, block: str, projection: str) -> ExpertStack:
        """All routed experts of a block at once; equal to their single tensors.

        Args:
            block: ``layers.L`` or ``mtp.I``.
            projection: ``w1``, ``w2`` or ``w3``.
        """
        specs = expert_specs(self, block, projection)
        stack = empty_stack(specs, self.device)
        keys = self._keys([spec.name for spec in specs])
        fill_with_bytes(stack.codes.view(len(specs), -1), keys)
        stack.scales.copy_(self._scales(specs[0], self.distribution(specs[0]), keys))
        return stack

    def table_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of an n-gram table, equal to those of :meth:`engram_table`, made on the device.

        Args:
            ids: int64 ``[n]`` on the device, inside the table.
        Returns:
            codes uint8 ``[n, width]`` and scales uint8 ``[n, width / 32]``.
        """
        spec = self.spec(name)
        return device_table_rows(DummyEngramTable(spec, self.seed), ids)

    def _keys(self, names: list[str]) -> Tensor:
        """A stream per tensor: int64 ``[names]``."""
        keys = torch.tensor([seed_of(self.seed, name) for name in names], dtype=torch.int64)
        return keys.to(self.device, non_blocking=True)

    def _plain(self, spec: TensorSpec, drawn: Distribution, key: Tensor) -> Tensor:
        dtype = torch.float32 if spec.kind is Kind.F32 else torch.bfloat16
        mean = drawn.mean.to(self.device).flatten() if isinstance(drawn.mean, Tensor) else drawn.mean
        table = _normal_values(self.device).mul(drawn.std)
        if not isinstance(mean, Tensor):
            return self._from_table((table + mean).to(dtype), spec.num_parameters, key).view(spec.shape)
        return (self._from_table(table, spec.num_parameters, key) + mean).to(dtype).view(spec.shape)

    def _from_table(self, table: Tensor, count: int, key: Tensor) -> Tensor:
        """``count`` entries of a table of 65,536 values, drawn uniformly."""
        result = torch.empty(count, dtype=table.dtype, device=self.device)
        for begin in range(
            0, count, _SLAB_WORDS
        ):  # four draws per word, so a slab of values is a quarter slab of words
            end = min(begin + _SLAB_WORDS, count)
            words = random_words(key, begin // 4, -(-end // 4))
            index = words.view(torch.int16).flatten()[: end - begin].to(torch.int32) & (_QUANTILES - 1)
            torch.index_select(table, 0, index, out=result[begin:end])
        return result

    def _scales(self, spec: TensorSpec, drawn: Distribution, keys: Tensor) -> Tensor:
        """Two neighbouring exponents by the toss of a coin: uint8 ``[keys, *scale_shape]``."""
        assert spec.scale_shape is not None
        code_std = E4M3_STD if spec.kind is Kind.FP8 else E2M1_STD
        exponent = math.floor(math.log2(drawn.std / code_std))
        coins = torch.empty((len(keys), math.prod(spec.scale_shape)), dtype=torch.uint8, device=self.device)
        fill_with_bytes(coins, ~keys)
        return coins.bitwise_and_(1).add_(codecs.UE8M0_BIAS + exponent).view(len(keys), *spec.scale_shape)


def mix64_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on every element of an int64 tensor, in place."""
    for shift, factor in _MIXES:
        high = x >> shift
        high &= (1 << (64 - shift)) - 1  # an arithmetic shift copies the sign down; drop the copies
        x ^= high
        if factor != 1:
            x *= factor
    return x


def random_words(keys: Tensor, begin: int, end: int) -> Tensor:
    """Words ``begin`` to ``end`` of the stream of every key: int64 ``[keys, end - begin]``."""
    counters = torch.arange(begin + 1, end + 1, device=keys.device).mul_(_GOLDEN)
    return mix64_(keys[:, None] + counters)


def fill_with_bytes(out: Tensor, keys: Tensor) -> None:
    """Fill each row of ``out``, uint8 ``[keys, n]``, with the bytes of its key's stream."""
    num_bytes = out.shape[1]
    num_words = -(-num_bytes // 8)
    columns = min(num_words, _SLAB_WORDS)
    step = max(1, _SLAB_WORDS // columns)
    for top in range(0, len(keys), step):
        for left in range(0, num_words, columns):
            right = min(left + columns, num_words)
            source = random_words(keys[top : top + step], left, right).view(torch.uint8)
            target = out[top : top + step, 8 * left : 8 * right]
            target.copy_(source[:, : target.shape[1]])


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for a table of 256 bytes and uint8 ``[n, m]``, in place."""
    flat = index.view(-1)
    for begin in range(0, flat.numel(), 4 * _SLAB_WORDS):
        part = flat[begin : begin + 4 * _SLAB_WORDS]
        part.copy_(table.index_select(0, part.to(torch.int32)))
    return index


@cache
def _normal_codes(device: torch.device) -> Tensor:
    return torch.from_numpy(normal_codes()).to(device)


@cache
def _normal_values(device: torch.device) -> Tensor:
    """Quantiles of the normal distribution at equal steps of probability, float32, scaled to unit variance."""
    values = torch.special.ndtri((torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES)
    return (values / values.std()).to(torch.float32).to(device)


def device_table_rows(table: DummyEngramTable, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What ``table.gather(ids)`` gives, computed on the device of ``ids`` (int64 ``[n]``)."""
    words, groups = table.width // 8, table.width // codecs.GROUP
    counters = ids[:, None] * (words + 1) + torch.arange(words + 1, device=ids.device)
    noise = mix64_(counters.mul_(_GOLDEN).add_(table.key))  # [n, words + 1]
    drawn = noise[:, :words].contiguous().view(torch.uint8)
    codes = _look_up(_normal_codes(ids.device), drawn)
    spread = (noise[:, words:] >> (torch.arange(groups, device=ids.device) % 32)) & 1
    return codes, (codecs.UE8M0_BIAS - 7 - spread).to(torch.uint8)
