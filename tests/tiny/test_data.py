"""Training rows: the chat format of the engine, weights on the right tokens, batches a function of the step."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer.config.model_file import load_model_config
from deepinfer.evaluation.tasks import Split, addition, needle
from deepinfer.tokenizer.chat import encode_chat
from deepinfer.tokenizer.tokenizer import Tokenizer as EngineTokenizer
from tools.tiny.conversation import Encoder
from tools.tiny.data import DRAFT_PHASES, PHASES, WEIGHT_UNIT, BatchMaker, batches, phase_at

MODEL = Path(__file__).parents[2] / "deepinfer" / "data" / "tiny_v41"


@pytest.fixture(scope="module")
def encoder():
    return Encoder.of(Tokenizer.from_file(str(MODEL / "tokenizer.json")))


@pytest.fixture(scope="module")
def maker():
    prose = np.arange(5000, dtype=np.uint16) % 1900 + 3
    return BatchMaker(MODEL / "tokenizer.json", prose, 2048, 100, seed=1)


def test_conversations_are_encoded_as_the_engine_encodes_chats(encoder):
    tokenizer = EngineTokenizer.from_directory(MODEL, load_model_config(MODEL))
    sample = needle(random.Random(1), Split.TRAIN, 200, encoder.measure, num_needles=3, num_questions=2)
    first, second = sample.turns
    messages = [{"role": "user", "content": first.user}]
    assert encoder.prompt(sample) == encode_chat(messages, tokenizer=tokenizer, thinking=False)
    ids, is_answer = encoder.conversation(sample)
    messages += [{"role": "assistant", "content": first.answer}, {"role": "user", "content": second.user}]
    asked = encode_chat(messages, tokenizer=tokenizer, thinking=False)
    assert ids[: len(asked)] == asked
    assert tokenizer.decode([i for i, mark in zip(ids, is_answer, strict=True) if mark], True) == (
        first.answer + second.answer
    )


def test_digits_are_single_tokens(encoder):
    assert encoder.measure("347") == 3
    sample = addition(random.Random(2), Split.TRAIN, digits=3)
    assert encoder.measure(sample.expected.split(" = ")[1]) == len(sample.expected.split(" = ")[1])


def test_a_batch_depends_on_its_step_alone(maker):
    again = list(batches(maker, [7, 3], num_workers=0))
    assert np.array_equal(maker.batch(3).ids, again[1].ids)
    assert np.array_equal(maker.batch(7).weights, again[0].weights)
    assert not np.array_equal(maker.batch(4).ids, again[1].ids)


@pytest.mark.parametrize("kind", ["prose", "tasks", "drill", "needle"])
def test_rows_have_their_length_and_weights_sit_before_the_answers(maker, encoder, kind):
    ids, weights = maker.row(random.Random(3), kind, 512)
    assert ids.shape == weights.shape == (512,)
    assert ids[0] == encoder.bos
    if kind in ("drill", "needle"):
        place = int(np.flatnonzero(ids[:-1] == encoder.think_end)[0])
        assert weights[place] == 3 * WEIGHT_UNIT  # predicts the first token of the answer
        assert weights[place - 1] < WEIGHT_UNIT
    assert weights[-1] in (0, WEIGHT_UNIT // 2)


def test_phases_cover_the_run_and_end_sparse_and_long():
    assert phase_at(0, 100) is PHASES[0]
    assert phase_at(99, 100) is PHASES[-1]
    assert PHASES[0].dense
    assert not PHASES[-1].dense
    assert max(length for length, _ in PHASES[-1].lengths) == 4096


def test_the_draft_learns_from_what_the_backbone_wrote(encoder):
    continued = np.zeros((1, 2 + 170), np.uint16)
    continued[0, :7] = (3, 5, encoder.bos, 11, 12, 13, 14)  # a prompt of 3 tokens, 5 in all
    maker = BatchMaker(
        MODEL / "tokenizer.json", np.ones(5000, np.uint16), 1024, 1, 1, phases=DRAFT_PHASES, continued=continued
    )
    assert maker.batch(5).ids.shape == (2, 512)
    ids, weights = maker.row(random.Random(1), "continued", 10)
    assert ids.tolist() == [encoder.bos, 11, 12, 13, 14] * 2
    assert weights.tolist() == [1, 1, 96, 96, 1, 1, 1, 96, 96, 0]
