"""A 12-layer cut of the released model at true width, small enough for one GPU: the subject of the GPU benchmarks.

It has every kind of layer, and about as much index work per layer as the whole: two layers of windows only, a ratio-2
segment (one full selection, three that reuse it), and a ratio-1 segment with candidates (layer 6), a selection inside
them (layer 8) and reuse.
"""

from __future__ import annotations

import dataclasses

from deepinfer.checkpoint.released import released_config
from deepinfer.config.engram_hashing import engram_primes
from deepinfer.config.model import ModelConfig

NUM_LAYERS = 12
ENGRAM_LAYER = 1
_RATIOS = (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1)
_DRAFT_TARGETS = (9, 10, 11)


def released_slice(*, draft: bool = False, engram_vocab_size: int | None = None) -> ModelConfig:
    """The configuration of the slice; no vision part.

    Args:
        draft: keep the three DSpark stages, which then read layers 9 to 11.
        engram_vocab_size: None leaves the n-gram memory out. A number puts it at layer 1, with 24 hash tables of at
            least so many rows; the released 16,000,000 takes 101 GB, 1,000,000 takes 6.3 GB.
    """
    released = released_config()
    text = released.text
    stages = text.num_nextn_predict_layers if draft else 0
    engram: dict[str, object] = {"engram_layer_ids": (), "engram_num_embeddings": ()}
    if engram_vocab_size is not None:
        (primes,) = engram_primes(1, text.engram_max_ngram_size, text.engram_n_heads, engram_vocab_size)
        engram = {
            "engram_layer_ids": (ENGRAM_LAYER,),
            "engram_num_embeddings": (sum(primes),),
            "engram_vocab_size": engram_vocab_size,
        }
    sliced = dataclasses.replace(
        text,
        num_hidden_layers=NUM_LAYERS,
        compress_ratios=_RATIOS + (0,) * stages,
        kv_source_layer_ids=(2, 6),
        index_source_layer_ids=(2, 6, 8),
        candidate_source_layer_id=6,
        num_nextn_predict_layers=stages,
        dspark_target_layer_ids=_DRAFT_TARGETS if draft else (),
        **engram,  # type: ignore[arg-type]
    )
    return dataclasses.replace(released, text=sliced, vision=None)
