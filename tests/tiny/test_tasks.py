"""The task generators: deterministic, checkable, and with two splits that never meet."""

import json
import random

import pytest

from deepinfer.evaluation.tasks import (
    Split,
    addition,
    copy_with_edit,
    fact_question,
    json_extraction,
    matches,
    needle,
    paragraph_question,
    split_of,
)
from deepinfer.evaluation.tasks.sample import AnswerForm


def words(text):
    return len(text.split())


MAKERS = {
    "addition": addition,
    "copy": copy_with_edit,
    "json": json_extraction,
    "reading": paragraph_question,
    "facts": fact_question,
    "needle": lambda rng, split: needle(rng, split, 200, words, num_needles=5),
}


@pytest.mark.parametrize("task", MAKERS)
def test_the_same_seed_gives_the_same_sample(task):
    first, again = (MAKERS[task](random.Random(3), Split.TRAIN) for _ in range(2))
    assert first == again
    assert first.task == task
    assert first != MAKERS[task](random.Random(4), Split.TRAIN)


@pytest.mark.parametrize("task", MAKERS)
def test_the_expected_answer_is_correct_and_another_is_not(task):
    sample = MAKERS[task](random.Random(5), Split.HELD_OUT)
    assert sample.is_correct(f" {sample.expected}\n")
    assert not sample.is_correct(sample.expected[:-1])


@pytest.mark.parametrize("task", ["addition", "copy", "json", "needle"])
def test_training_and_held_out_samples_share_no_answer_core(task):
    rng = random.Random(6)
    trained = {MAKERS[task](rng, Split.TRAIN).prompt for _ in range(300)}
    held_out = {MAKERS[task](rng, Split.HELD_OUT).prompt for _ in range(300)}
    assert not trained & held_out


def test_sums_are_right_and_their_operands_decide_the_split():
    rng = random.Random(7)
    for split in Split:
        for _ in range(50):
            left, right = addition(rng, split, digits=3).expected.split(" = ")
            assert eval(left) == int(right)
            assert split_of(left) is split


def test_copies_replace_every_occurrence_and_nothing_else():
    rng = random.Random(8)
    for _ in range(50):
        sample = copy_with_edit(rng, Split.TRAIN)
        order, line = sample.prompt.split("\n\n")
        old, new = order.removeprefix("Copy the line and replace ").removesuffix(".").split(" with ")
        assert old in line.split()
        assert sample.expected.split() == [new if word == old else word for word in line.split()]


def test_json_answers_follow_their_schema_and_may_be_spaced_freely():
    rng = random.Random(9)
    for _ in range(30):
        sample = json_extraction(rng, Split.TRAIN)
        schema = json.loads(sample.prompt.split("follows this schema: ")[1])
        answer = json.loads(sample.expected)
        assert list(answer) == schema["required"]
        for field, value in answer.items():
            assert isinstance(value, int if schema["properties"][field]["type"] == "integer" else str)
            assert str(value) in sample.prompt
        assert sample.is_correct(json.dumps(answer, indent=2))
    assert not matches('{"age": 3}', '{"age": 4}', AnswerForm.JSON)
    assert not matches('{"age": 3}', "three", AnswerForm.JSON)


@pytest.mark.parametrize("length", [120, 400, 2000])
def test_needle_texts_fill_their_length_and_tell_the_answer_once(length):
    sample = needle(random.Random(length), Split.HELD_OUT, length, words, num_needles=6)
    assert length - 80 < words(sample.prompt) + words(sample.expected) <= length
    assert sample.prompt.count(sample.expected) == 1


def test_several_questions_ask_about_several_needles():
    sample = needle(random.Random(1), Split.TRAIN, 300, words, num_needles=8, num_questions=4)
    assert len({turn.answer for turn in sample.turns}) == 4
    assert all(turn.answer in sample.prompt for turn in sample.turns)
