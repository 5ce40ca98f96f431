"""Chained steps on a CPU: an engine of the reference whose steps run on what only the "device" knows.

An accelerator completes the rows of a step from its own memory. Here the runner does so just before the forward, with
the references of :class:`~deepinfer.worker.device_tokens.DeviceTokens`, and the draft follows behind the verification
without telling the host what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from deepinfer.engine.engine import Engine
from deepinfer.layers.fused.device_rows import Column
from deepinfer.messages import PLACEHOLDER_TOKEN, Chunk, StepPlan
from deepinfer.worker.decoder_rows import kept_rows, narrows_decoder
from deepinfer.worker.device_step import host_table, ngram_ids, padded_block_tables, token_ids
from deepinfer.worker.device_tokens import DeviceTokens
from deepinfer.worker.drafter import Drafter, FollowingDrafts
from deepinfer.worker.model_runner import StepResult
from deepinfer.worker.ragged_rows import RaggedRows

BLOCK = 128


class Chain:
    """Lets an engine on the CPU chain its steps, and counts what the host did not know.

    Args:
        known: outputs by seed, to draft from; see :class:`Following`.
    """

    def __init__(self, engine: Engine, known: dict[int, list[int]] | None = None) -> None:
        runner, text = engine.runner, engine.model_config.text
        self.engine, self.size = engine, text.engram_max_ngram_size
        self.num_open = 0
        """Chunks of which the host did not know the newest token."""
        self.num_drafts = 0
        """Drafts in them."""
        self.num_wrong_guesses = 0
        """Of them, chunks that began behind the host's guess: drafts had been accepted."""
        num_drafts = engine.config.speculation.num_tokens
        self.tokens = DeviceTokens(runner.caches.geometry.num_slots, self.size, num_drafts, runner.device)
        runner.device_tokens = self.tokens
        self._is_compact = runner._builder.is_compact
        self._run = runner.run
        runner.run = self.run  # type: ignore[method-assign]
        if engine.worker.drafter is not None:
            engine.worker.drafter = Following(engine.worker.drafter, known)

    def run(self, plan: StepPlan, trace: Any = None) -> StepResult:
        """In the place of :meth:`ModelRunner.run`."""
        rows = RaggedRows.of_chunks(plan.chunks)
        ids = token_ids(plan.chunks, rows.total)
        host = host_table(rows, ids, padded_block_tables(plan.chunks))
        known = ngram_ids(plan.chunks, rows, ids, self.size).astype(np.int32)
        table, ngrams = self.tokens.complete(torch.from_numpy(host.table), torch.from_numpy(known))
        assert ngrams is not None
        begins = rows.begins.tolist()
        chunks = tuple(
            self._complete(chunk, table, ngrams, begin) for chunk, begin in zip(plan.chunks, begins, strict=True)
        )
        result = self._run(replace(plan, chunks=chunks), trace)
        if narrows_decoder(chunks, self.engine.runner.caches.geometry.window):
            kept = torch.from_numpy(kept_rows(plan.chunks, self._is_compact).rows)
            table, ngrams = table[:, kept], ngrams[kept]
        return replace(result, ngram_ids=ngrams, table=table)

    def _complete(self, chunk: Chunk, table: torch.Tensor, ngrams: torch.Tensor, begin: int) -> Chunk:
        rows = slice(begin, begin + chunk.num_rows)
        found = table[Column.TOKEN, rows].tolist()
        if PLACEHOLDER_TOKEN not in chunk.token_ids:
            assert found == list(chunk.token_ids)
            return chunk
        assert set(chunk.token_ids) == {PLACEHOLDER_TOKEN}
        start = int(table[Column.START, begin])
        assert table[Column.POSITION, rows].tolist() == list(range(start, start + chunk.num_rows))
        assert (table[Column.END, rows] == start + chunk.num_rows).all()
        assert start >= chunk.start, "the host's guess is a lower bound"
        assert start + chunk.num_rows <= min(BLOCK * len(chunk.block_table), self.engine.config.scheduler.max_model_len)
        self.num_open += 1
        self.num_drafts += chunk.num_rows - 1
        self.num_wrong_guesses += start > chunk.start
        for back in range(self.size):
            assert back >= chunk.num_rows or int(ngrams[begin + chunk.num_rows - 1, back]) == found[-1 - back]
        history = [token for token in ngrams[begin, 1:].tolist() if token >= 0]
        return chunk._replace(start=start, token_ids=tuple(found), history=tuple(reversed(history)))


class Following(Drafter):
    """Drafts behind the verification without the host: it reads what a device would find in its memory.

    Args:
        drafter: the real one.
        known: the outputs of requests by their seeds. Drafts are taken from there, now and then a wrong one, so that
            any number of them is accepted; None drafts with the model, whose random weights are seldom right.
    """

    def __init__(self, drafter: Drafter, known: dict[int, list[int]] | None = None) -> None:
        self._drafter, self._known = drafter, known
        self.num_drafts, self.model = drafter.num_drafts, drafter.model
        self.close = drafter.close  # type: ignore[method-assign]
        self.can_draft_ahead = True

    def can_follow(self, owners: Any, grammars: Sequence[Any]) -> bool:
        is_free = all(owner.ignores_output for owner in owners) and all(grammar is None for grammar in grammars)
        return self.can_draft_ahead and is_free

    def follow(self, owners: Any, slots: Any, firsts: Any, verified: Any, sampled: Any = None) -> FollowingDrafts:
        firsts = firsts if sampled is None else sampled.firsts.tolist()
        # A row without a distribution gives token 0; what is drafted behind it means nothing.
        tokens = [[max(token, 0) for token in verified.emitted(request)] for request in range(len(slots))]
        anchors = [first + len(emitted) - 1 for first, emitted in zip(firsts, tokens, strict=True)]
        return FollowingDrafts(*self.propose(owners, [None] * len(slots), slots, anchors, tokens))

    def propose(self, owners: Any, grammars: Any, slots: Any, anchors: Any, tokens: Any) -> tuple[Any, Any]:
        ids, confidence = self._drafter.propose(owners, grammars, slots, anchors, tokens)
        if self._known is None:
            return ids, confidence
        ids = ids.clone()
        for place, (owner, anchor) in enumerate(zip(owners, anchors, strict=True)):
            output = self._known[owner.seed]
            for draft in range(self.num_drafts):
                index = anchor + 2 + draft - owner.num_prompt
                is_right = index < len(output) and (owner.seed + index) % 7 and (owner.seed // 7 + index) % 5
                ids[place, draft] = output[index] if is_right else (owner.seed + index) % owner.vocab_size
        return ids, confidence
