"""Drafting right behind verification on the device, before the host has seen what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.device_choice import DeviceChoice
from deepinfer.sampling.row_parameters import RowParameters
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.draft_distribution import DraftDistributions
from deepinfer.speculative.draft_sampling import CoupledDraftSampler, DraftSampler
from deepinfer.speculative.verification import Verified
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.worker.device_tokens import SampledRows
from deepinfer.worker.draft_step import Choose, DraftStep, draft_table
from deepinfer.worker.drafter import Drafter, FollowingDrafts
from deepinfer.worker.fused_runner import FusedRunner


class FusedDrafter(Drafter):
    """A drafter whose draft is one graph per number of requests.

    Three ways, by what the requests of a step ask for:

    - the graph: temperature, min-p, top-p, top-k, seeds, banned ids;
    - launches of the same function, where logits are edited by lists whose lengths vary (allow lists, biases, tokens
      banned at the start of an output), or where the rejection verifier wants the distributions kept;
    - :meth:`Drafter.propose`, behind a wait for the accepted tokens, where the host has to know them: penalties count
      them, and a grammar walks along them and along every drafted token.
    """

    def __init__(
        self,
        runner: FusedRunner,
        num_drafts: int,
        temperatures: Sequence[float],
        sampler: DraftSampler,
        batches: SamplingBatchBuilder,
        choice: DeviceChoice,
    ) -> None:
        assert runner.fused_draft is not None, "a runner without a draft"
        super().__init__(runner.fused_draft, runner, num_drafts, temperatures, sampler, batches)
        self.step = DraftStep(runner, num_drafts, self._temperatures, choice)
        self._members: tuple[int, ...] = ()

    def capture_graphs(self, show_progress: bool) -> None:
        self.step.prepare(show_progress)

    def can_follow(self, owners: Sequence[SamplingState], grammars: Sequence[GrammarMatcher | None]) -> bool:
        return all(owner.ignores_output for owner in owners) and all(grammar is None for grammar in grammars)

    def follow(
        self,
        owners: Sequence[SamplingState],
        slots: Sequence[int],
        firsts: Sequence[int],
        verified: Verified,
        sampled: SampledRows | None = None,
    ) -> FollowingDrafts:
        floors = self._runner.draft_floors(slots)
        table = draft_table(firsts, floors, slots)
        drawn: list[DraftDistributions | None] = []
        choose = None
        if self._is_plain(owners, firsts):
            self._set_members(owners)
        else:
            choose = self._edited(owners, firsts, drawn)
        outputs = self.step.draft(table, verified, choose, None if sampled is None else sampled.firsts)
        self._store(slots, outputs.token_ids, drawn)
        return outputs

    def _is_plain(self, owners: Sequence[SamplingState], firsts: Sequence[int]) -> bool:
        """Whether a graph can draw the tokens: from the logits as they are."""
        return isinstance(self._sampler, CoupledDraftSampler) and not any(
            owner.params.allowed_token_ids is not None or owner.params.logit_bias or first + 2 < owner.early_until
            for owner, first in zip(owners, firsts, strict=True)
        )

    def _set_members(self, owners: Sequence[SamplingState]) -> None:
        members = tuple(owner.serial for owner in owners)
        if members != self._members:
            runner = self._runner
            self.step.set_parameters(RowParameters.of(owners, runner.config.vocab_size, runner.device))
            self._members = members

    def _edited(
        self, owners: Sequence[SamplingState], firsts: Sequence[int], drawn: list[DraftDistributions | None]
    ) -> Choose:
        """Draws with all that a sampling batch can hold, from positions that only the device knows."""
        batch = self._batches.build(owners, [first + 2 for first in firsts])  # lower bounds, as it asks for

        def choose(logits: Tensor, positions: Tensor, slot: int) -> Tensor:
            chosen = self._sampler.sample(logits, batch, positions, slot)
            drawn.append(chosen.distributions)
            return chosen.token_ids

        return choose
