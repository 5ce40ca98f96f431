"""The task suites: which samples are asked, how, and how the answers are scored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepinfer.errors import ConfigError
from deepinfer.evaluation.subject import Subject
from deepinfer.evaluation.tasks import (
    Measure,
    Sample,
    Split,
    addition,
    copy_with_edit,
    fact_question,
    json_extraction,
    needle,
    paragraph_question,
)
from deepinfer.sampling.params import SamplingParams

SHORT_LENGTH = 512
"""Tokens that prompt and answer of every task but the needle stay below."""
NEEDLE_LENGTHS = (512, 2048, 4096)
TEXT = "text"
"""Name of the part that measures perplexity rather than answers."""
DEFAULT_SAMPLES = 200
"""Per task and length. 190 right of 200 have the interval [0.910, 0.973], 180 have [0.851, 0.934]: 95 % and 90 % are
told apart."""
QUICK_SAMPLES = 20

_EDGE_TOKENS = 8  # a needle's text is measured without what the chat format may add
_SPARE_TOKENS = 16  # for an answer that is right in other tokens than ours
Maker = Callable[[random.Random, Measure], Sample]


@dataclass(frozen=True, slots=True)
class Cell:
    """One task at one context length, in tokens of prompt and answer together."""

    task: str
    length: int
    make: Maker


@dataclass(frozen=True, slots=True)
class Problem:
    """A sample as it is asked."""

    task: str
    length: int
    sample: Sample
    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    problem: Problem
    text: str
    is_correct: bool
    num_tokens: int
    num_steps: int
    """Steps that gave these tokens, that of the prompt included."""
    num_cached_tokens: int
    """Prompt tokens from the prefix cache."""
    error: str | None

    @property
    def cell(self) -> tuple[str, int]:
        return self.problem.task, self.problem.length


def _short(task: str, make: Callable[[random.Random, Split], Sample]) -> Cell:
    return Cell(task, SHORT_LENGTH, lambda rng, measure: make(rng, Split.HELD_OUT))


def _needle(length: int) -> Cell:
    # As many secrets as the training program's own evaluation hides, so that scores can be compared.
    count = 4 + length // 256

    def make(rng: random.Random, measure: Measure) -> Sample:
        return needle(rng, Split.HELD_OUT, length - _EDGE_TOKENS, measure, num_needles=count)

    return Cell("needle", length, make)


_CELLS = (
    _short("addition", lambda rng, split: addition(rng, split, digits=3)),
    _short("copy", copy_with_edit),
    _short("json", json_extraction),
    _short("reading", paragraph_question),
    _short("facts", fact_question),
    *map(_needle, NEEDLE_LENGTHS),
)
_TASKS = tuple(dict.fromkeys(cell.task for cell in _CELLS))
SUITES: dict[str, tuple[str, ...]] = {
    "all": (*_TASKS, TEXT),
    "qa": ("reading", "facts"),
    **{name: (name,) for name in (*_TASKS, TEXT)},
}
"""Names of suites and the tasks in them."""


def tasks_of(names: Sequence[str]) -> tuple[str, ...]:
    """The tasks of some suites, each once.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names:
        if name not in SUITES:
            raise ConfigError(f"suite {name!r}", why="there is no such suite", fix=f"choose from {', '.join(SUITES)}")
    return tuple(dict.fromkeys(task for name in names for task in SUITES[name]))


def cells_of(tasks: Iterable[str]) -> tuple[Cell, ...]:
    """The cells of some tasks; :data:`TEXT` has none."""
    wanted = set(tasks)
    return tuple(cell for cell in _CELLS if cell.task in wanted)


def make_problems(subject: Subject, cell: Cell, count: int, seed: int) -> list[Problem]:
    """``count`` held-out samples of a cell, the same for the same seed and tokenizer.

    Samples that are longer than the cell says are left out (needles never are).
    """
    tokenizer = subject.get_tokenizer()
    known: dict[str, int] = {}

    def measure(text: str) -> int:
        if text not in known:
            known[text] = len(tokenizer.encode(text, add_bos=False, parse_special=False))
        return known[text]

    rng = random.Random(f"{seed}/{cell.task}/{cell.length}")  # a cell does not depend on which others are asked
    problems = []
    for _ in range(count):
        sample = cell.make(rng, measure)
        ids = tuple(subject.encode_conversation([{"role": "user", "content": sample.prompt}]).ids)
        num_expected = measure(sample.expected) + 1  # and EOS
        if len(ids) + num_expected <= cell.length:
            problems.append(Problem(cell.task, cell.length, sample, ids, num_expected + _SPARE_TOKENS))
    return problems


def ask(
    subject: Subject,
    problems: Sequence[Problem],
    *,
    batch: int,
    warm_tokens: int = 0,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """Answer greedily, in batches.

    Args:
        batch: problems at a time.
        warm_tokens: ask for every prompt without its last so many tokens first, and throw that answer away: then the
            prefix cache holds something that the real prompt can use. 0: don't.
        on_done: called with the number of answers of each batch.
    """
    answers = []
    for begin in range(0, len(problems), batch):
        part = problems[begin : begin + batch]
        prompts = [problem.prompt_ids for problem in part]
        if warm_tokens:
            params = SamplingParams(temperature=0.0, max_tokens=1)
            shortened = [ids[: max(1, len(ids) - warm_tokens)] for ids in prompts]
            subject.generate(prompt_token_ids=shortened, sampling_params=params, use_tqdm=False)
        all_params = [SamplingParams(temperature=0.0, max_tokens=problem.max_tokens) for problem in part]
        outputs = subject.generate(prompt_token_ids=prompts, sampling_params=all_params, use_tqdm=False)
        for problem, output in zip(part, outputs, strict=True):
            found = output.outputs[0]
            answers.append(
                Answer(
                    problem,
                    found.text,
                    output.error is None and problem.sample.is_correct(found.text),
                    len(found.token_ids),
                    found.num_steps,
                    output.num_cached_tokens,
                    output.error,
                )
            )
        on_done(len(part))
    return answers


def by_cell(answers: Iterable[Answer]) -> Mapping[tuple[str, int], list[Answer]]:
    """Answers by (task, length), in the order they were asked."""
    cells: dict[tuple[str, int], list[Answer]] = {}
    for answer in answers:
        cells.setdefault(answer.cell, []).append(answer)
    return cells
