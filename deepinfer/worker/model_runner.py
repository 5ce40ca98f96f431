"""Runs the model on a step plan: builds the batch, runs the layers, keeps the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.layers.caches import CacheGeometry, ModelCaches
from deepinfer.layers.step_state import StepState
from deepinfer.messages import Chunk, StepPlan
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.dspark import DSpark
from deepinfer.observe.step_timer import StepTimer
from deepinfer.ops.rope import rope_angles, rope_frequencies
from deepinfer.worker.decoder_cut import cut_for_decoder
from deepinfer.worker.device_tokens import DeviceTokens
from deepinfer.worker.state_checkpoints import StateCheckpoints
from deepinfer.worker.step_batch import StepBatch, StepBatchBuilder

if TYPE_CHECKING:
    from deepinfer.models.fused_dspark import FusedDSpark
    from deepinfer.models.fused_v41 import FusedV41


@dataclass(frozen=True, slots=True)
class StepResult:
    """Hidden state after the last layer of one step; logits are made for the rows that somebody asks for."""

    model: DeepseekV41 | FusedV41
    trunk: Tensor
    """``[rows, M, hidden]``"""
    read_mix: Tensor
    """``[rows, M]``"""
    sample_rows: Tensor
    """``[samples]`` int64, in batch order."""
    samples_every_row: bool = False
    """``sample_rows`` are all rows, in order."""
    ngram_ids: Tensor | None = None
    """``[rows, n]`` int32, newest first, where the device knows ids that the host does not."""
    table: Tensor | None = None
    """``[len(Column), rows]`` int32, completed, where the device knows tokens and positions that the host does not. As
    ``ngram_ids``, it holds until the next graph is replayed."""
    graph_size: int | None = None
    """Rows of the graph that made it, if one did."""

    @torch.inference_mode()
    def sample_logits(self) -> Tensor:
        """Logits ``[samples, vocab]`` float32 of the rows to sample from."""
        return self.row_logits(self.sample_rows)

    @torch.inference_mode()
    def row_logits(self, rows: Tensor | slice) -> Tensor:
        """Logits ``[n, vocab]`` float32 of any rows of the step."""
        return self.model.logits(self.trunk[rows], self.read_mix[rows])


class ModelRunner:
    """One model with its caches on one device.

    Args:
        config: the model's text configuration.
        geometry: cache sizes.
        draft: collects its context keys from every step, if there is one.
        is_compact: leave rows before a chunk's ``decoder_floor`` out of the decoder layers, rather than masking them.
    """

    def __init__(
        self,
        config: TextConfig,
        model: DeepseekV41 | FusedV41,
        geometry: CacheGeometry,
        device: torch.device,
        is_compact: bool = True,
        draft: DSpark | FusedDSpark | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.draft = draft
        self.device = device
        self.graph_sizes: tuple[int, ...] = ()
        """Rows of the steps that are captured: a shorter step runs as the next of them. None where nothing is."""
        self.row_limits: tuple[int, ...] = ()
        """Rows up to which the model takes one set of kernels, beside what all models have alike."""
        self.device_tokens: DeviceTokens | None = None
        """Set where a step can run on tokens that the host has not seen."""
        stages = 0 if draft is None else len(draft.layers)
        self.caches = ModelCaches(config, model.numerics, geometry, device, stages)
        self.checkpoints = StateCheckpoints(self.caches)
        self._feature_floor = [0] * geometry.num_slots
        self.timer = StepTimer()
        ratios = {plan.ratio for plan in config.layers}
        self._builder = StepBatchBuilder(geometry, ratios, config.engram_max_ngram_size, device, is_compact)
        width = config.qk_rope_head_dim
        self.plain_frequencies = rope_frequencies(config.rope_theta, width, None).to(device)
        self.compressed_frequencies = rope_frequencies(config.compress_rope_theta, width, config.rope_scaling).to(
            device
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan, trace: dict[str, Tensor] | None = None) -> StepResult:
        """One forward over all rows of ``plan`` (which has at least one).

        Args:
            trace: collects intermediates by name, for tests.
        """
        with self.timer.phase("batch"):
            batch = self._builder.build(plan)
        self.checkpoints.restore(plan.restores)
        with self.timer.phase("forward"):
            state = self._state(batch, trace)
            assert isinstance(self.model, DeepseekV41)
            trunk, read_mix = self.model.forward(state, self.caches)
            if self.draft is not None:
                self._remember_features(plan, state)
        self.checkpoints.save(plan.saves)
        return StepResult(self.model, trunk, read_mix, batch.sample_rows)

    def compile_kernels(self, prompts: Sequence[Chunk], show_progress: bool) -> None:
        """Compile what steps launch, before the first of them; here everything is there."""

    def compile_sampler(self, show_progress: bool) -> None:
        """Compile what a sampler without graphs launches; here everything is there."""

    def capture_graphs(self, show_progress: bool) -> None:
        """Capture what can be replayed, largest first; here nothing can."""

    def capture_prompts(self, show_progress: bool) -> None:
        """The same of steps with a prompt."""

    def _remember_features(self, plan: StepPlan, state: StepState) -> None:
        assert isinstance(self.draft, DSpark)
        self._note_feature_floors(plan.chunks)
        if state.tail.features:
            self.draft.remember(state.tail, self.caches)

    def _note_feature_floors(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.is_prefill:
                self._feature_floor[chunk.state_slot] = max(chunk.window_floor, chunk.decoder_floor)

    def draft_floors(self, slots: Sequence[int]) -> list[int]:
        """First position of each state slot whose features are in the draft's rings."""
        return [self._feature_floor[slot] for slot in slots]

    def _state(self, batch: StepBatch, trace: dict[str, Tensor] | None) -> StepState:
        state = StepState(
            ids=batch.ids,
            ngram_ids=batch.ngram_ids,
            window=batch.window,
            streams=batch.streams,
            plain_angles=rope_angles(batch.positions, self.plain_frequencies),
            compressed_angles=rope_angles(batch.positions, self.compressed_frequencies),
            entry_angles={
                ratio: rope_angles(stream.emit_positions, self.compressed_frequencies)
                for ratio, stream in batch.streams.items()
            },
            features=None if self.draft is None else [],
            trace=trace,
        )
        if batch.decoder is not None:
            state.decoder = cut_for_decoder(state, batch.decoder, self.config.first_decoder_layer)
        return state
