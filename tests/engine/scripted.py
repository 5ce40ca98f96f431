"""A target and a drafter that follow a script, so that a test decides what comes, and in which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from deepinfer.worker.model_runner import StepResult

_PREFERENCE = 30.0  # far above the noise of the other tokens, which is standard normal


@dataclass(frozen=True)
class ScriptedResult:
    """Stands for a :class:`StepResult`: the model has run, only its logits are replaced."""

    real: StepResult
    logits: Tensor
    """``[rows, vocab]``"""

    @property
    def trunk(self) -> Tensor:
        return self.real.trunk

    @property
    def sample_rows(self) -> Tensor:
        return self.real.sample_rows

    @property
    def samples_every_row(self) -> bool:
        return self.real.samples_every_row

    def row_logits(self, rows: Tensor | slice) -> Tensor:
        return self.logits[rows].clone()


class ScriptedModel:
    """Replaces what an engine's target and drafter say. Use one per engine, before its first request.

    Args:
        wrong_every: every so many positions the draft is a wrong token; 0: never.
        has_real_target: only the drafter is scripted; then a script says what the target is known to sample.
    """

    def __init__(self, engine: Engine, wrong_every: int = 0, has_real_target: bool = False) -> None:
        self.engine = engine
        self.vocab = engine.model_config.text.vocab_size
        self.eos = engine.model_config.eos_token_id
        self.num_drafts = engine.config.speculation.num_tokens
        self.wrong_every = wrong_every
        self.has_real_target = has_real_target
        self.blocks: list[int] = []
        """Tokens that each sampled chunk of a decoding sequence verified, newest token and drafts."""
        self._scripts: dict[str, tuple[int, list[int]]] = {}
        self._owner_of_slot: dict[int, str] = {}
        self._run = engine.runner.run
        engine.runner.run = self.run  # type: ignore[method-assign, assignment]
        if engine.worker.drafter is not None:
            engine.worker.drafter = self  # type: ignore[assignment]

    def submit(self, prompt: list[int], script: list[int], **params: Any) -> str:
        """Queue a request whose output should be ``script`` and then EOS."""
        name = self.engine.add_request(prompt, SamplingParams(**params))
        self._scripts[name] = (len(prompt), script)
        return name

    def wanted(self, name: str, position: int) -> int:
        """The scripted token at an absolute position."""
        start, script = self._scripts[name]
        index = position - start
        return script[index] if 0 <= index < len(script) else self.eos

    # ---- in place of the model runner ----------------------------------------------------------------------------

    def run(self, plan: StepPlan, trace: Any = None) -> StepResult | ScriptedResult:
        result = self._run(plan, trace)
        rows = []
        for chunk in plan.chunks:
            name = chunk.request_id.split("#")[0]
            self._owner_of_slot[chunk.state_slot] = name
            if not chunk.is_prefill:
                self.blocks.append(chunk.num_rows)
            for position in range(chunk.start + 1, chunk.end + 1):
                noise = torch.randn(self.vocab, generator=torch.Generator().manual_seed(position))
                noise[self.wanted(name, position)] += _PREFERENCE
                rows.append(noise)
        return result if self.has_real_target else ScriptedResult(result, torch.stack(rows))

    # ---- in place of the drafter ---------------------------------------------------------------------------------

    def can_follow(self, owners: Any, grammars: Any) -> bool:
        """A script is read on the host."""
        return False

    def propose(
        self, owners: Sequence[Any], grammars: Any, slots: Sequence[int], anchors: Sequence[int], tokens: Any
    ) -> Any:
        ids = torch.zeros(len(owners), self.num_drafts, dtype=torch.int64)
        for place, (slot, anchor) in enumerate(zip(slots, anchors, strict=True)):
            for draft in range(self.num_drafts):
                position = anchor + 2 + draft
                token = self.wanted(self._owner_of_slot[slot], position)
                is_wrong = self.wrong_every and position % self.wrong_every == 0
                ids[place, draft] = (token + 7) % self.vocab if is_wrong else token
        return ids, torch.full(ids.shape, 0.9)

    def close(self) -> None:
        """Nothing to end."""


def spell(engine: Engine, text: str) -> list[int]:
    """One token per character (more for characters of several bytes)."""
    assert engine.tokenizer is not None
    return [token for character in text for token in engine.tokenizer.encode(character, add_bos=False)]


def finish(engine: Engine) -> dict[str, Any]:
    """Run to the end. Returns the finished requests by name."""
    found = {}
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output
    engine.check()
    engine.close()
    return found
