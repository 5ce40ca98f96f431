"""Takes the grammars of a step along its drafts, so that a draft that could never stand is never proposed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer.sampling.edits import GrammarMask
from deepinfer.structured.masks import MaskBatch, MaskRows
from deepinfer.structured.matcher import GrammarMatcher


class GrammarWalk:
    """Advances matchers over emitted tokens and drafts, and brings them back.

    Args:
        grammars: one per sequence, None for unconstrained ones.
        tokens: what the step emitted for each, not yet accepted by its grammar.
        masks: computes the masks of a slot.
    """

    def __init__(
        self, grammars: Sequence[GrammarMatcher | None], tokens: Sequence[Sequence[int]], masks: MaskBatch
    ) -> None:
        self._masks = masks
        self._walking: dict[int, GrammarMatcher] = {}
        self._taken: list[tuple[GrammarMatcher, int]] = []
        for place, (grammar, emitted) in enumerate(zip(grammars, tokens, strict=True)):
            if grammar is None:
                continue
            taken = next((index for index, token in enumerate(emitted) if not grammar.accept(token)), len(emitted))
            self._taken.append((grammar, taken))
            if taken == len(emitted):
                self._walking[place] = grammar

    def masks(self) -> GrammarMask | None:
        """What may come at the present slot; None if nothing is constrained."""
        if not self._walking:
            return None
        return self._masks.compute([MaskRows(grammar, place) for place, grammar in self._walking.items()])

    def advance(self, token_ids: Tensor) -> None:
        """The slot's tokens are chosen. A sequence whose draft does not fit goes on without a grammar."""
        if not self._walking:
            return
        chosen = token_ids.tolist()
        for place, grammar in list(self._walking.items()):
            if grammar.accept(chosen[place]):
                self._taken.append((grammar, 1))
            else:
                del self._walking[place]

    def undo(self) -> None:
        """Bring all grammars back to where they were."""
        for grammar, count in reversed(self._taken):
            grammar.rollback(count)
        self._taken.clear()
