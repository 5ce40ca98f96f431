"""Runs the fused model on a step plan: one copy to the device, then launches only, or one graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.kernels.compile_ahead import compiling
from deepinfer.layers.caches import BLOCK_TOKENS, CacheGeometry
from deepinfer.layers.fused.device_rows import RowExpander, fits_spare_room
from deepinfer.layers.fused.step import FusedCut, FusedStep
from deepinfer.messages import Chunk, StepPlan
from deepinfer.models.fused_dspark import FusedDSpark
from deepinfer.models.fused_v41 import FusedV41, row_limits
from deepinfer.ops.step_views import ChunkSpan
from deepinfer.sampling.transfer import kept_on_device
from deepinfer.worker.decoder_rows import kept_rows, narrows_decoder
from deepinfer.worker.device_step import HostTable, SlotTables, host_table, ngram_ids, token_ids
from deepinfer.worker.device_tokens import DeviceTokens
from deepinfer.worker.forward_graphs import Forward, ForwardGraphs
from deepinfer.worker.graph_set import GraphPool
from deepinfer.worker.model_runner import ModelRunner, StepResult
from deepinfer.worker.ragged_rows import RaggedRows

MAX_SCANNED = 2**23
"""Rows times tokens of the longest sequence up to which a step with a prompt is a graph. There the index reads the keys
for every row, where launches read them once for each chunk: that would take longer than the host's launches do."""


class FusedRunner(ModelRunner):
    """One fused model with its caches on one GPU.

    Args:
        graph_sizes: rows of the decoding steps that are captured; none runs every step launch by launch.
        prompt_sizes: rows of the captured steps that may have any chunks.
        draft_sizes: requests of the drafts that are captured.
        max_blocks: blocks per sequence that captured steps can address.
        num_drafts: most drafts of a sequence.
    """

    def __init__(
        self,
        config: TextConfig,
        model: FusedV41,
        geometry: CacheGeometry,
        device: torch.device,
        is_compact: bool = True,
        draft: FusedDSpark | None = None,
        graph_sizes: Sequence[int] = (),
        prompt_sizes: Sequence[int] = (),
        draft_sizes: Sequence[int] = (),
        max_blocks: int = 1,
        num_drafts: int = 0,
    ) -> None:
        super().__init__(config, model, geometry, device, is_compact, draft)
        self.fused_draft = draft
        self._is_compact = is_compact
        self.fused = model
        ratios = tuple(sorted({plan.ratio for plan in config.layers} - {0}))
        self.expander = RowExpander(geometry, ratios, self.plain_frequencies, self.compressed_frequencies)
        self.ngram_size = config.engram_max_ngram_size if config.engram_layer_ids else 0
        self._tables = SlotTables(geometry.num_slots)
        self.device_tokens = DeviceTokens(geometry.num_slots, self.ngram_size, num_drafts, device)
        self.graph_sizes, self.draft_sizes = tuple(graph_sizes), tuple(draft_sizes)
        self.row_limits = row_limits(model.layers, config.hidden_size)
        self.graph_pool = GraphPool()
        self.graphs = ForwardGraphs(self, graph_sizes, max_blocks, self.graph_pool) if graph_sizes else None
        self.prompt_graphs = None
        if prompt_sizes:
            self.prompt_graphs = ForwardGraphs(self, prompt_sizes, max_blocks, self.graph_pool, "prompts", False)

    @torch.inference_mode()
    def run(self, plan: StepPlan, trace: dict[str, Tensor] | None = None) -> StepResult:
        """One forward over all rows of ``plan`` (which has at least one). There is no trace of fused layers."""
        assert trace is None, "fused layers keep no intermediates"
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # a thread's own setting, and this may be another than made the runner
        chunks = plan.chunks
        with self.timer.phase("batch"):
            ragged = RaggedRows.of_chunks(chunks)
            ids = token_ids(chunks, ragged.total)
            host = host_table(ragged, ids, self._tables.of(chunks))
            # Where the device knows all ids it looks at none of the host's.
            ngrams = self._ngrams(chunks, ragged, ids) if (ids >= 0).any() else None
        self.checkpoints.restore(plan.restores)
        with self.timer.phase("forward"):
            is_cut = narrows_decoder(chunks, self.caches.geometry.window)
            is_short = fits_spare_room(int(ragged.counts.max()), self.caches.geometry)
            samples = ragged.last_rows([chunk.num_sampled for chunk in chunks])
            found, graph_size = None, None
            if self.graphs is not None and is_short and not is_cut:
                found = self.graphs.replay(host, ngrams)
            if found is not None:
                (trunk, read_mix, known, table), graph_size = found
            elif (found := self._replay_prompt(host, ngrams, is_cut)) is not None:
                (trunk, read_mix, known, table), _ = found
            else:
                keys_first = is_short and not is_cut
                ngrams = self._ngrams(chunks, ragged, ids) if ngrams is None else ngrams
                step = self.step_of(self.move(host.table), self.move(host.block_tables), ngrams, keys_first, host.spans)
                assert step.table is not None
                known, table = step.ngram_ids, step.table
                if is_cut:
                    step.cut, samples = self._cut(chunks, host.block_tables, ids)
                    known = None if known is None else known[step.cut.kept]
                    table = table[:, step.cut.kept]
                trunk, read_mix = self.forward(step)
            sample_rows = kept_on_device(samples, self.device)
            self._note_feature_floors(chunks)
        self.checkpoints.save(plan.saves)
        has_every_row = len(samples) == len(trunk)
        return StepResult(self.model, trunk, read_mix, sample_rows, has_every_row, known, table, graph_size)

    def _replay_prompt(self, host: HostTable, ngrams: Tensor | None, is_cut: bool) -> tuple[Forward, int] | None:
        """Run a step with any chunks by a graph; None if there is none for it, or launches are faster."""
        reach = host.block_tables.shape[1] * BLOCK_TOKENS
        if self.prompt_graphs is None or is_cut or host.num_rows * reach > MAX_SCANNED:
            return None
        return self.prompt_graphs.replay(host, ngrams)

    def _ngrams(self, chunks: Sequence[Chunk], rows: RaggedRows, ids: np.ndarray) -> Tensor | None:
        """``[rows, n]`` int32 on the device; None if no layer looks at them."""
        if not self.ngram_size:
            return None
        return self.move(ngram_ids(chunks, rows, ids, self.ngram_size).astype(np.int32))

    def compile_kernels(self, prompts: Sequence[Chunk], show_progress: bool) -> None:
        """Compile what the graphs and steps of these prompts launch."""
        graphs, prompt_graphs = self.graphs, self.prompt_graphs
        self.graphs = self.prompt_graphs = None  # captures would be empty
        try:
            with compiling("kernels", show_progress), torch.inference_mode():
                for captured in filter(None, (graphs, prompt_graphs)):
                    for size in captured.graphs.sizes:
                        captured.launch(size)
                for prompt in prompts:
                    result = self.run(StepPlan(0, (prompt,)))
                    if prompt.num_sampled:
                        result.sample_logits()
        finally:
            self.graphs, self.prompt_graphs = graphs, prompt_graphs

    def compile_sampler(self, show_progress: bool) -> None:
        """Compile what a sampler without graphs launches."""
        from deepinfer.worker.sample_step import compile_sampler  # which has the graphs of this runner's forwards

        if self.graph_sizes:
            compile_sampler(self, show_progress)

    def capture_graphs(self, show_progress: bool) -> None:
        """Capture what :meth:`run` replays, at start-up rather than when a size is first met."""
        if self.graphs is not None:
            with torch.inference_mode():
                self.graphs.graphs.capture_all(show_progress)

    def capture_prompts(self, show_progress: bool) -> None:
        """The same of steps with a prompt."""
        if self.prompt_graphs is not None:
            with torch.inference_mode():
                self.prompt_graphs.graphs.capture_all(show_progress)

    def forward(self, step: FusedStep) -> tuple[Tensor, Tensor]:
        """The layers, and the draft's context keys behind them. Launches only."""
        if self.fused_draft is not None:
            step.features = []
        trunk, read_mix = self.fused.forward(step, self.caches)
        if self.fused_draft is not None and step.features:
            self.fused_draft.remember(step.features, step.rows, self.caches)
        return trunk, read_mix

    def move(self, array: np.ndarray) -> Tensor:
        """A host array on the device, without waiting."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def step_of(
        self,
        table: Tensor,
        block_tables: Tensor,
        ngrams: Tensor | None,
        keys_first: bool,
        spans: Sequence[ChunkSpan] | None = None,
    ) -> FusedStep:
        """The step of some rows, completed by what only the device knows.

        Args:
            table, block_tables, ngrams: on the device, int32. spans: of the chunks, where they may vary.
        """
        assert self.device_tokens is not None
        table, ngrams = self.device_tokens.complete(table, ngrams)
        rows = self.expander.expand(table, block_tables, keys_first, spans)
        return FusedStep(rows, rows.token_ids, ngrams, table)

    def _cut(self, chunks: Sequence[Chunk], block_tables: np.ndarray, ids: np.ndarray) -> tuple[FusedCut, np.ndarray]:
        """The rows that the decoder layers run on, and the rows to sample from, numbered among them."""
        kept = kept_rows(chunks, self._is_compact)
        layer = self.config.first_decoder_layer
        rows = None
        if kept.ragged is not None:
            host = host_table(kept.ragged, ids[kept.rows], block_tables[kept.chunks])
            assert self.device_tokens is not None
            table, _ = self.device_tokens.complete(self.move(host.table), None)
            rows = self.expander.expand(table, self.move(host.block_tables), False, host.spans)
        return FusedCut(layer, self.move(kept.rows), rows), kept.sample_rows
