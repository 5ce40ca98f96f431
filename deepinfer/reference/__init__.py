"""The executable specification: a slow, simple and differentiable second implementation of the model.

It recomputes the whole sequence at every call in float32 or float64, without caches, chunks or batches, and shares no
arithmetic with the engine, so that the two can be compared tensor by tensor. Start reading at
:mod:`deepinfer.reference.model`; every file carries the section of the specification that it states.
"""

from deepinfer.reference.ablation import Ablation
from deepinfer.reference.model import ReferenceModel
from deepinfer.reference.roundings import Roundings

__all__ = ["Ablation", "ReferenceModel", "Roundings"]
