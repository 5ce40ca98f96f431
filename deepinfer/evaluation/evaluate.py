"""One evaluation of one engine: all answers, text scores and draft steps, before anything is summarised."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer.errors import ConfigError
from deepinfer.evaluation.draft_metrics import DraftRecorder
from deepinfer.evaluation.perplexity import WINDOW_TOKENS, Window, load_texts, score_texts, split_windows
from deepinfer.evaluation.subject import Subject
from deepinfer.evaluation.suite import TEXT, Answer, Problem, ask, cells_of, make_problems
from deepinfer.sampling.params import SamplingParams

_PROSE_PROMPT_TOKENS, _PROSE_ANSWER_TOKENS = 128, 48
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    tasks: tuple[str, ...]
    """Of :func:`deepinfer.evaluation.suite.tasks_of`."""
    samples: Mapping[int, int]
    """Samples per cell, by context length; 0 holds for the lengths that are not named."""
    seed: int = 0
    max_windows: int | None = None
    """Windows per text; None: all."""
    batch: int = 32
    """Requests at a time."""
    warm_tokens: int = 0
    """See :func:`deepinfer.evaluation.suite.ask`."""

    def samples_at(self, length: int) -> int:
        return self.samples.get(length, self.samples[0])


@dataclass(slots=True)
class Evaluation:
    """What one engine did."""

    answers: list[Answer] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    drafts: DraftRecorder | None = None
    """None without speculation."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What could not be measured, and why."""
    seconds: float = 0.0


def evaluate(subject: Subject, plan: Plan, progress: Progress = lambda what, done, total: None) -> Evaluation:
    """Measure everything of ``plan``.

    Raises:
        ConfigError: the plan asks for no sample that fits the engine.
    """
    begin, engine = time.perf_counter(), subject.engine
    result = Evaluation()
    groups = _problems(subject, plan, result, progress)
    if not groups and TEXT not in plan.tasks:
        raise ConfigError(
            f"max_model_len is {engine.config.scheduler.max_model_len}",
            why="no sample of these suites fits: " + "; ".join(f"{k}: {v}" for k, v in result.skipped.items()),
            fix="raise --max-model-len, or choose another suite",
        )
    if not engine.config.speculation.num_tokens:
        _answer(subject, plan, groups, result, None, progress)
    else:
        result.drafts = DraftRecorder(engine.model_config.eos_token_id)
        with result.drafts.watch(engine):
            _answer(subject, plan, groups, result, result.drafts, progress)
    if TEXT in plan.tasks:
        _score_texts(subject, plan, result, progress)
    result.seconds = time.perf_counter() - begin
    return result


def _problems(subject: Subject, plan: Plan, result: Evaluation, progress: Progress) -> list[list[Problem]]:
    """One list per cell that fits the engine."""
    limit = subject.engine.config.scheduler.max_model_len
    cells = cells_of(plan.tasks)
    groups = []
    for number, cell in enumerate(cells):
        name = f"{cell.task} {cell.length}"
        progress("making samples", number, len(cells))
        if cell.length > limit:
            result.skipped[name] = f"max_model_len is {limit}"
            continue
        found = make_problems(subject, cell, plan.samples_at(cell.length), plan.seed)
        if found:
            groups.append(found)
        else:
            result.skipped[name] = f"no sample fits {cell.length} tokens with this tokenizer"
    return groups


def _answer(
    subject: Subject,
    plan: Plan,
    groups: Sequence[Sequence[Problem]],
    result: Evaluation,
    recorder: DraftRecorder | None,
    progress: Progress,
) -> None:
    total, done = sum(map(len, groups)), 0
    for problems in groups:
        task, length = problems[0].task, problems[0].length

        def note(count: int, what: str = f"{task} {length}") -> None:
            nonlocal done
            done += count
            progress(what, done, total)

        if recorder is not None:
            recorder.label = task
        progress(f"{task} {length}", done, total)
        result.answers += ask(subject, problems, batch=plan.batch, warm_tokens=plan.warm_tokens, on_done=note)
    if recorder is not None and TEXT in plan.tasks:
        recorder.label = "prose"
        progress("continuing prose", 0, 1)
        _continue_prose(subject, plan)


def _continue_prose(subject: Subject, plan: Plan) -> None:
    """Let the model write on from held-out texts: only the drafts are of interest."""
    size = min(_PROSE_PROMPT_TOKENS, subject.engine.config.scheduler.max_model_len // 2)
    prompts = []
    for text in load_texts().values():
        windows = split_windows(subject, text, size, None)
        count = max(1, min(plan.samples_at(0) // 10, len(windows)))
        prompts += windows[:: max(1, len(windows) // count)][:count]
    params = SamplingParams(temperature=0.0, max_tokens=_PROSE_ANSWER_TOKENS)
    for begin in range(0, len(prompts), plan.batch):
        subject.generate(prompt_token_ids=prompts[begin : begin + plan.batch], sampling_params=params, use_tqdm=False)


def _score_texts(subject: Subject, plan: Plan, result: Evaluation, progress: Progress) -> None:
    config = subject.engine.config
    if config.prefill.is_truncating:
        result.skipped[TEXT] = "prefill truncation computes no logits of a prompt but its last"
        return
    window_tokens = min(WINDOW_TOKENS, config.scheduler.max_model_len - 1)
    texts = load_texts()
    total = sum(len(split_windows(subject, text, window_tokens, plan.max_windows)) for text in texts.values())
    done = 0

    def note(count: int) -> None:
        nonlocal done
        done += count
        progress("perplexity", done, total)

    progress("perplexity", 0, total)
    result.windows = score_texts(
        subject, texts, window_tokens=window_tokens, max_windows=plan.max_windows, on_done=note
    )
