"""The first layers of a model are a consistent model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.config.engine import ModelSource
from deepinfer.config.layer_slice import keep_first_layers, model_config_of
from deepinfer.config.model_file import model_config_from_dict
from deepinfer.errors import ConfigError


@pytest.mark.parametrize("num_layers", range(1, 41))
def test_every_length_of_the_released_model_is_consistent(released, num_layers):
    whole = model_config_from_dict(released).text
    part = keep_first_layers(whole, num_layers)
    assert len(part.layers) == num_layers
    for before, after in zip(whole.layers, part.layers, strict=False):
        assert (before.ratio, before.mode, before.kv_source) == (after.ratio, after.mode, after.kv_source)
        assert (before.index_source, before.has_engram) == (after.index_source, after.has_engram)
    assert part.num_nextn_predict_layers == (3 if num_layers == 40 else 0)


def test_all_layers_is_the_same_model(tiny):
    whole = model_config_from_dict(tiny).text
    assert keep_first_layers(whole, 8) == whole


@pytest.mark.parametrize("num_layers", [0, 9])
def test_a_length_that_the_model_does_not_have_is_refused(tiny, num_layers):
    with pytest.raises(ConfigError, match="8 layers"):
        keep_first_layers(model_config_from_dict(tiny).text, num_layers)


def test_model_config_of_a_source(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny), encoding="utf-8")

    def source(num_layers: int | None) -> ModelSource:
        return ModelSource(path=Path(tmp_path), tokenizer_path=tmp_path, load_format="dummy", num_layers=num_layers)

    assert model_config_of(source(None)) == model_config_from_dict(tiny)
    assert model_config_of(source(8)) == model_config_from_dict(tiny)
    assert model_config_of(source(4)).text.num_hidden_layers == 4
