"""Read a checkpoint's ``config.json`` into a :class:`~deepinfer.config.model.ModelConfig`, and write one back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.config.model import ModelConfig, QuantizationConfig, TextConfig, VisionConfig, YarnConfig
from deepinfer.config.unknown_keys import Section, check_unknown_keys
from deepinfer.errors import CheckpointFileError, ConfigError

_TOP_KEYS = (
    "architectures",
    "model_type",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "tokenizer_compatibility",
    "text_config",
    "vision_config",
    "quantization_config",
)
# V4 features that V4.1 does not have: a file that turns one on describes another model (spec 2.4, item 6).
_REFUSED_WHEN_SET = ("overlap_compression", "compress_overlap", "compressor_ape", "use_hc_norm")


def load_model_config(path: str | Path) -> ModelConfig:
    """Read ``config.json`` from a checkpoint directory (or the file itself) and check every key.

    Raises:
        CheckpointFileError: the directory or the file does not exist.
        ConfigError: a key is missing, malformed or unsupported; the message names key, value and what is supported.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise CheckpointFileError(
            f"model path {path} does not exist", why="a checkpoint is a directory", fix="check it"
        )
    if not file.is_file():
        raise CheckpointFileError(
            f"no config.json in {path}", why="a checkpoint directory holds config.json", fix="point to that directory"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads, endless brackets
        raise ConfigError(f"{file} is not JSON", why=str(error), fix="download the file again") from error
    return model_config_from_dict(raw)


def model_config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """Build and check the configuration from parsed JSON. Raises as :func:`load_model_config`."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config is a {type(raw).__name__}", why="it has to be a JSON object", fix="check the file")
    architectures = _required(raw, "architectures", "")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ConfigError(
            f"config key architectures is {architectures!r}",
            why="exactly one architecture is expected",
            fix="supported: ['DeepseekV41ForCausalLM']",
        )
    if not isinstance(architectures[0], str):
        raise ConfigError(
            f"config key architectures is {architectures!r}",
            why="it has to be a list of names",
            fix="supported: ['DeepseekV41ForCausalLM']",
        )
    check_unknown_keys(_sections(raw))
    vision = raw.get("vision_config")
    return ModelConfig(
        architecture=architectures[0],
        model_type=_required(raw, "model_type", ""),
        dtype=_required(raw, "dtype", ""),
        bos_token_id=_integer(raw, "bos_token_id"),
        eos_token_id=_integer(raw, "eos_token_id"),
        pad_token_id=_integer(raw, "pad_token_id"),
        image_token_id=_integer(raw, "image_token_id"),
        tokenizer_compatibility=raw.get("tokenizer_compatibility", "release"),
        text=_text_config(_section(raw, "text_config")),
        vision=None if vision is None else _vision_config(_section(raw, "vision_config")),
        quantization=_quantization_config(_section(raw, "quantization_config")),
    )


def model_config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The JSON form of ``config``; reading it back gives an equal configuration."""
    text = {key: value for key, value in _plain(config.text).items() if value is not None}
    text["model_type"] = "deepseek_v41_text"
    if config.text.candidate_source_layer_id is None:
        text["candidate_source_layer_id"] = None
    if config.text.rope_scaling is None:
        text["rope_scaling"] = None
    else:
        text["rope_scaling"] = {"rope_type": "yarn", **_plain(config.text.rope_scaling)}
    result: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": config.model_type,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "image_token_id": config.image_token_id,
        "tokenizer_compatibility": config.tokenizer_compatibility,
        "text_config": text,
        "quantization_config": _plain(config.quantization),
    }
    if config.vision is not None:
        result["vision_config"] = {"model_type": "deepseek_v41_vision", **_plain(config.vision)}
    return result


def _plain(value: Any) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        fields[field.name] = list(item) if isinstance(item, tuple) else item
    return fields


def _required(raw: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in raw or raw[key] is None:
        raise ConfigError(
            f"config key {where}{key} is missing", why="it has no default", fix="use the released config.json"
        )
    return raw[key]


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = _required(raw, key, "")
    return _typed(value, "int", key)


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = _required(raw, key, "")
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"config key {key} is {section!r}", why="it has to be an object", fix="use the released config.json"
        )
    return section


def _typed(value: Any, annotation: str, key: str) -> Any:
    """Check ``value`` against a field's annotation; JSON integers pass as floats, lists become tuples."""
    optional = annotation.endswith("| None")
    kind = annotation.removesuffix("| None").strip()
    if value is None and optional:
        return None
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # an integer beyond the range of floats
            return math.inf if value > 0 else -math.inf
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind.startswith("tuple") and isinstance(value, (list, tuple)):
        return tuple(_typed(item, "int", f"{key}[{index}]") for index, item in enumerate(value))
    wanted = "a list of integers" if kind.startswith("tuple") else f"of type {kind}"
    raise ConfigError(
        f"config key {key} is {value!r}", why=f"it has to be {wanted}", fix="use the released config.json"
    )


def _fields_from(cls: type, section: Mapping[str, Any], where: str, special: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = dict(special)
    for field in dataclasses.fields(cls):
        if field.name in special:
            continue
        has_default = field.default is not dataclasses.MISSING
        if field.name in section:
            value = section[field.name]
            if value is None and has_default:
                continue
            values[field.name] = _typed(value, str(field.type), f"{where}.{field.name}")
        elif not has_default:
            _required(section, field.name, f"{where}.")
    return values


def _sections(raw: Mapping[str, Any]) -> list[Section]:
    """What the file may hold. ``num_hash_layers`` is left over from V4 (spec 2.2, last paragraph)."""
    text = raw.get("text_config")
    rope = text.get("rope_scaling") if isinstance(text, Mapping) else None
    return [
        Section("", raw, _TOP_KEYS),
        Section("text_config.", text, _names(TextConfig), (*_REFUSED_WHEN_SET, "num_hash_layers")),
        Section("text_config.rope_scaling.", rope, _names(YarnConfig), ("rope_type", "type")),
        Section("vision_config.", raw.get("vision_config"), _names(VisionConfig)),
        Section("quantization_config.", raw.get("quantization_config"), _names(QuantizationConfig)),
    ]


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _text_config(section: Mapping[str, Any]) -> TextConfig:
    for key in _REFUSED_WHEN_SET:
        if section.get(key):
            raise ConfigError(
                f"config key text_config.{key} is {section[key]!r}",
                why="V4.1 has no such part",
                fix="supported: absent",
            )
    special: dict[str, Any] = {"rope_scaling": _yarn_config(section.get("rope_scaling"))}
    return TextConfig(**_fields_from(TextConfig, section, "text_config", special))


def _yarn_config(raw: Any) -> YarnConfig | None:
    if raw is None:
        return None
    where = "text_config.rope_scaling"
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config key {where} is {raw!r}", why="it has to be an object or null", fix="see the release")
    kind = raw.get("rope_type", raw.get("type"))
    if kind != "yarn" or raw.get("type", kind) != "yarn":
        raise ConfigError(
            f"config key {where}.rope_type is {kind!r}", why="only YaRN is defined", fix="supported: 'yarn'"
        )
    for key in ("factor", "original_max_position_embeddings"):
        _required(raw, key, f"{where}.")  # guessing the training length would bend every long prompt, quietly
    return YarnConfig(**_fields_from(YarnConfig, raw, where, {}))


def _vision_config(section: Mapping[str, Any]) -> VisionConfig:
    return VisionConfig(**_fields_from(VisionConfig, section, "vision_config", {}))


def _quantization_config(section: Mapping[str, Any]) -> QuantizationConfig:
    for field in dataclasses.fields(QuantizationConfig):
        _required(section, field.name, "quantization_config.")
    return QuantizationConfig(**_fields_from(QuantizationConfig, section, "quantization_config", {}))
