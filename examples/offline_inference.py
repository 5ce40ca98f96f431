"""Generate text for a few prompts with the checkpoint that DEEPINFER_HF_MODEL_DIR names.

DEEPINFER_HF_MODEL_DIR=/path/to/checkpoint python examples/offline_inference.py "Once upon a time"
"""

from __future__ import annotations

import os
import sys

from deepinfer import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):"]


def main(prompts: list[str]) -> int:
    model = os.environ.get("DEEPINFER_HF_MODEL_DIR")
    if not model:
        print("Set DEEPINFER_HF_MODEL_DIR to a checkpoint directory; `make demo` makes a small one.", file=sys.stderr)
        return 2
    llm = LLM(model=model, max_num_seqs=8)
    texts = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32))
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt!r}\n  -> {text!r}")
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PROMPTS))
