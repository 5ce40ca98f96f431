"""Let the backbone write on from training text: ``python -m tools.tiny.continuations`` makes ``continued.npy``.

A draft has to foresee what the model writes, not what a novelist wrote. The engine generates on the CPU, greedily and
without drafts; a piece that was stopped goes on from what is there.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np

from deepinfer import LLM, SamplingParams
from deepinfer.evaluation.tasks import filler_sentence
from tools.tiny.conversation import Encoder
from tools.tiny.run_state import SEED

PROMPT, ANSWER = 106, 64
"""Tokens, BOS included; three pieces fill a row of 512."""
_FILLER_SHARE = 0.15
_FILLER_SENTENCES = 3
_BATCH = 64


def prompts_of(encoder: Encoder, prose: np.ndarray, rng: random.Random, count: int) -> list[list[int]]:
    """Beginnings of training text, a few of them short everyday sentences."""
    prompts = []
    for _ in range(count):
        if rng.random() < _FILLER_SHARE:
            text = " ".join(filler_sentence(rng) for _ in range(_FILLER_SENTENCES))
            ids = encoder.text(text)[: PROMPT - 1]
        else:
            start = rng.randrange(len(prose) - PROMPT)
            ids = prose[start : start + PROMPT - 1].tolist()
        prompts.append([encoder.bos, *ids])
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--model", type=Path, default=Path("build/tiny/out/model"), help="of the finished backbone")
    parser.add_argument("--count", type=int, default=2560, help="pieces of text in the end")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    target, prose = args.data / "continued.npy", np.load(args.data / "prose.npy")
    encoder = Encoder.of_file(args.data / "tokenizer" / "tokenizer.json")
    rows = list(np.load(target)) if target.exists() else []
    llm = LLM(
        args.model, num_threads=args.threads, max_num_seqs=_BATCH, max_model_len=256, num_speculative_tokens=0,
        prefix_cache="off", disable_log_stats=True, progress=False,
    )  # fmt: skip
    began = time.monotonic()
    while len(rows) < args.count:
        prompts = prompts_of(encoder, prose, random.Random(f"{SEED} {len(rows)}"), min(_BATCH, args.count - len(rows)))
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        for prompt, output in zip(prompts, llm.generate(prompt_token_ids=prompts, sampling_params=params), strict=True):
            assert output.error is None, output.error
            row = np.zeros(2 + PROMPT + ANSWER, np.uint16)
            ids = [*prompt, *output.outputs[0].token_ids]
            row[:2], row[2 : 2 + len(ids)] = (len(prompt), len(ids)), ids
            rows.append(row)
        partial = target.with_name("continued_partial.npy")  # a stop in the middle must not cost what is there
        np.save(partial, np.stack(rows))
        partial.replace(target)
        print(f"{len(rows)} pieces after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
