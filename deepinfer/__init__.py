"""DeepInfer: an inference engine for DeepSeek-V4.1-Flash.

from deepinfer import LLM, SamplingParams

with LLM(model="path/to/checkpoint") as llm:
    for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deepinfer.engine.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.sampling.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StreamDelta"]

_HOME = {
    "LLM": "deepinfer.entrypoints.llm",
    "SamplingParams": "deepinfer.sampling.params",
    "CompletionOutput": "deepinfer.engine.outputs",
    "Logprob": "deepinfer.engine.outputs",
    "RequestOutput": "deepinfer.engine.outputs",
    "StreamDelta": "deepinfer.engine.outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import deepinfer`` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module deepinfer has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
