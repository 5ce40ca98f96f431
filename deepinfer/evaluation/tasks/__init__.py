"""Tasks with checkable answers, for training the tiny model and for evaluating any engine.

Pure Python and deterministic: every generator takes a ``random.Random`` and a :class:`Split`. Training draws from
``Split.TRAIN`` and evaluation from ``Split.HELD_OUT``; the two never share a core (see :func:`split_of`).
"""

from deepinfer.evaluation.tasks.arithmetic import addition
from deepinfer.evaluation.tasks.copying import copy_with_edit
from deepinfer.evaluation.tasks.extraction import extraction_schema, json_extraction
from deepinfer.evaluation.tasks.facts import fact_question, fact_statement
from deepinfer.evaluation.tasks.filler import filler_sentence
from deepinfer.evaluation.tasks.reading import paragraph_question
from deepinfer.evaluation.tasks.retrieval import Measure, needle
from deepinfer.evaluation.tasks.sample import AnswerForm, Sample, Split, Turn, matches, split_of

__all__ = [
    "AnswerForm",
    "Measure",
    "Sample",
    "Split",
    "Turn",
    "addition",
    "copy_with_edit",
    "extraction_schema",
    "fact_question",
    "fact_statement",
    "filler_sentence",
    "json_extraction",
    "matches",
    "needle",
    "paragraph_question",
    "split_of",
]
