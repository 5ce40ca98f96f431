"""Drafting for the sequences of a step: lays out the blocks, samples slot after slot, calibrates the confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.models.dspark import DraftModel
from deepinfer.ops.rope import rope_angles
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.draft_distribution import DraftDistributions
from deepinfer.speculative.draft_sampling import DraftSampler
from deepinfer.speculative.drafts import Drafts
from deepinfer.speculative.verification import Verified
from deepinfer.structured.masks import MaskBatch
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.worker.device_tokens import SampledRows
from deepinfer.worker.draft_batch import build_draft_batch
from deepinfer.worker.grammar_walk import GrammarWalk
from deepinfer.worker.model_runner import ModelRunner


class FollowingDrafts(NamedTuple):
    """Drafts on the device; they hold until the next graph is replayed."""

    token_ids: Tensor
    """``[sequences, num_drafts]`` int64."""
    confidence: Tensor
    """``[sequences, num_drafts]`` float32, calibrated."""


class Drafter:
    """Proposes ``num_drafts`` tokens behind each sequence's newest one.

    Args:
        model: the draft model; its context keys are kept by ``runner``.
        num_drafts: tokens per block.
        temperatures: of the confidence, one per slot.
        sampler: how draft tokens are drawn.
        batches: makes sampling batches of one row per sequence.
    """

    def __init__(
        self,
        model: DraftModel,
        runner: ModelRunner,
        num_drafts: int,
        temperatures: Sequence[float],
        sampler: DraftSampler,
        batches: SamplingBatchBuilder,
    ) -> None:
        assert len(temperatures) == num_drafts, f"{len(temperatures)} temperatures for {num_drafts} drafts"
        self.model = model
        self.num_drafts = num_drafts
        self._runner = runner
        self._temperatures = torch.tensor(temperatures, device=runner.device)
        self._sampler = sampler
        self._batches = batches
        self._masks = MaskBatch(runner.config.vocab_size, runner.device)
        self._stored: dict[int, DraftDistributions] = {}

    def close(self) -> None:
        """End the threads that compute masks."""
        self._masks.close()

    def propose(
        self,
        owners: Sequence[SamplingState],
        grammars: Sequence[GrammarMatcher | None],
        slots: Sequence[int],
        anchors: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """Draft for every sequence.

        Args:
            owners: sampling state, not yet holding ``tokens``.
            grammars: where each sequence stands in its grammar, likewise; left as they were found.
            slots: state slots. anchors: position of the last computed token.
            tokens: what this step emitted; the last one is drafted from.
        Returns:
            ids int64 and confidence float32, both ``[sequences, num_drafts]``.
        """
        runner = self._runner
        geometry, device = runner.caches.geometry, runner.device
        layout = build_draft_batch(anchors, runner.draft_floors(slots), slots, self.num_drafts, geometry, device)
        uses_pending = any(owner.params.uses_penalties for owner in owners)
        batch = self._batches.build(owners, [anchor + 2 for anchor in anchors], tokens if uses_pending else None)
        positions = batch.positions
        drawn: list[DraftDistributions | None] = []
        walk = GrammarWalk(grammars, tokens, self._masks)

        def choose(logits: Tensor, slot: int) -> Tensor:
            masked = replace(batch, positions=positions, grammar=walk.masks())
            chosen = self._sampler.sample(logits, masked, positions + slot, slot)
            drawn.append(chosen.distributions)
            walk.advance(chosen.token_ids)
            return chosen.token_ids

        proposal = self.model.propose(
            torch.tensor([emitted[-1] for emitted in tokens], device=device),
            self.num_drafts,
            layout.window,
            rope_angles(layout.positions, runner.plain_frequencies),
            runner.caches,
            choose,
        )
        walk.undo()
        self._store(slots, proposal.token_ids, drawn)
        confidence = torch.sigmoid((proposal.confidence_logits / self._temperatures).clamp(-60, 60))
        return proposal.token_ids, confidence

    def capture_graphs(self, show_progress: bool) -> None:
        """Compile and capture what can be replayed; see :class:`~deepinfer.worker.fused_drafter.FusedDrafter`."""

    def can_follow(self, owners: Sequence[SamplingState], grammars: Sequence[GrammarMatcher | None]) -> bool:
        """Whether :meth:`follow` can draft for these sequences: nothing it needs is known to the host only."""
        return False

    def follow(
        self,
        owners: Sequence[SamplingState],
        slots: Sequence[int],
        firsts: Sequence[int],
        verified: Verified,
        sampled: SampledRows | None = None,
    ) -> FollowingDrafts:
        """As :meth:`propose`, behind tokens that the host has not seen. Launches only.

        Only where :meth:`can_follow` says so, which this class never does.

        Args:
            owners: as for :meth:`propose`. slots: state slots.
            firsts: position of each sequence's first sampled row; with ``sampled`` it may be too early.
            verified: result of these rows, on the device. What is drafted for bad sequences means nothing.
            sampled: the rows as the device has them, where the host can only guess.
        """
        raise NotImplementedError

    def _store(self, slots: Sequence[int], token_ids: Tensor, drawn: Sequence[DraftDistributions | None]) -> None:
        """Keep what the drafts were drawn from, where a verifier wants it."""
        if not any(each is not None for each in drawn):
            return
        distributions = Drafts.of_slots(token_ids.unbind(1), drawn).distributions
        assert distributions is not None
        own = torch.arange(self.num_drafts, device=token_ids.device)
        for place, slot in enumerate(slots):
            self._stored[slot] = distributions.select(own + place * self.num_drafts)

    def stored_distributions(self, slots: Sequence[int]) -> DraftDistributions:
        """What the drafts of these state slots were drawn from, ``num_drafts`` rows each.

        Slots without drafts have flat ones: no draft of theirs is ever looked up.
        """
        vocab, device = self._runner.config.vocab_size, self._runner.device
        rows = torch.arange(self.num_drafts, device=device)
        flat = torch.zeros(self.num_drafts, vocab, device=device)
        parts = [self._stored[slot].scores_of(rows)[0] if slot in self._stored else flat for slot in slots]
        return DraftDistributions(vocab, torch.cat(parts).to(torch.bfloat16), None)
