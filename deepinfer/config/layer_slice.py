"""A shorter model with the same widths: the first layers of a configuration, for measurements with dummy weights."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.config.engine import ModelSource
from deepinfer.config.model import ModelConfig, TextConfig
from deepinfer.config.model_file import load_model_config
from deepinfer.errors import ConfigError


def model_config_of(source: ModelSource) -> ModelConfig:
    """The model configuration of ``source``, cut to ``num_layers`` where that is set.

    Raises:
        CheckpointFileError, ConfigError: as :func:`~deepinfer.config.model_file.load_model_config`.
    """
    config = load_model_config(source.path)
    if source.num_layers is None or source.num_layers == config.text.num_hidden_layers:
        return config
    return replace(config, text=keep_first_layers(config.text, source.num_layers))


def keep_first_layers(text: TextConfig, num_layers: int) -> TextConfig:
    """``text`` with its first ``num_layers`` layers; what belongs to a dropped layer goes with it.

    The draft takes features from late layers, so it is kept only if all of them are. Engram bucket primes are drawn in
    layer order, so those of the kept layers stay what they were.

    Raises:
        ConfigError: the model does not have that many layers.
    """
    if not 1 <= num_layers <= text.num_hidden_layers:
        raise ConfigError(
            f"num_layers is {num_layers}",
            why=f"the model has {text.num_hidden_layers} layers",
            fix=f"give a number from 1 to {text.num_hidden_layers}",
        )

    def kept(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(layer for layer in layers if layer < num_layers)

    targets = text.dspark_target_layer_ids
    num_stages = text.num_nextn_predict_layers if kept(targets) == targets else 0
    candidate = text.candidate_source_layer_id
    index_k = text.index_k_source_layer_ids
    engram = kept(text.engram_layer_ids)
    return replace(
        text,
        num_hidden_layers=num_layers,
        compress_ratios=text.compress_ratios[:num_layers] + (0,) * num_stages,
        kv_source_layer_ids=kept(text.kv_source_layer_ids),
        index_source_layer_ids=kept(text.index_source_layer_ids),
        index_k_source_layer_ids=None if index_k is None else kept(index_k),
        candidate_source_layer_id=candidate if candidate is not None and candidate < num_layers else None,
        engram_layer_ids=engram,
        engram_num_embeddings=text.engram_num_embeddings[: len(engram)],
        num_nextn_predict_layers=num_stages,
        dspark_target_layer_ids=targets if num_stages else (),
    )
