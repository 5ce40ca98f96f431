"""``LLM``: results in order, streams that add up, and nothing left behind whatever happens."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints import llm as llm_module
from deepinfer.entrypoints.llm import GenerationInterrupted
from deepinfer.errors import EngineError
from tests.entrypoints.conftest import SMALL

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["Once upon a time", "The sea", "A much longer prompt about the river behind the house", "x", "step by step"]


def _generate(llm: LLM, prompts, params=GREEDY, **more):
    return llm.generate(prompts, params, use_tqdm=False, **more)


def _text(llm: LLM, prompt, params=GREEDY) -> str:
    return _generate(llm, [prompt], params)[0].outputs[0].text


# ---- order and forms of input ----------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(llm):
    lengths = [6, 1, 4, 3, 8]  # so that they end in another order
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = _generate(llm, PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.error is None for output in outputs)


def test_a_batch_gives_what_each_prompt_gives_alone(llm):
    outputs = _generate(llm, PROMPTS[:3])
    assert [output.outputs[0].text for output in outputs] == [_text(llm, prompt) for prompt in PROMPTS[:3]]


def test_texts_ids_and_dicts_mean_the_same_prompt(llm):
    (by_text,) = _generate(llm, "The sea")
    ids = by_text.prompt_token_ids
    assert ids[0] == llm.engine.model_config.bos_token_id
    forms = [
        _generate(llm, None, prompt_token_ids=[ids]),
        _generate(llm, None, prompt_token_ids=ids),
        _generate(llm, {"prompt": "The sea"}),
        _generate(llm, {"prompt_token_ids": ids}),
        _generate(llm, "only echoed", prompt_token_ids=[ids]),
    ]
    assert [form[0].outputs[0].token_ids for form in forms] == [by_text.outputs[0].token_ids] * len(forms)
    assert forms[-1][0].prompt == "only echoed"


def test_no_prompts_give_no_results(llm):
    assert _generate(llm, []) == []


def test_parameters_are_looked_at_once_each(llm, monkeypatch):
    """Also where every prompt has its own: the time grows with their number, not with its square."""

    class Counting(list):
        num_read = 0

        def __iter__(self):
            for each in super().__iter__():
                Counting.num_read += 1
                yield each

    checked: list[SamplingParams] = []
    monkeypatch.setattr(llm.engine, "check_params", checked.append)
    params = [SamplingParams(max_tokens=1) for _ in range(500)]
    monkeypatch.setattr(llm_module, "params_per_prompt", lambda *_: Counting(params))
    assert llm._params(params, len(params)) == params
    assert [id(each) for each in checked] == [id(each) for each in params]
    assert Counting.num_read < 5 * len(params)
    checked.clear()
    monkeypatch.setattr(llm_module, "params_per_prompt", lambda *_: params[:1] * 500)
    llm._params(params[0], 500)
    assert checked == params[:1]


def test_no_parameters_means_the_engine_defaults(model_path):
    with LLM(model_path, **SMALL, default_temperature=0.0, default_max_tokens=3) as llm:
        first, second = (_generate(llm, "The sea", None)[0].outputs[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert len(first.token_ids) == 3


def test_a_fixed_seed_repeats_and_outputs_of_one_request_differ(llm):
    params = SamplingParams(n=3, seq_seed=5, max_tokens=6, ignore_eos=True)
    first, second = _generate(llm, "The sea", params)[0], _generate(llm, "The sea", params)[0]
    tokens = [output.token_ids for output in first.outputs]
    assert tokens == [output.token_ids for output in second.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(each) for each in tokens}) == 3
    alone = _generate(llm, "The sea", SamplingParams(seq_seed=5, max_tokens=6, ignore_eos=True))[0]
    assert alone.outputs[0].token_ids == tokens[0]


def test_a_prompt_longer_than_a_step_is_computed_in_chunks(model_path, llm):
    ids = [(7 * index) % 400 + 3 for index in range(120)]
    with LLM(model_path, **SMALL, max_num_batched_tokens=16) as chunked:
        (expected,), (found,) = (_generate(each, None, prompt_token_ids=[ids]) for each in (llm, chunked))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


# ---- log-probabilities and stops -------------------------------------------------------------------------------------


def test_logprobs_have_one_entry_per_token_with_the_alternatives(llm):
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = _generate(llm, "The sea", params)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 5
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) == 3  # greedy: the token itself is the most likely one
        assert entry[token].rank == 1
        assert entry[token].logprob == max(each.logprob for each in entry.values())
    total = sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    scores = output.prompt_logprobs
    assert scores is not None
    assert len(scores) == len(output.prompt_token_ids)
    assert scores[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], scores[1:], strict=True):
        assert entry is not None
        assert entry[token].logprob < 0
        assert 2 <= len(entry) <= 3


def test_prompt_logprobs_are_those_of_generating_the_same_tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, logprobs_mode="raw")
    (made,) = _generate(llm, "The sea", params)
    ids = made.prompt_token_ids + made.outputs[0].token_ids
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=True, logprobs_mode="raw")
    (scored,) = _generate(llm, None, scoring, prompt_token_ids=[ids])
    for token, entry, again in zip(
        made.outputs[0].token_ids, made.outputs[0].logprobs, scored.prompt_logprobs[-4:], strict=True
    ):
        assert math.isclose(entry[token].logprob, again[token].logprob, abs_tol=1e-4)


def test_a_stop_string_ends_the_text_before_it(llm):
    text = _text(llm, "The sea", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    stop = text[5:8]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop])
    (output,) = _generate(llm, "The sea", params)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: text.index(stop)]
    kept = SamplingParams.from_dict({**params.to_dict(), "include_stop_str_in_output": True})
    assert _text(llm, "The sea", kept) == text[: text.index(stop)] + stop


def test_a_stop_token_ends_the_output_and_is_named(llm):
    (free,) = _generate(llm, "The sea")
    token = free.outputs[0].token_ids[4]
    first = free.outputs[0].token_ids.index(token)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=[token])
    completion = _generate(llm, "The sea", params)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", token)
    assert completion.token_ids == free.outputs[0].token_ids[: first + 1]


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_a_stream_adds_up_to_what_generate_gives(llm, prompt):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, stop=["qqqq"])
    (output,) = _generate(llm, prompt, params)
    deltas = list(llm.stream(prompt, params))
    completion = output.outputs[0]
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs] == completion.logprobs
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == completion.finish_reason == "length"


def test_streams_and_texts_do_not_depend_on_speculation(model_path, llm):
    params = SamplingParams(seq_seed=3, max_tokens=8, ignore_eos=True)
    with LLM(model_path, **{**SMALL, "num_speculative_tokens": 3}) as speculating:
        deltas = list(speculating.stream("The sea", params))
    (plain,) = _generate(llm, "The sea", params)
    assert "".join(delta.text for delta in deltas) == plain.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == plain.outputs[0].token_ids


def test_a_stream_of_several_outputs_tells_them_apart(llm):
    params = SamplingParams(n=2, seq_seed=1, max_tokens=6, ignore_eos=True)
    (output,) = _generate(llm, "The sea", params)
    deltas = list(llm.stream("The sea", params))
    for completion in output.outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in mine) == completion.text
        assert mine[-1].finish_reason == completion.finish_reason


def test_leaving_a_stream_gives_its_memory_back(llm):
    for _ in llm.stream("The sea", GREEDY):
        assert llm.engine.scheduler.usage > 0
        break
    assert not llm.engine.has_work()


def test_a_stream_that_nobody_starts_holds_nothing(llm):
    llm.stream("The sea", GREEDY)
    assert not llm.engine.has_work()


def test_streams_and_calls_that_interleave_keep_their_own_results(llm):
    expected = {prompt: _text(llm, prompt) for prompt in PROMPTS[:3]}
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    texts = [next(first).text, next(second).text]
    assert _text(llm, PROMPTS[2]) == expected[PROMPTS[2]]
    texts[1] += "".join(delta.text for delta in second)
    texts[0] += "".join(delta.text for delta in first)
    assert texts == [expected[PROMPTS[0]], expected[PROMPTS[1]]]


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_threads_take_turns(llm):
    expected = {prompt: _text(llm, prompt) for prompt in PROMPTS}
    start, found = threading.Barrier(len(PROMPTS)), {}

    def ask(prompt: str, streams: bool) -> None:
        start.wait()
        if streams:
            found[prompt] = "".join(delta.text for delta in llm.stream(prompt, GREEDY))
        else:
            found[prompt] = _text(llm, prompt)

    threads = [threading.Thread(target=ask, args=(prompt, index % 2 == 0)) for index, prompt in enumerate(PROMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == expected


def test_a_stream_that_is_left_during_another_threads_call_ends_within_a_step(llm):
    """Leaving it must not wait: a Ctrl-C in that wait would leave the request to everybody after."""
    stream = llm.stream("The sea", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(stream)
    began, outputs = threading.Event(), []
    run_step = llm.engine.run_step

    def noted() -> None:
        began.set()
        run_step()

    llm.engine.run_step = noted
    try:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        thread = threading.Thread(target=lambda: outputs.extend(_generate(llm, ["x"], params)))
        thread.start()
        began.wait(60)
        stream.close()
        thread.join(60)
    finally:
        llm.engine.run_step = run_step
    assert len(outputs[0].outputs[0].token_ids) == 60
    assert not llm.engine.has_work()


def test_closing_waits_for_the_call_that_runs(model_path):
    llm = LLM(model_path, **SMALL)
    outputs, began = [], threading.Event()

    def ask() -> None:
        began.set()
        outputs.extend(_generate(llm, ["x"]))

    with llm._turn:
        thread = threading.Thread(target=ask)
        thread.start()
        began.wait(60)
        while not llm._turn._waiting:
            time.sleep(0.001)
    llm.close()
    thread.join(60)
    assert outputs[0].finished


def test_chat_is_generate_on_the_encoded_conversation(llm):
    messages = [{"role": "user", "content": "Hello"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    (same,) = _generate(llm, None, prompt_token_ids=[llm.encode_conversation(messages).ids])
    assert answer.outputs[0].token_ids == same.outputs[0].token_ids
    answers = llm.chat([messages, [{"role": "user", "content": "Bye"}]], GREEDY, use_tqdm=False)
    assert len(answers) == 2
    assert answers[0].outputs == answer.outputs


def test_an_effort_without_thinking_is_told(llm, monkeypatch, caplog):
    given = []
    monkeypatch.setattr(llm_module, "encode_chat", lambda messages, **options: given.append(options) or [3, 4])
    messages = [{"role": "user", "content": "Hello"}]
    for effort in ("high", 40):
        caplog.clear()
        llm.encode_conversation(messages, reasoning_effort=effort)
        assert "add thinking=True" in caplog.text
        assert given.pop()["thinking"] is False
    caplog.clear()
    for options in (
        {"reasoning_effort": "none"},
        {"reasoning_effort": None},
        {"reasoning_effort": 40, "thinking": True},
        {"reasoning_effort": 40, "thinking": False},
    ):
        llm.encode_conversation(messages, **options)
    assert [options["thinking"] for options in given] == [False, False, True, False]
    assert not caplog.records


# ---- interrupts and failures -----------------------------------------------------------------------------------------


def _on_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Do something when the model runs for the ``step``-th time from now on."""
    runner, count = llm.engine.runner, 0
    original = runner.run

    def run(plan):
        nonlocal count
        count += 1
        if count == step:
            act()
        return original(plan)

    monkeypatch.setattr(runner, "run", run)


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("how", ["between steps", "inside the model"])
def test_an_interrupt_keeps_what_was_generated_and_the_engine_goes_on(llm, monkeypatch, how):
    expected = [output.outputs[0].token_ids for output in _generate(llm, PROMPTS[:2])]
    press = (lambda: os.kill(os.getpid(), signal.SIGINT)) if how == "between steps" else _raise(KeyboardInterrupt())
    with monkeypatch.context() as patch:
        _on_step(llm, patch, 4, press)
        with pytest.raises(GenerationInterrupted) as caught:
            _generate(llm, PROMPTS[:2])
    assert isinstance(caught.value, KeyboardInterrupt)
    outputs = [output.outputs[0] for output in caught.value.outputs]
    for output, tokens in zip(outputs, expected, strict=True):
        # The step before may still be in flight, and one step more is finished if Ctrl-C does not hit the model.
        assert 2 <= len(output.token_ids) < len(tokens)
        assert output.token_ids == tokens[: len(output.token_ids)]
    assert {output.finish_reason for output in outputs} == {"abort"}
    llm.engine.check()
    assert not llm.engine.has_work()
    assert [output.outputs[0].token_ids for output in _generate(llm, PROMPTS[:2])] == expected


def test_ctrl_c_is_python_s_own_again_afterwards(llm):
    _generate(llm, "The sea")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_stream_can_be_followed_by_another(llm, monkeypatch):
    expected = _text(llm, "The sea")
    with monkeypatch.context() as patch:
        _on_step(llm, patch, 3, _raise(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream("The sea", GREEDY))
    assert not llm.engine.has_work()
    assert "".join(delta.text for delta in llm.stream("The sea", GREEDY)) == expected


def test_a_step_that_fails_ends_its_requests_only(llm, monkeypatch):
    expected = [output.outputs[0].token_ids for output in _generate(llm, PROMPTS)]
    with monkeypatch.context() as patch:
        _on_step(llm, patch, 3, _raise(RuntimeError("the device caught fire")))
        outputs = _generate(llm, PROMPTS)  # max_num_seqs is 4: the fifth waits and is not hurt
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 4 + ["length"]
    assert all("the device caught fire" in output.error for output in outputs[:4])
    assert [output.outputs[0].token_ids for output in outputs[:4]] == [tokens[:2] for tokens in expected[:4]]
    assert outputs[4].outputs[0].token_ids == expected[4]


# ---- life ------------------------------------------------------------------------------------------------------------


def test_a_closed_llm_says_so(model_path):
    with LLM(model_path, **SMALL) as llm:
        assert _text(llm, "x")
    llm.close()  # a second time
    with pytest.raises(EngineError, match="closed"):
        _generate(llm, "x")


def test_reasons_name_what_was_decided(llm):
    fields = {reason.field for reason in llm.reasons}
    assert {"cache.num_blocks", "device.platform"} <= fields


def test_dummy_weights_need_nothing_but_a_configuration(model_path, tmp_path):
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    with LLM(tmp_path, load_format="dummy", num_layers=2, **SMALL) as llm:
        (output,) = _generate(llm, None, prompt_token_ids=[[5, 6, 7]])
        assert len(output.outputs[0].token_ids) == 6
        assert output.outputs[0].text == ""
        with pytest.raises(EngineError, match="tokenizer"):
            llm.get_tokenizer()


def test_a_long_prompt_needs_no_memory_beyond_the_caches(tmp_path):
    """4,000 tokens: the caches are made at the start, and a step's intermediates do not grow with the prompt."""
    import resource

    from deepinfer.checkpoint.tiny import tiny_config
    from deepinfer.entrypoints.default_model import cached_random_model

    path = cached_random_model("long", tiny_config(vision=False, max_position_embeddings=4096))
    with LLM(path, **{**SMALL, "max_model_len": 4096}, max_num_batched_tokens=256) as llm:
        ids = [(11 * index) % 400 + 3 for index in range(4000)]
        _generate(llm, None, SamplingParams(max_tokens=1), prompt_token_ids=[ids[:300]])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (output,) = _generate(llm, None, SamplingParams(max_tokens=2, ignore_eos=True), prompt_token_ids=[ids])
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert len(output.outputs[0].token_ids) == 2
    assert grown_mib < 64  # 3,700 further tokens take 0.4 MiB of cache; one [4000, 4000] float64 would be 128
