"""Which samples are asked, how, and what counts as right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.errors import ConfigError
from deepinfer.evaluation.suite import NEEDLE_LENGTHS, SUITES, Problem, ask, by_cell, cells_of, make_problems, tasks_of
from tests.evaluation.scripted import TOKENIZER, ScriptedModel, knows


def num_tokens(problem: Problem) -> int:
    """Of prompt, expected answer and EOS."""
    return len(problem.prompt_ids) + len(TOKENIZER.encode(problem.sample.expected, add_bos=False)) + 1


def problems_of(task: str, count: int, seed: int = 0, number: int = 0):
    return make_problems(ScriptedModel(str), cells_of([task])[number], count, seed)


def test_suites_name_tasks_that_exist():
    assert tasks_of(["all"]) == ("addition", "copy", "json", "reading", "facts", "needle", "text")
    assert tasks_of(["qa", "facts", "needle"]) == ("reading", "facts", "needle")
    assert {cell.task for cell in cells_of(tasks_of(["all"]))} == set(SUITES["all"]) - {"text"}
    assert [cell.length for cell in cells_of(["needle"])] == list(NEEDLE_LENGTHS)
    with pytest.raises(ConfigError, match="noodle"):
        tasks_of(["noodle"])


def test_samples_depend_on_seed_and_cell_only():
    assert problems_of("addition", 5) == problems_of("addition", 5)
    assert problems_of("addition", 8)[:5] == problems_of("addition", 5)
    assert problems_of("addition", 5) != problems_of("addition", 5, seed=1)
    questions = [problem.sample.prompt for problem in problems_of("addition", 50)]
    assert len(set(questions)) > 45


@pytest.mark.parametrize("task", ["addition", "copy", "json", "reading", "facts"])
def test_prompts_and_answers_fit_their_length(task):
    found = problems_of(task, 20)
    assert len(found) == 20
    for problem in found:
        assert num_tokens(problem) <= problem.length == 512
        assert problem.max_tokens > num_tokens(problem) - len(problem.prompt_ids)


def test_needles_fill_the_length_that_they_are_named_for():
    for number, length in enumerate(NEEDLE_LENGTHS):
        (problem,) = problems_of("needle", 1, number=number)
        assert length - 40 <= num_tokens(problem) <= length
        assert problem.sample.expected in problem.sample.prompt


def test_samples_that_are_too_long_are_left_out():
    cell = replace(cells_of(["copy"])[0], length=45)
    found = make_problems(ScriptedModel(str), cell, 30, seed=0)
    assert 0 < len(found) < 30
    assert all(num_tokens(problem) <= 45 for problem in found)


def test_right_answers_are_counted_in_order():
    problems = problems_of("copy", 10)
    model = ScriptedModel(knows([problem.sample for problem in problems], wrong=3))
    done: list[int] = []
    answers = ask(model, problems, batch=4, on_done=done.append)
    assert [answer.is_correct for answer in answers] == [False] * 3 + [True] * 7
    assert [answer.problem for answer in answers] == problems
    assert done == [4, 4, 2]
    assert all(params.is_greedy for params in model.params)
    assert list(by_cell(answers)) == [("copy", 512)]


def test_an_answer_with_something_behind_it_is_wrong():
    problems = problems_of("addition", 5)
    expected = {problem.sample.prompt: problem.sample.expected for problem in problems}
    answers = ask(ScriptedModel(lambda prompt: expected[prompt] + " indeed"), problems, batch=8)
    assert not any(answer.is_correct for answer in answers)


def test_warm_prompts_come_first_and_are_thrown_away():
    problems = problems_of("copy", 3)
    model = ScriptedModel(knows([problem.sample for problem in problems]))
    answers = ask(model, problems, batch=8, warm_tokens=5)
    warm, real = model.calls
    assert warm == [problem.prompt_ids[:-5] for problem in problems]
    assert real == [problem.prompt_ids for problem in problems]
    assert len(answers) == 3
    assert all(answer.is_correct for answer in answers)
