"""The scheduler over a fake worker: every request ends once, with what it gives alone, and all pages come back."""

import random

import numpy as np
import pytest
from fake_worker import FakeWorker, chain, hidden
from scheduler_harness import Harness, prompt_of

from llmserve.runtime.engine.batch import StepPlan, WorkerDied, int32_array
from llmserve.runtime.messages import AbortReqInput, FinishReason, LogprobOptions, SamplingParams


def lengths(harness: Harness) -> list[list[int]]:
    """The numbers of tokens that each step computed, a list a step."""
    return [[len(row.token_ids) // 4 for row in plan.rows] for plan in harness.worker.plans]


# ---- what a request gives ------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks() -> None:
    harness = Harness()
    prompt = prompt_of(70)
    harness.send("a", prompt)
    harness.run()
    assert harness.output("a") == harness.expected(prompt)
    assert harness.finish("a") == FinishReason(type="length")
    # 70 tokens in chunks of 32, then 7 decodes: the last chunk draws the first token.
    assert lengths(harness) == [[32], [32], [6], *[[1]] * 7]
    harness.check_empty()


def test_decodes_go_on_while_a_prompt_is_computed() -> None:
    harness = Harness()
    harness.send("short", prompt_of(4, 1))
    harness.turn()
    harness.send("long", prompt_of(70, 2))
    harness.run()
    assert lengths(harness)[:4] == [[4], [1, 32], [1, 32], [1, 6]]
    for rid, prompt in (("short", prompt_of(4, 1)), ("long", prompt_of(70, 2))):
        assert harness.output(rid) == harness.expected(prompt)
    harness.check_empty()


def test_a_stream_has_its_first_token_at_once_then_one_row_an_interval() -> None:
    harness = Harness(stream_interval=3)
    harness.send("a", prompt_of(5), stream=True)
    harness.send("b", prompt_of(6))
    harness.run()
    assert [len(row.output_ids) // 4 for row in harness.rows("a")] == [1, 3, 3, 1]
    assert [row.completion_tokens for row in harness.rows("a")] == [1, 4, 7, 8]
    assert [len(row.output_ids) // 4 for row in harness.rows("b")] == [1, 7]


def test_rows_wait_while_the_reader_is_slow_and_nothing_new_starts() -> None:
    harness = Harness(stream_interval=1)
    harness.send("a", prompt_of(5), stream=True)
    harness.turn()
    harness.outbox.congested = True
    harness.send("b", prompt_of(6), stream=True)
    for _ in range(4):
        harness.turn()
    assert [len(row.output_ids) // 4 for row in harness.rows("a")] == [1]
    assert [request.rid for request in harness.scheduler.table.waiting] == ["b"]
    harness.outbox.congested = False
    harness.run()
    assert [len(row.output_ids) // 4 for row in harness.rows("a")] == [1, 5, 1, 1]
    assert harness.output("b") == harness.expected(prompt_of(6))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_of_sequence_ends_unless_it_is_ignored(temperature: float) -> None:
    harness = Harness(FakeWorker(vocab_size=4))
    stops = SamplingParams(temperature=temperature, max_new_tokens=40, seed=3)
    ignores = SamplingParams(temperature=temperature, max_new_tokens=40, seed=3, ignore_eos=True)
    harness.send("stops", [1, 2, 3], params=stops)
    harness.send("ignores", [1, 2, 3], params=ignores)
    harness.run()
    assert harness.finish("stops") == FinishReason(type="stop")
    assert harness.output("stops")[-1] == 0
    assert harness.finish("ignores") == FinishReason(type="length")
    assert len(harness.output("ignores")) == 40
    assert harness.output("ignores")[: len(harness.output("stops"))] == harness.output("stops")


def test_a_stop_token_ends_and_is_named() -> None:
    harness = Harness()
    prompt = prompt_of(9)
    third = harness.expected(prompt)[2]
    harness.send("a", prompt, params=SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(third,)))
    harness.run()
    assert harness.finish("a") == FinishReason(type="stop", matched=third)
    assert harness.output("a") == harness.expected(prompt)[:3]


def test_min_tokens_forbids_the_stop_tokens_until_then() -> None:
    harness = Harness(FakeWorker(vocab_size=3))
    params = SamplingParams(temperature=0.0, max_new_tokens=30, min_new_tokens=5, stop_token_ids=(1,))
    harness.send("a", [2, 2], params=params)
    harness.run()
    output = harness.output("a")
    assert output[:5] == [2] * 5  # the only token of three that may come
    assert output[-1] in (0, 1)
    assert len(output) >= 6
    assert harness.finish("a").type == "stop"
    assert output == harness.expected([2, 2], params)


def test_a_stop_string_ends_with_its_last_token() -> None:
    harness = Harness()
    prompt = prompt_of(9)
    expected = harness.expected(prompt)
    text = "".join(chr(ord("A") + token) for token in expected)
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop=("never", text[2:4]))
    harness.send("a", prompt, params=params, stream=True)
    harness.run()
    assert harness.finish("a") == FinishReason(type="stop", matched=text[2:4])
    assert harness.output("a") == expected[:4]
    assert harness.rows("a")[0].stop == params.stop  # the detokenizer is told, once
    assert not any(row.stop for row in harness.rows("a")[1:])


def test_choices_share_the_prompt_and_have_seeds_of_their_own() -> None:
    harness = Harness()
    prompts = prompt_of(21, 1), prompt_of(14, 2)
    params = SamplingParams(temperature=1.0, seed=11, max_new_tokens=8, ignore_eos=True)
    harness.send("a", *prompts, n=3, params=params)
    harness.run()
    for index in range(6):
        expected = harness.expected(prompts[index // 3], params, seed=11 + index % 3)
        assert harness.output("a", index) == expected
        assert harness.finish("a", index).type == "length"
    # Each prompt is computed once; its other choices take all its whole pages (of 4) from the cache.
    assert [harness.rows("a", index)[-1].cached_tokens for index in range(6)] == [0, 20, 20, 0, 12, 12]
    assert sum(sum(step) for step in lengths(harness) if max(step) > 1) < 21 + 14 + 4 * 4 + 6 * 8
    harness.check_empty()


def test_logprobs_come_with_their_tokens() -> None:
    harness = Harness()
    harness.send("a", prompt_of(5), stream=True, logprobs=LogprobOptions(top=2))
    harness.run()
    rows = harness.rows("a")
    assert all(row.logprobs is not None for row in rows)
    for row in rows:
        assert row.logprobs is not None
        ids = int32_array(row.output_ids)
        assert np.frombuffer(row.logprobs.token_logprobs, "<f4").tolist() == (-ids).tolist()
        assert np.frombuffer(row.logprobs.top_ids, "<i4").tolist() == [0, 1] * len(ids)
        assert row.prompt_logprobs is None


@pytest.mark.parametrize("length", [1, 5, 32, 33, 64, 65, 70])
@pytest.mark.parametrize("max_new_tokens", [0, 3])
def test_prompt_logprobs_over_chunks(length: int, max_new_tokens: int) -> None:
    """Complete whatever the chunks, and also when the prompt is cached: no hit is taken where they are wanted."""
    harness = Harness()
    prompt = prompt_of(length)
    harness.send("before", prompt)
    harness.run()
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)
    harness.send("a", prompt, params=params, logprobs=LogprobOptions(top=1, prompt=True), stream=True)
    harness.run()
    first, *others = harness.rows("a")
    assert first.prompt_logprobs is not None
    values = np.frombuffer(first.prompt_logprobs.token_logprobs, "<f4")
    assert np.isnan(values[0])
    assert values[1:].tolist() == [-token for token in prompt[1:]]
    assert len(first.prompt_logprobs.top_ids) == len(first.prompt_logprobs.top_logprobs) == length * 4
    assert all(row.prompt_logprobs is None for row in others)
    assert harness.rows("a")[-1].cached_tokens == 0
    assert harness.output("a") == harness.expected(prompt, params)
    assert harness.finish("a") == FinishReason(type="length")
    harness.check_empty()


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_over_chunks(pooling: str, normalize: bool) -> None:
    harness = Harness()
    prompts = prompt_of(70, 1), prompt_of(3, 2)
    harness.embed("before", *prompts, pooling="last")
    harness.run()
    harness.embed("a", *prompts, pooling=pooling, normalize=normalize)
    harness.run()
    for index, prompt in enumerate(prompts):
        stored = [0]
        for token in prompt:
            stored.append(chain(stored[-1], token))
        states = np.array([hidden(value) for value in stored[1:]])
        expected = states.mean(axis=0) if pooling == "mean" else states[-1]
        if normalize:
            expected = expected / np.linalg.norm(expected)
        row = harness.vector("a", index)
        np.testing.assert_allclose(np.frombuffer(row.embedding, "<f4"), expected, rtol=1e-5)
        assert row.finish is None
        assert row.prompt_tokens == len(prompt)
        # The mean needs the hidden state of every token, so it takes nothing from the cache.
        assert row.cached_tokens == (0 if pooling == "mean" or index == 1 else 68)
    assert not harness.outbox.token_rows
    harness.check_empty()


# ---- the prefix cache ----------------------------------------------------------------------------------------------


def test_a_prompt_sent_twice_says_so_and_computes_the_rest() -> None:
    harness = Harness()
    prompt = prompt_of(40)
    for rid in ("first", "second"):
        harness.send(rid, prompt)
        harness.run()
    assert harness.rows("first")[-1].cached_tokens == 0
    # Whole pages of 4, and never the last token, which must be computed to draw the next one.
    assert harness.rows("second")[-1].cached_tokens == 36
    assert harness.rows("second")[-1].prompt_tokens == 40
    assert lengths(harness)[9] == [4]
    assert harness.output("second") == harness.output("first")


def test_what_was_generated_is_cached_too() -> None:
    harness = Harness()
    prompt = prompt_of(40)
    harness.send("first", prompt)
    harness.run()
    conversation = [*prompt, *harness.output("first"), 5, 6]
    harness.send("second", conversation)
    harness.run()
    # 40 + 8 tokens, but the last one generated was never computed: 47 tokens are 11 whole pages.
    assert harness.rows("second")[-1].cached_tokens == 44
    assert harness.output("second") == harness.expected(conversation)


def test_requests_that_come_together_compute_a_common_prefix_once() -> None:
    harness = Harness(chunked_prefill_size=64)
    prefix = prompt_of(100)
    for i in range(6):
        harness.send(f"r{i}", [*prefix, i + 1, i + 2, i + 3])
    harness.run()
    assert [harness.rows(f"r{i}")[-1].cached_tokens for i in range(6)] == [0] + [100] * 5
    for i in range(6):
        assert harness.output(f"r{i}") == harness.expected([*prefix, i + 1, i + 2, i + 3])
    harness.check_empty()


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    harness = Harness(prefix_cache=False)
    prompt = prompt_of(40)
    harness.send("a", prompt, n=2)
    harness.run()
    harness.send("b", prompt)
    harness.run()
    assert [harness.rows("a", 1)[-1].cached_tokens, harness.rows("b")[-1].cached_tokens] == [0, 0]
    assert harness.output("b") == harness.expected(prompt)
    assert harness.scheduler.kv.cached == 0
    harness.check_empty()


def test_an_aborted_prefill_leaves_only_what_is_computed() -> None:
    """BEHAVIOUR: the pages of an aborted request never serve a later hit with unfinished KV."""
    harness = Harness(depth=2)
    prompt = prompt_of(90)
    harness.send("a", prompt)
    harness.turn()
    harness.turn()  # two chunks of 32 are submitted, the result of one is applied
    assert [request.computed for request in harness.scheduler.table] == [32]
    harness.inbox.append(AbortReqInput(rids=("a",)))
    harness.run()
    assert harness.finish("a").type == "abort"
    harness.send("b", prompt)
    harness.run()
    assert harness.rows("b")[-1].cached_tokens <= 64
    assert harness.output("b") == harness.expected(prompt)
    harness.check_empty()


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_row_that_fails_ends_its_own_request_only() -> None:
    harness = Harness()
    harness.worker.row_error = lambda row: "not finite" if 13 in int32_array(row.token_ids) else ""
    good, bad = [1, 2, 3, 4, 5], [1, 2, 3, 4, *range(13, 25)]
    harness.send("good", good, params=SamplingParams(temperature=0.0, max_new_tokens=2))
    harness.send("bad", bad)
    harness.run()
    assert harness.finish("bad") == FinishReason(type="error", status=500, message="not finite")
    assert harness.output("good") == harness.expected(good, SamplingParams(temperature=0.0, max_new_tokens=2))
    harness.worker.row_error = lambda row: ""
    harness.send("again", bad)
    harness.run()
    assert harness.rows("again")[-1].cached_tokens <= 4  # nothing of the failed row was kept
    assert harness.output("again") == harness.expected(bad)
    harness.check_empty()


def test_a_step_that_fails_is_run_again_row_by_row() -> None:
    harness = Harness()

    def fail(plan: StepPlan) -> Exception | None:
        poisoned = any(13 in int32_array(row.token_ids) for row in plan.rows)
        return MemoryError("too much") if len(plan.rows) > 2 or poisoned else None

    harness.worker.fail = fail
    prompts = {f"r{i}": prompt_of(10, i) for i in range(4)}
    prompts = {rid: [min(token, 12) for token in prompt] for rid, prompt in prompts.items()}
    for rid, prompt in prompts.items():
        harness.send(rid, prompt, params=SamplingParams(temperature=0.0, max_new_tokens=1))
    harness.send("bad", [1, 13, 2])
    harness.run()
    assert harness.finish("bad").type == "error"
    assert harness.finish("bad").status == 500
    for rid, prompt in prompts.items():
        assert harness.output(rid) == harness.expected(prompt)[:1]
    harness.check_empty()


def test_a_fault_in_one_requests_own_processing_fails_that_one_only() -> None:
    harness = Harness()
    harness.send("a", prompt_of(5, 1))
    harness.send("b", prompt_of(6, 2), logprobs=LogprobOptions(top=1))
    harness.send("c", prompt_of(40, 3), logprobs=LogprobOptions(prompt=True))
    harness.turn()
    by_rid = {request.rid: request for request in harness.scheduler.table}
    by_rid["b"].new_logprobs.append(None)  # type: ignore[arg-type]
    by_rid["c"].prompt_logprobs.append(None)  # type: ignore[arg-type]
    harness.run()
    for rid in ("b", "c"):
        assert harness.finish(rid).type == "error"
        assert harness.finish(rid).status == 500
    assert harness.output("a") == harness.expected(prompt_of(5, 1))
    harness.check_empty()


def test_a_request_that_cannot_be_planned_fails_alone() -> None:
    harness = Harness()
    harness.send("a", prompt_of(5, 1))
    harness.send("b", prompt_of(6, 2))
    harness.turn()
    harness.scheduler.table.running[0].logprobs = "nonsense"  # type: ignore[assignment]
    harness.turn()
    assert harness.finish("a").status == 500
    harness.run()
    assert harness.output("b") == harness.expected(prompt_of(6, 2))
    harness.check_empty()


def test_a_fault_on_arrival_refuses_that_request_only() -> None:
    harness = Harness()
    harness.send("a", prompt_of(5), params=SamplingParams(stop=(3,)))  # type: ignore[arg-type]
    harness.send("b", prompt_of(6))
    harness.scheduler.intake._make_decoder = lambda *_: 1 / 0  # type: ignore[assignment, return-value]
    harness.run()
    assert harness.finish("a").status == 500
    assert harness.output("b") == harness.expected(prompt_of(6))


def test_a_dead_worker_is_told_to_the_caller() -> None:
    harness = Harness()
    harness.worker.fail = lambda plan: WorkerDied("rank 1 is gone")
    harness.send("a", prompt_of(5))
    with pytest.raises(WorkerDied, match="rank 1"):
        harness.turn()


# ---- memory --------------------------------------------------------------------------------------------------------


def test_one_request_as_large_as_the_pool_ends_by_length() -> None:
    harness = Harness(FakeWorker(num_pages=8, page_size=4))
    prompt = prompt_of(20)
    harness.send("a", prompt, params=SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True))
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")
    assert len(harness.output("a")) == 32 - 20
    harness.check_empty()


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    harness = Harness(FakeWorker(num_pages=8, page_size=4))
    harness.send("a", prompt_of(32))
    harness.send("b", prompt_of(31))
    harness.embed("c", prompt_of(32))
    harness.embed("d", prompt_of(33))
    harness.run()
    assert harness.finish("a").status == 400
    assert "32 tokens" in harness.finish("a").message
    assert harness.finish("b") == FinishReason(type="length")
    assert harness.vector("c").finish is None
    reason = harness.vector("d").finish
    assert reason is not None
    assert reason.status == 400
    harness.check_empty()


def test_the_youngest_gives_way_and_loses_nothing() -> None:
    harness = Harness(FakeWorker(num_pages=12, page_size=4))
    params = SamplingParams(temperature=1.0, max_new_tokens=24, ignore_eos=True, seed=5)
    prompts = {f"r{i}": prompt_of(8, i) for i in range(3)}
    for rid, prompt in prompts.items():
        harness.send(rid, prompt, params=params, stream=True)
    harness.run()
    assert harness.scheduler.results.counters.retractions > 0
    assert harness.scheduler.results.counters.asked_retractions == 0
    assert harness.scheduler.table.prompt_tokens == 24  # a new start is not a new request
    for rid, prompt in prompts.items():
        assert harness.output(rid) == harness.expected(prompt, params)
        assert harness.rows(rid)[-1].cached_tokens == 0  # its own pages, found again, are no hit
    first_ends = [harness.finish(rid) for rid in prompts]
    assert first_ends == [FinishReason(type="length")] * 3
    harness.check_empty()


@pytest.mark.parametrize("stream", [True, False])
def test_the_time_between_tokens_is_counted_as_they_come_whether_streamed_or_not(stream: bool) -> None:
    """A turn, and with it a step, takes 0.01 s; of two tokens that travel together each has a time of its own."""
    harness = Harness(stream_interval=4)
    harness.send("a", prompt_of(8, 1), params=SamplingParams(max_new_tokens=20, ignore_eos=True), stream=stream)
    while harness.scheduler.results.counters.decode_tokens < 11:
        harness.turn()
    itl = harness.scheduler.snapshots.metrics().itl
    assert sum(itl.counts) == 10
    assert itl.sum == pytest.approx(10 * 0.01)


def test_prompt_logprobs_survive_a_retraction() -> None:
    harness = Harness(chunked_prefill_size=8)
    prompt = prompt_of(60, 2)
    harness.send("a", prompt, logprobs=LogprobOptions(prompt=True))
    for _ in range(4):
        harness.turn()
    (request,) = harness.scheduler.table.running
    assert request.computed == 32
    harness.scheduler.results.retract(request)
    harness.run()
    logprobs = harness.rows("a")[0].prompt_logprobs
    assert logprobs is not None
    assert np.frombuffer(logprobs.token_logprobs, "<f4")[1:].tolist() == [-token for token in prompt[1:]]
    harness.check_empty()


def test_a_mean_survives_a_retraction() -> None:
    harness = Harness(chunked_prefill_size=8)
    prompt = prompt_of(50, 3)
    harness.embed("a", prompt, pooling="mean", normalize=False)
    for _ in range(4):
        harness.turn()
    (request,) = harness.scheduler.table.running
    assert request.computed == 32
    harness.scheduler.results.retract(request)
    harness.run()
    stored = [0]
    for token in prompt:
        stored.append(chain(stored[-1], token))
    mean = np.mean([hidden(value) for value in stored[1:]], axis=0)
    np.testing.assert_allclose(np.frombuffer(harness.vector("a").embedding, "<f4"), mean, rtol=1e-5)
    harness.check_empty()


def test_2048_tokens_serve_32_clients() -> None:
    """Each client sends its next request when it has the last one's answer. Retractions stay the exception."""
    harness = Harness(
        FakeWorker(num_pages=128, page_size=16), max_running_requests=64, chunked_prefill_size=512, stream_interval=2
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=96, ignore_eos=True)
    left = dict.fromkeys(range(32), 4)
    for client in left:
        harness.send(f"{client}-4", prompt_of(120, client * 10 + 4), params=params)
    while any(left.values()):
        harness.turn()
        for client, count in left.items():
            rows = harness.rows(f"{client}-{count}")
            if count and rows and rows[-1].finish is not None:
                left[client] -= 1
                if count > 1:
                    rid = f"{client}-{count - 1}"
                    harness.send(rid, prompt_of(120, client * 10 + count - 1), params=params)
    for client in range(32):
        for count in range(1, 5):
            prompt = prompt_of(120, client * 10 + count)
            assert harness.output(f"{client}-{count}") == harness.expected(prompt, params)
    assert harness.scheduler.results.counters.retractions < 128
    harness.check_empty()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("seed", range(2))
def test_a_storm_in_a_small_pool(seed: int, policy: str, depth: int) -> None:
    """Random lengths, shared prefixes, failures, aborts at any moment: all end once, with what they give alone."""
    rng = random.Random(seed)
    worker = FakeWorker(num_pages=40)
    harness = Harness(worker, depth, schedule_policy=policy, max_queued_requests=10_000)
    worker.fail = lambda plan: RuntimeError() if len(plan.rows) > 1 and rng.random() < 0.02 else None
    worker.row_error = lambda row: "a row failed" if rng.random() < 0.001 else ""
    # With one step in flight a failed step is run again row by row; with more, a later step may have read its rubbish.
    errors = {"a row failed"} | ({"the forward pass failed (RuntimeError)"} if depth > 1 else set())
    prefixes = [rng.choices(range(1, 50), k=rng.randrange(30)) for _ in range(6)]
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    aborted: set[str] = set()
    unsent = 400
    while unsent or len(harness.scheduler.table) or harness.inbox:
        for _ in range(min(unsent, rng.choice([0, 0, 1, 6]))):
            unsent -= 1
            prompt = rng.choice(prefixes) + rng.choices(range(1, 50), k=rng.randrange(1, 40))
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=unsent,
                max_new_tokens=rng.choice([1, 5, 40, 90]),
                min_new_tokens=rng.choice([0, 0, 3]),
                stop_token_ids=tuple(rng.sample(range(50), k=rng.choice([0, 1, 3]))),
                ignore_eos=rng.random() < 0.5,
            )
            rid = f"r{unsent}"
            requests[rid] = prompt, params
            harness.send(rid, prompt, params=params, stream=rng.random() < 0.5)
            if rng.random() < 0.1:  # a client that leaves at once
                harness.inbox.append(AbortReqInput(rids=(rid,)))
                aborted.add(rid)
        if rng.random() < 0.05 and harness.scheduler.table.groups:
            rid = rng.choice(list(harness.scheduler.table.groups))
            harness.inbox.append(AbortReqInput(rids=(rid,)))
            aborted.add(rid)
        harness.turn()
    harness.run()
    assert harness.scheduler.results.counters.retractions > 0
    assert harness.scheduler.kv.evicted_pages > 0
    assert harness.scheduler.table.cached_tokens > 0
    kinds = {"abort": 0, "error": 0, "stop": 0, "length": 0}
    for rid, (prompt, params) in requests.items():
        expected, output, reason = harness.expected(prompt, params), harness.output(rid), harness.finish(rid)
        kinds[reason.type] += 1
        if reason.type in ("abort", "error"):
            assert output == expected[: len(output)]
            assert rid in aborted if reason.type == "abort" else reason.message in errors
        else:
            assert output == expected
        assert harness.rows(rid)[-1].completion_tokens == len(output)
    assert min(kinds["abort"], kinds["stop"], kinds["length"]) > 20
    harness.check_empty()
