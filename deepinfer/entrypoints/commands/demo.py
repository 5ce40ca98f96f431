"""``deepinfer demo``: from nothing to generated text; what ``make demo`` runs."""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

from deepinfer.engine.outputs import RequestOutput
from deepinfer.entrypoints.default_model import TRAINED, describe_model
from deepinfer.entrypoints.engine_args import add_model_arguments, load_llm
from deepinfer.entrypoints.inputs import PreparedPrompt, prepare_prompt
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.terminal import write
from deepinfer.evaluation.tasks import Split, addition, copy_with_edit, json_extraction, paragraph_question
from deepinfer.sampling.params import SamplingParams

PROSE = ("Once upon a time", "And the king said")
_TASKS = (addition, copy_with_edit, json_extraction, paragraph_question)
_TASK_SEED = 4


@dataclass(frozen=True, slots=True)
class _Item:
    """One prompt of the demo."""

    shown: str
    prompt: PreparedPrompt
    expected: str | None = None
    """The right answer, where there is one."""


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
        items = _items(llm, with_tasks=config.model.path == TRAINED)
        texts = [_stream(llm, item, params) for item in items]
        _batch(llm, items, params, texts)
    print(_NEXT.format(model=config.model.path))
    return 0


def _items(llm: LLM, with_tasks: bool) -> list[_Item]:
    """Tasks that the trained model has not seen (it knows their kinds), and the beginnings of some prose."""
    items = []
    if with_tasks:
        rng = random.Random(_TASK_SEED)
        for make in _TASKS:
            sample = make(rng, Split.HELD_OUT)
            prompt = llm.encode_conversation([{"role": "user", "content": sample.prompt}])
            items.append(_Item(sample.prompt, prompt, sample.expected))
    tokenizer = llm.get_tokenizer()
    items += [_Item(text, prepare_prompt(text, 0, tokenizer, tokenizer.vocab_size)) for text in PROSE]
    return items


def _stream(llm: LLM, item: _Item, params: SamplingParams) -> str:
    write(f"\n> {item.shown}" + ("\n" if item.expected is not None else ""))
    begin, pieces, count = time.perf_counter(), [], 0
    for delta in llm.stream(item.prompt, params):
        write(delta.text)
        pieces.append(delta.text)
        count += len(delta.token_ids)
    text = "".join(pieces)
    verdict = ""
    if item.expected is not None:
        verdict = ", right" if text.strip() == item.expected.strip() else f", expected: {item.expected}"
    print(f"\n  [{count} tokens, {count / max(time.perf_counter() - begin, 1e-9):.1f} tokens/s{verdict}]")
    return text


def _batch(llm: LLM, items: list[_Item], params: SamplingParams, texts: list[str]) -> None:
    """The same prompts at once: same texts, more tokens per second."""
    begin = time.perf_counter()
    ids = [list(item.prompt.ids) for item in items]
    outputs: list[RequestOutput] = llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
    elapsed_s = max(time.perf_counter() - begin, 1e-9)
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    same = sum(output.outputs[0].text == text for output, text in zip(outputs, texts, strict=True))
    print(f"\nAll {len(items)} prompts as one batch: {count} tokens, {count / elapsed_s:.1f} tokens/s together;")
    print(f"{same} of {len(items)} texts are the same as one by one.")
