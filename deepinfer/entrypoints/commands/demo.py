"""``deepinfer demo``: from nothing to generated text; what ``make demo`` runs."""

from __future__ import annotations

import argparse
import time

from deepinfer.engine.outputs import RequestOutput
from deepinfer.entrypoints.default_model import TRAINED, describe_model
from deepinfer.entrypoints.engine_args import add_model_arguments, load_llm
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.terminal import write
from deepinfer.sampling.params import SamplingParams

PROMPTS = ("Once upon a time", "The engine reads a prompt and", "There is a river behind", "def main():")

_NEXT = """
What to try next:
  deepinfer chat                        talk to the model (Ctrl-C stops an answer)
  deepinfer generate "Some text" --max-tokens 64 --temperature 0.8
  deepinfer doctor                      what this machine and this configuration come to
  deepinfer inspect {model}
  deepinfer generate --model /path/to/a/DeepSeek-V4.1-Flash/checkpoint "Some text"
(`make demo` sets up .venv: run .venv/bin/deepinfer, or activate the environment first.)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens per prompt (default: 48)")
    add_model_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Stream a few answers, then run them all as one batch."""
    begin = time.perf_counter()
    with load_llm(namespace, max_num_seqs=32) as llm:
        config = llm.engine.config
        print(f"DeepInfer demo on {config.device.platform}, numerics {config.numerics}.")
        print(f"This is a {describe_model(config.model.path)}.")
        if config.model.path != TRAINED:
            print("What to look at is that the whole model runs from a checkpoint in the released format.")
        print(f"Ready after {time.perf_counter() - begin:.1f} s.\n\nOne after another, as they are generated (greedy):")
        params = SamplingParams(temperature=0.0, max_tokens=namespace.max_tokens)
        texts = [_stream(llm, prompt, params) for prompt in PROMPTS]
        _batch(llm, params, texts)
    print(_NEXT.format(model=config.model.path))
    return 0


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> str:
    write(f"\n> {prompt}")
    begin, pieces, count = time.perf_counter(), [], 0
    for delta in llm.stream(prompt, params):
        write(delta.text)
        pieces.append(delta.text)
        count += len(delta.token_ids)
    print(f"\n  [{count} tokens, {count / max(time.perf_counter() - begin, 1e-9):.1f} tokens/s]")
    return "".join(pieces)


def _batch(llm: LLM, params: SamplingParams, texts: list[str]) -> None:
    """The same prompts at once: same texts, more tokens per second."""
    begin = time.perf_counter()
    outputs: list[RequestOutput] = llm.generate(list(PROMPTS), params, use_tqdm=False)
    elapsed_s = max(time.perf_counter() - begin, 1e-9)
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    same = sum(output.outputs[0].text == text for output, text in zip(outputs, texts, strict=True))
    print(f"\nAll {len(PROMPTS)} prompts as one batch: {count} tokens, {count / elapsed_s:.1f} tokens/s together;")
    print(f"{same} of {len(PROMPTS)} texts are the same as one by one.")
