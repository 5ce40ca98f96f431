"""The same text with and without drafts: how many tokens a step gives, and what it saves.

python examples/speculation.py "Once upon a time"
"""

from __future__ import annotations

import sys
import time

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints.default_model import default_model


def main(prompt: str) -> int:
    model = default_model()
    params = SamplingParams(temperature=0.7, seq_seed=1, max_tokens=48, ignore_eos=True)
    variants = {
        "no drafts": {"num_speculative_tokens": 0},
        "4 drafts": {"num_speculative_tokens": 4},
        "scheduled": {"num_speculative_tokens": 4, "adaptive_verification": True},  # as many as pay, or none
    }
    texts = set()
    for name, options in variants.items():
        with LLM(model=model, max_num_seqs=4, progress=False, **options) as llm:
            begin = time.perf_counter()
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            elapsed_s = time.perf_counter() - begin
        (result,) = output.outputs
        texts.add(result.text)
        print(
            f"{name:10} {len(result.token_ids) / elapsed_s:6.1f} tokens/s, "
            f"{len(result.token_ids) / result.num_steps:.2f} tokens per step, "
            f"{result.num_drafts_accepted} of {result.num_drafts_verified} drafts accepted"
        )
    print(f"{prompt!r} ->", *map(repr, texts))
    # The default sampler draws the token of a position with noise of (seed, position), whatever was proposed for it.
    return 0 if len(texts) == 1 else 1


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or "Once upon a time"))
