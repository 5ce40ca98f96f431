"""How likely the model finds a text: the log-probability of each of its tokens.

python examples/score_text.py "The sea is blue."
"""

from __future__ import annotations

import math
import sys

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints.default_model import default_model


def main(text: str) -> int:
    # One token has to be generated; raw means the model's own distribution, whatever the sampling settings.
    params = SamplingParams(max_tokens=1, prompt_logprobs=True, logprobs_mode="raw")
    with LLM(model=default_model(), progress=False) as llm:
        (output,) = llm.generate([text], params, use_tqdm=False)
    total = 0.0
    for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
        if entry is not None:  # nothing comes before the first token
            total += entry[token].logprob
            print(f"{entry[token].logprob:9.3f}  rank {entry[token].rank:<6} {entry[token].decoded_token!r}")
    count = len(output.prompt_token_ids) - 1
    print(f"{total:9.3f}  perplexity {math.exp(-total / max(count, 1)):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or "The sea is blue."))
