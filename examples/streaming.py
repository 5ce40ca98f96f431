"""Print text while it is generated, and stop when a sentence ends.

python examples/streaming.py "Once upon a time"
"""

from __future__ import annotations

import sys

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints.default_model import default_model


def main(prompt: str) -> int:
    params = SamplingParams(temperature=0.8, top_p=0.95, seq_seed=1, max_tokens=64)
    with LLM(model=default_model(), progress=False) as llm:
        print(prompt, end="")
        for delta in llm.stream(prompt, params):
            print(delta.text, end="", flush=True)
            if "." in delta.text:
                break  # leaving the loop ends the request and gives its memory back
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or "Once upon a time"))
