"""Generate text for a few prompts, as one batch.

python examples/offline_inference.py "Once upon a time"

The checkpoint is the one that DEEPINFER_HF_MODEL_DIR names, or the small default model.
"""

from __future__ import annotations

import os
import sys

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints.default_model import default_model

PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):"]


def main(prompts: list[str]) -> int:
    model = os.environ.get("DEEPINFER_HF_MODEL_DIR") or default_model()
    with LLM(model=model, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32))
    for output in outputs:
        print(f"{output.prompt!r}\n  -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PROMPTS))
