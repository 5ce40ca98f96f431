"""Make a random checkpoint on disk for tests (spec 11, "Weights"): every tensor matters and scales vary widely."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.checkpoint.initial_values import distribution_of, seed_of
from deepinfer.checkpoint.stored import StoredTensor
from deepinfer.checkpoint.tensor_specs import Kind, TensorSpec, expected_tensors
from deepinfer.checkpoint.tiny_tokenizer import build_tiny_tokenizer, tokenizer_settings
from deepinfer.checkpoint.writer import DEFAULT_SHARD_BYTES, store_tensor, write_checkpoint
from deepinfer.config.model import ModelConfig

_MIN_SCALE, _MAX_SCALE = -8, 2  # exponents that the scales have to span
_FP4_SPIKES = (0, 1, 2)  # exponents of groups with a single non-zero code
_MIN_GROUPS_FOR_SPIKES = 64


def make_random_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    *,
    seed: int,
    tokenizer_json: str | Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    prefix: str = "",
) -> None:
    """Write a random checkpoint with draft, vision (if configured) and tokenizer. Meant for tiny configurations.

    Args:
        directory: created when absent.
        config: the model.
        seed: of all values; each tensor depends on (seed, name) only.
        tokenizer_json: a tokenizer file to copy; default :func:`build_tiny_tokenizer`.
        max_shard_bytes, prefix: as for :func:`write_checkpoint`.
    """
    directory = Path(directory)
    tensors = _RandomTensors(config, seed)
    write_checkpoint(directory, config, tensors, max_shard_bytes=max_shard_bytes, prefix=prefix)
    if tokenizer_json is None:
        text = build_tiny_tokenizer(config)
    else:
        text = Path(tokenizer_json).read_text(encoding="utf-8")
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = json.dumps(tokenizer_settings(config), indent=1, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")


def random_tensor(spec: TensorSpec, num_streams: int, seed: int) -> StoredTensor:
    """Random values of one tensor in stored form, a function of (seed, name).

    FP8 and table scales are drawn from 2**-8 to 2**2 (larger where the values need it), which moves codes into the
    subnormal range without changing the size of the values. FP4 has no such room: there the groups themselves vary
    in size, and a few hold a single code under a large scale.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, spec.name))
    drawn = distribution_of(spec, num_streams)
    values = torch.randn(spec.shape, generator=generator) * drawn.std + drawn.mean
    if spec.kind is Kind.FP4:
        packed, scales = codecs.quantize_fp4_rows(*_vary_fp4_groups(values, generator))
        return StoredTensor(spec.name, spec.kind, spec.shape, packed, scales)
    if spec.kind not in (Kind.FP8, Kind.TABLE):
        return store_tensor(spec, values)
    assert spec.scale_shape is not None
    least = torch.randint(_MIN_SCALE, _MAX_SCALE + 1, spec.scale_shape, generator=generator)
    quantize = codecs.quantize_fp8_tiles if spec.kind is Kind.FP8 else codecs.quantize_table_rows
    codes, scales = quantize(values, least)
    return StoredTensor(spec.name, spec.kind, spec.shape, codes.view(torch.float8_e4m3fn), scales)


def _vary_fp4_groups(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Values with groups of different size, and the least scale exponents ``[O, I/32]``."""
    groups = values.unflatten(-1, (-1, codecs.GROUP)).flatten(0, 1)  # [groups, 32]
    factors = torch.randint(-3, 2, (len(groups), 1), generator=generator)  # keeps the mean square near one
    groups = torch.ldexp(groups, factors)
    least = torch.full((len(groups),), -codecs.UE8M0_BIAS)
    if len(groups) >= _MIN_GROUPS_FOR_SPIKES:
        chosen = torch.randperm(len(groups), generator=generator)[: len(_FP4_SPIKES)]
        for group, exponent in zip(chosen.tolist(), _FP4_SPIKES, strict=True):
            column = int(torch.randint(codecs.GROUP, (1,), generator=generator))
            sign = 1.0 if groups[group, column] > 0 else -1.0
            groups[group] = 0.0
            groups[group, column] = sign * 0.5 * 2.0**exponent  # the smallest code that is not zero
            least[group] = exponent
    return groups.view(values.shape), least.view(values.shape[0], -1)


class _RandomTensors(Mapping[str, StoredTensor]):
    """All tensors of a configuration, made when they are asked for."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._specs = expected_tensors(config)
        self._num_streams = config.text.hc_mult
        self._seed = seed

    def __getitem__(self, name: str) -> StoredTensor:
        return random_tensor(self._specs[name], self._num_streams, self._seed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
