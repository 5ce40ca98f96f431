"""What a prefix hit saves, where it resumes, who waits for whom. The pretend device checks every read."""

from __future__ import annotations

import random

import pytest

from deepinfer.config.scheduler import SchedulerConfig

from .prefix_simulation import PrefixSimulation

BLOCK = WINDOW = 8


def make(policy="exact", num_blocks=100, num_places=8, **options):
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 400, **options}
    return PrefixSimulation(SchedulerConfig(**config), num_blocks, policy=policy, num_places=num_places)


def text(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def rows_of(sim, name, prompt, max_tokens=1, **wishes):
    """Prompt rows that one request runs, alone."""
    before = sim.device.num_prefill_rows
    sim.generate(name, prompt, max_tokens, **wishes)
    sim.assert_output_is_right(name)
    return sim.device.num_prefill_rows - before


# ---- where a hit resumes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bounded", "exact"])
@pytest.mark.parametrize("length", range(17, 17 + BLOCK + 2))
def test_same_prompt_again(policy, length):
    """Every distance between the end of the hit and the end of the prompt; at least one token is always computed."""
    sim, prompt = make(policy), text(length)
    assert rows_of(sim, "cold", prompt) == length
    end = (length - 1) // BLOCK * BLOCK
    resumed = end if policy == "exact" else end - WINDOW
    assert rows_of(sim, "warm", prompt) == length - resumed
    assert sim.sequences["warm"].prefix.num_cached == end
    assert sim.sequences["cold"].prefix.num_cached == 0
    assert sim.device.cold["warm"] == (policy == "exact")


@pytest.mark.parametrize("policy", ["bounded", "exact"])
@pytest.mark.parametrize("extra", range(WINDOW + 2))
def test_hits_that_end_up_to_a_window_and_one_token_before_the_end(policy, extra):
    """Known failure P1: B is A and a few tokens, then B again after another request used the slot."""
    sim = make(policy, max_num_seqs=1)
    first = text(32)
    second = first + text(1 + extra, seed=1)
    for name, prompt in (("a", first), ("b", second), ("other", text(50, seed=2)), ("again", second)):
        sim.generate(name, prompt, 3)
        sim.assert_output_is_right(name)
    assert sim.sequences["b"].prefix.num_cached >= 24
    assert sim.sequences["again"].prefix.num_cached == (len(second) - 1) // BLOCK * BLOCK


def test_a_hit_that_is_not_longer_than_the_window_is_replayed_from_the_start_and_stays_cold():
    sim, prompt = make("bounded"), text(BLOCK + 3)
    sim.generate("first", prompt)
    assert rows_of(sim, "second", prompt) == len(prompt)
    assert sim.sequences["second"].prefix.num_cached == BLOCK
    assert sim.device.cold["second"], "the windows are those of a cold run"


@pytest.mark.parametrize("policy", ["bounded", "exact"])
def test_generated_tokens_are_cached_too(policy):
    sim, prompt = make(policy), text(20)
    first = sim.generate("turn 1", prompt, 40)
    longer = [*first.token_ids, *text(5, seed=1)]
    rows = rows_of(sim, "turn 2", longer)
    assert sim.sequences["turn 2"].prefix.num_cached == (len(first.token_ids) - 1) // BLOCK * BLOCK == 56
    assert rows == len(longer) - 56 + (WINDOW if policy == "bounded" else 0)


def test_second_visit_to_a_fork_is_cheap():
    """Requests that share the first 24 tokens only: the first one past the fork leaves a state there for the next."""
    sim, shared = make("exact"), text(24)
    sim.generate("a", shared + text(30, seed=1))
    assert rows_of(sim, "b", shared + text(30, seed=2)) == 54, "no state at the fork: all rows run, on shared blocks"
    assert sim.sequences["b"].prefix.num_hit_blocks == 0, "the sequence has ended and holds nothing"
    assert rows_of(sim, "c", shared + text(30, seed=3)) == 30


def test_hits_do_not_depend_on_checkpoints_but_what_runs_again_does():
    sim, prompt = make("exact", num_places=0), text(33)
    sim.generate("a", prompt)
    used = sim.pool.num_kept
    assert rows_of(sim, "b", prompt) == 33
    assert sim.pool.num_kept == used, "it shared the blocks and wrote none"
    assert sim.prefix.statistics.num_hit_tokens == 32
    assert sim.prefix.statistics.num_cached_tokens == 0


def test_whoever_wants_exact_results_never_meets_replayed_blocks():
    sim, prompt = make("bounded"), text(24)
    sim.generate("cold", prompt)
    longer = prompt + text(40, seed=1)
    sim.generate("replayed", longer, 2)
    assert not sim.device.cold["replayed"]
    sim.generate("seeded", longer, 2, wants_exact=True)
    assert sim.device.cold["seeded"]
    rows = rows_of(sim, "seeded again", longer, 2, wants_exact=True)
    assert sim.device.cold["seeded again"]
    assert rows == len(longer) - 56
    assert rows_of(sim, "any", longer, 2) == len(longer) - 56 + WINDOW


def test_other_salt_is_another_cache():
    sim, prompt = make(), text(40)
    sim.generate("a", prompt, salt="one")
    assert rows_of(sim, "b", prompt, salt="two") == 40
    assert rows_of(sim, "c", prompt, salt="one") == 8


def test_prompts_that_are_scored_run_whole_and_are_cached_for_others():
    sim, prompt = make(), text(40)
    sim.generate("a", prompt)
    assert rows_of(sim, "scored", prompt, reads=False) == 40
    assert rows_of(sim, "c", prompt) == 8


def test_nothing_of_a_failed_request_is_found():
    sim, prompt = make("bounded"), text(64)
    sim.generate("good", prompt[:24])
    sim.add("bad", prompt, 30)
    for _ in range(4):
        sim.turn()
    sim.scheduler.finish("bad", "error")
    sim.run_until_idle()
    sim.generate("next", prompt)
    assert sim.sequences["next"].prefix.num_cached == 24, "what others computed before stays"


@pytest.mark.parametrize("keep", [14, 20, 30])
def test_truncation_resumes_where_no_decoder_window_is_needed(keep):
    sim, prompt = make("exact", decoder_keep_tokens=keep), text(70)
    sim.generate("cold", prompt, 20)
    resume = (70 - keep) // BLOCK * BLOCK
    assert rows_of(sim, "again", prompt, 20) == 70 - resume
    turn = [*sim.sequences["again"].token_ids, *text(4, seed=1)]
    sim.generate("turn 2", turn, 20)
    assert sim.device.cold["turn 2"]
    assert sim.sequences["turn 2"].prefix.num_cached > 0


def test_preempted_sequence_finds_what_it_had_computed():
    sim = make("exact", num_blocks=14, max_num_batched_tokens=16)
    for name in ("a", "b"):
        sim.add(name, text(30, seed=ord(name)), 40)
    sim.run_until_idle()
    assert sim.scheduler.num_preemptions > 0
    for name in ("a", "b"):
        sim.assert_output_is_right(name)
        assert sim.device.cold[name]


# ---- waiting for a shared prefix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bounded", "exact"])
def test_prefix_in_progress_is_waited_for_rather_than_computed_twice(policy):
    sim, shared = make(policy, max_num_batched_tokens=24), text(80)
    for name in ("a", "b", "c"):
        sim.add(name, shared + text(9, seed=ord(name)), 2)
    sim.run_until_idle()
    for name in ("a", "b", "c"):
        sim.assert_output_is_right(name)
    replayed = WINDOW if policy == "bounded" else 0
    assert sim.device.num_prefill_rows == 80 + 3 * 9 + 2 * replayed


def test_outputs_of_one_request_share_its_prompt():
    sim, prompt = make("exact", max_num_batched_tokens=20), text(45)
    for index in range(4):
        sim.add(f"r#{index}", prompt, 3)
    sim.run_until_idle()
    assert sim.device.num_prefill_rows == 45 + 3 * 5


def test_waiting_ends_with_the_leader():
    sim, shared = make(max_num_batched_tokens=16), text(100)
    sim.add("leader", shared, 2)
    sim.add("waiter", [*shared, 1], 2)
    sim.turn()
    sim.turn()
    assert sim.scheduler.num_waiting == 1
    sim.scheduler.abort("leader")
    sim.turn()
    assert sim.scheduler.num_waiting == 0
    sim.run_until_idle()
    assert sim.sequences["waiter"].prefix.num_cached <= 32


def test_a_leader_that_stands_still_is_not_waited_for_long():
    """The leader needs blocks that an earlier sequence keeps."""
    sim, shared = make("bounded", num_blocks=50), text(60)
    leader = sim.add("leader", shared, 2)
    sim.turn()
    assert leader.num_computed == 60
    waiter = sim.add("waiter", text(90, seed=5), 2)
    for index in range(11):  # as if the leader had promised what it never computes
        waiter.prefix.chain.extend(waiter.token_ids)
        leader_chain = leader.prefix.chain
        leader_chain._contents[index : index + 1] = [waiter.prefix.chain.content(index)]
        sim.prefix._promised[waiter.prefix.chain.key(index)] = leader
    looks = [sim.prefix.should_wait(waiter, sim.prefix.finder.find(waiter)) for _ in range(12)]
    assert looks == [True] * 9 + [False] * 3


def test_a_leader_whose_blocks_nobody_will_find_is_not_waited_for():
    """It computed what another one had computed already, so its further blocks stay out of the index."""
    sim, shared = make("bounded", max_num_batched_tokens=16), text(90)
    sim.generate("first", shared[:40])
    unreading = sim.add("unreading", shared, 30, reads=False)
    for _ in range(7):
        sim.turn()
    assert unreading.num_output > 0
    waiter = sim.add("waiter", [*shared, 1], 2)
    sim.turn()
    assert waiter.num_computed + waiter.num_in_flight > 0
    sim.run_until_idle()


def test_those_who_wait_do_not_hold_up_others():
    sim, shared = make(max_num_batched_tokens=16, max_lookahead=0, max_bypasses=0), text(120)
    sim.add("leader", shared, 2)
    for index in range(3):
        sim.add(f"waiter {index}", shared + text(3, seed=index), 2)
    other = sim.add("other", text(5, seed=9), 2)
    sim.turn()
    sim.turn()
    assert other.num_computed == 5
    sim.run_until_idle()


def test_hits_do_not_starve_a_cold_request():
    """A stream of requests with full hits, each of which would fit where the big one does not."""
    sim, warm = make("exact", num_blocks=20, max_num_seqs=2, max_bypasses=3), text(33)
    sim.generate("warm", warm)
    sim.add("runs", text(60, seed=1), 30)
    sim.turn()
    big = sim.add("big", text(100, seed=2), 2)
    for index in range(200):
        if big.num_scheduled:
            break
        if sim.scheduler.num_waiting < 3:
            sim.add(f"hit {index}", warm, 2)
        sim.turn()
    started = [name for name, each in sim.sequences.items() if name.startswith("hit") and each.prefix.num_cached]
    assert len(started) <= 3 + 1, "max_bypasses later ones start before it, and one in the same step behind it"
    sim.run_until_idle()
    assert big.finish_reason == "length"


# ---- many sessions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "num_places"), [("bounded", 0), ("exact", 96)])
def test_sessions_find_all_their_blocks_though_windows_are_few(policy, num_places):
    """Known failure P5: 32 sessions of 20 turns, round robin; blocks for all, windows on the device for 4.

    Possible are all full blocks that the session's turn before computed. ``exact`` needs its states in host memory.
    """
    rng = random.Random(7)
    sim = make(policy, num_blocks=3000, num_places=num_places, max_num_batched_tokens=256)
    sim.checks = False
    sim.device.checks = False
    history = [text(rng.randint(20, 60), seed=100 + index) for index in range(32)]
    computed = [0] * 32
    possible = hit = 0
    for turn in range(20):
        for index in range(32):
            sequence = sim.generate(f"{index}/{turn}", history[index], rng.randint(3, 10))
            possible += computed[index] // BLOCK * BLOCK
            hit += sequence.prefix.num_cached
            computed[index] = sequence.num_tokens - 1
            history[index] = [*sequence.token_ids, *(rng.randrange(1000) for _ in range(rng.randint(1, 6)))]
    sim.scheduler.check()
    assert possible > 30_000
    assert hit / possible >= 0.98
