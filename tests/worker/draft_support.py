"""An engine on the CPU whose backbone is the reference and whose draft is the fused one, through Triton's interpreter.

Both keep their context keys in the same caches, so the draft can be followed through whole requests in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.engine.engine import Engine
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.speculative.draft_sampling import CoupledDraftSampler, DraftSampler
from deepinfer.worker.graph_set import GraphPool
from tests.engine.support import make_engine


class FakeGraph:
    """Runs the function again, and leaves the results where the first run had them: what a replay does."""

    def __init__(self, run: Callable[[], Any], outputs: Any) -> None:
        self._run, self._outputs = run, outputs

    def replay(self) -> None:
        for old, new in zip(self._outputs, self._run(), strict=True):
            if old is not None:
                old.copy_(new)


def capture_on_cpu(self: GraphPool, run: Callable[[], Any]) -> tuple[Any, Any]:
    """In the place of :meth:`GraphPool.capture`."""
    outputs = run()
    return FakeGraph(run, outputs), outputs


class BesideReference:
    """As much of a ``FusedRunner`` as its draft needs, over the caches of a reference runner."""

    def __init__(self, engine: Engine, path: Path, draft_sizes: Sequence[int] = ()) -> None:
        from deepinfer.checkpoint.device_loader import DeviceLoader
        from deepinfer.models.fused_loading import load_fused, load_fused_draft
        from tests.kernels.interpreter import repair

        repair()
        config, cpu = engine.model_config, torch.device("cpu")
        loader = DeviceLoader(open_checkpoint(path, parts=("text", "draft"), config=config), cpu)
        self.fused = load_fused(config, loader, cpu, max_rows=16)
        self.fused_draft = load_fused_draft(self.fused, loader)
        self.config, self.device, self.caches = config.text, cpu, engine.runner.caches
        self.plain_frequencies = engine.runner.plain_frequencies
        self.draft_floors = engine.runner.draft_floors
        self.draft_sizes, self.graph_pool = tuple(draft_sizes), GraphPool()


def fused_drafter(
    engine: Engine, path: Path, draft_sizes: Sequence[int] = (), sampler: Callable[[Any], DraftSampler] | None = None
) -> Any:
    """Give an engine that drafts a ``FusedDrafter``; graphs are captured if there are sizes. Returns the drafter."""
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.sampling.sampler import Sampler
    from deepinfer.worker.fused_drafter import FusedDrafter

    runner: Any = BesideReference(engine, path, draft_sizes)
    vocab, count = runner.config.vocab_size, engine.config.speculation.num_tokens
    drafter = FusedDrafter(
        runner,
        count,
        (1.0,) * count,
        (sampler or CoupledDraftSampler)(Sampler(vocab)),
        SamplingBatchBuilder(vocab),
        DeviceChoice(vocab, [], runner.device),
    )
    engine.worker.drafter = drafter
    return drafter


def drafting_engine(path: Path, num_drafts: int = 3, **arguments: Any) -> Engine:
    """An engine of the reference that drafts in every step."""
    return make_engine(path, num_speculative_tokens=num_drafts, adaptive_verification=False, **arguments)
