"""Fit the draft's confidence head to what greedy decoding accepts: ``python -m tools.tiny.fit_confidence --model DIR``.

In training the confidence learns one minus the total variation, which is how often a *sampled* draft stands. Greedy
decoding accepts a draft where the two most likely tokens agree. The head is linear, so a logistic regression is enough,
over blocks that the engine drafted for prompts of the training split; no other tensor changes. Temperatures by
``deepinfer calibrate`` come afterwards, from held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.evaluation.draft_metrics import DraftRecorder
from deepinfer.evaluation.suite import Cell, ask, make_problems
from deepinfer.evaluation.tasks import (
    Sample,
    Split,
    addition,
    copy_with_edit,
    fact_question,
    json_extraction,
    needle,
    paragraph_question,
)

_LENGTH, _NUM_NEEDLES = 512, 6
_PROSE_PROMPT, _PROSE_ANSWER = 128, 48
_BATCH = 32
_SEED = 7
_TASKS: dict[str, Callable[[random.Random, Split], Sample]] = {
    "addition": lambda rng, split: addition(rng, split, digits=3),
    "copy": copy_with_edit,
    "json": json_extraction,
    "reading": paragraph_question,
    "facts": fact_question,
}


def _needle(rng: random.Random, measure: Callable[[str], int]) -> Sample:
    return needle(rng, Split.TRAIN, _LENGTH - 8, measure, num_needles=_NUM_NEEDLES)


@dataclass(slots=True)
class Blocks:
    """Drafted blocks and what became of them."""

    inputs: list[Tensor] = field(default_factory=list)
    """``[S, d + rank]`` each: what the confidence head reads."""
    num_slots: list[int] = field(default_factory=list)
    """Slots up to the end of the answer."""
    num_accepted: list[int] = field(default_factory=list)

    def reached(self) -> tuple[Tensor, Tensor]:
        """Inputs ``[n, d + rank]`` of all slots before which every draft stood, and whether they stood too ``[n]``."""
        rows, stood = [], []
        for inputs, slots, accepted in zip(self.inputs, self.num_slots, self.num_accepted, strict=True):
            for slot in range(min(slots, accepted + 1)):
                rows.append(inputs[slot])
                stood.append(float(slot < accepted))
        return torch.stack(rows).double(), torch.tensor(stood, dtype=torch.float64)


class _Recorder(DraftRecorder):
    """Files the inputs of the confidence head with each verification of a whole block."""

    def __init__(self, eos_id: int) -> None:
        super().__init__(eos_id)
        self.blocks = Blocks()
        self._inputs: dict[tuple[float, ...], Tensor] = {}

    @contextmanager
    def watch_head(self, draft: Any) -> Iterator[None]:
        """Remember what the head reads. A block is found again by its confidences, which no other block shares."""
        original = draft._choose_tokens

        def choose_tokens(newest: Tensor, hidden: Tensor, *others: Any) -> Any:
            proposal = original(newest, hidden, *others)
            previous = torch.cat((newest[:, None], proposal.token_ids[:, :-1]), 1)
            inputs = torch.cat((hidden.float(), F.embedding(previous, draft.markov_embedding).float()), -1)
            for row, key in zip(inputs, torch.sigmoid(proposal.confidence_logits).tolist(), strict=True):
                self._inputs[tuple(key)] = row
            return proposal

        draft._choose_tokens = choose_tokens
        try:
            yield
        finally:
            draft._choose_tokens = original

    def observe(self, sequence_id: str, token_ids: Sequence[int], confidence: Sequence[float]) -> None:
        before = len(self.all_steps())
        super().observe(sequence_id, token_ids, confidence)
        inputs = self._inputs.pop(tuple(confidence), None)
        if inputs is not None and len(self.all_steps()) > before:
            step = self.all_steps()[-1]
            self.blocks.inputs.append(inputs)
            self.blocks.num_slots.append(len(step.survival))
            self.blocks.num_accepted.append(step.num_accepted)


def collect(llm: LLM, prose: np.ndarray, count: int) -> Blocks:
    """Greedy answers to ``count`` training prompts of every task, and half as many continuations of prose."""
    recorder = _Recorder(llm.engine.model_config.eos_token_id)
    worker: Any = llm.engine.worker
    cells = [Cell(name, _LENGTH, lambda rng, _, make=make: make(rng, Split.TRAIN)) for name, make in _TASKS.items()]
    cells.append(Cell("needle", _LENGTH, _needle))
    with recorder.watch(llm.engine), recorder.watch_head(worker.drafter.model):
        for cell in cells:
            ask(llm, make_problems(llm, cell, count, _SEED), batch=_BATCH)
            print(f"{len(recorder.blocks.inputs)} blocks after {cell.task}", flush=True)
        rng, bos = random.Random(_SEED), llm.engine.model_config.bos_token_id
        starts = [rng.randrange(len(prose) - _PROSE_PROMPT) for _ in range(count // 2)]
        prompts = [[bos, *prose[start : start + _PROSE_PROMPT - 1].tolist()] for start in starts]
        params = SamplingParams(temperature=0.0, max_tokens=_PROSE_ANSWER)
        llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return recorder.blocks


def fit_head(inputs: Tensor, stood: Tensor, weight: Tensor, strength: float) -> Tensor:
    """Logistic regression that is drawn to a multiple of ``weight``.

    Args:
        inputs: float64 ``[n, k]``; stood: ``[n]`` of 0 and 1; weight: ``[k]`` to begin with.
        strength: of the pull, against which every row counts once.
    """
    spread = inputs.std(0) + 1e-6
    scaled, start = inputs / spread, inputs @ weight
    change = torch.zeros(len(weight), dtype=torch.float64, requires_grad=True)
    log_factor = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([change, log_factor], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = start * log_factor.exp() + scaled @ change
        total = F.binary_cross_entropy_with_logits(logits, stood, reduction="sum") + strength * change.square().sum()
        mean: Tensor = total / len(stood)
        mean.backward()  # type: ignore[no-untyped-call]
        return mean

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return (weight * log_factor.exp() + change / spread).detach()


def write_head(folder: Path, name: str, weight: Tensor) -> None:
    """Put the bf16 values of ``weight`` where ``name`` lies in the checkpoint; nothing else is touched."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    file = folder / index["weight_map"][name]
    content = bytearray(file.read_bytes())
    size = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:size])[name]
    values = weight.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    begin, end = (size + offset for offset in entry["data_offsets"])
    assert (entry["dtype"], end - begin) == ("BF16", len(values)), f"{name} is stored as {entry}"
    content[begin:end] = values
    file.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--model", type=Path, default=Path("build/tiny/out/model"), help="is changed in place")
    parser.add_argument("--count", type=int, default=200, help="prompts per task")
    parser.add_argument("--strength", type=float, default=100.0, help="of the pull towards the trained head")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(
        args.model, num_threads=args.threads, max_num_seqs=_BATCH, max_model_len=1024, disable_log_stats=True,
        num_speculative_tokens=5, confidence_temperatures="1", progress=False,
    )  # fmt: skip
    worker: Any = llm.engine.worker
    blocks = collect(llm, np.load(args.data / "prose.npy"), args.count)
    inputs, stood = blocks.reached()
    weight = fit_head(inputs, stood, worker.drafter.model.confidence_head.double(), args.strength)
    last = llm.engine.model_config.text.num_nextn_predict_layers - 1
    write_head(args.model, f"mtp.{last}.confidence_head.proj.weight", weight)
    print(f"confidence head fitted to {len(stood)} slots of {len(blocks.inputs)} blocks")


if __name__ == "__main__":
    main()
