"""One request, the same answer: alone, in a crowd, in small steps, with drafts, without, planned ahead or not.

python examples/determinism.py "Once upon a time"
"""

from __future__ import annotations

import sys
from typing import Any

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints.default_model import default_model

CROWD = ["The sea", "def main():", "A river runs", "Numbers such as"]
VARIANTS: dict[str, dict[str, Any]] = {
    "alone, plain": {"num_speculative_tokens": 0, "async_scheduling": False},
    "with drafts": {},
    "in a crowd": {},
    "in a crowd, small steps": {"max_num_batched_tokens": 8, "adaptive_verification": True},
}


def main(prompt: str) -> int:
    model = default_model()
    params = SamplingParams(temperature=1.0, seq_seed=42, max_tokens=24, logprobs=0)
    answers = []
    for name, options in VARIANTS.items():
        prompts = [*CROWD, prompt] if "crowd" in name else [prompt]
        with LLM(model=model, max_num_seqs=8, progress=False, **options) as llm:
            *_, output = llm.generate(prompts, params, use_tqdm=False)
        (result,) = output.outputs
        answers.append((result.token_ids, result.cumulative_logprob))
        print(f"{name:24} log-probability {result.cumulative_logprob!r:22} {result.text!r}")
    same = all(answer == answers[0] for answer in answers)
    print("All the same, to the last bit." if same else "They differ, which docs/determinism.md does not allow.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or "Once upon a time"))
