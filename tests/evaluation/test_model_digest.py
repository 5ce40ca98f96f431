"""Digests of checkpoints."""

from __future__ import annotations

from deepinfer.evaluation import model_digest as module
from deepinfer.evaluation.model_digest import model_digest


def write(folder, **files: bytes):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def test_the_digest_is_of_contents_and_not_of_places(tmp_path):
    one = write(tmp_path / "one", config_json=b"{}", model_safetensors=b"abc", notes_txt=b"x")
    two = write(tmp_path / "two", config_json=b"{}", model_safetensors=b"abc", notes_txt=b"y")
    assert model_digest(one) == model_digest(two)
    assert model_digest(one).startswith("sha256:")
    write(two, model_safetensors=b"abd")
    assert model_digest(one) != model_digest(two)


def test_of_large_checkpoints_only_the_beginnings_count(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONTENT_BYTES", 10)
    monkeypatch.setattr(module, "_HEAD_BYTES", 4)
    one = write(tmp_path / "one", model_safetensors=b"abcd" + b"0" * 10)
    two = write(tmp_path / "two", model_safetensors=b"abcd" + b"1" * 10)
    assert model_digest(one) == model_digest(two)
    assert model_digest(one).startswith("sha256-heads:")
    write(two, model_safetensors=b"abcd" + b"1" * 11)
    assert model_digest(one) != model_digest(two)
