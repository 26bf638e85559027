"""Engine as a Python program uses it, over real processes, with the tiny model."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from instances import COMMAND_S, FOREVER, PATIENCE_S, fair_time, wait_until
from llmserve import Engine, RequestError, SamplingParams
from llmserve.runtime.config import ConfigError
from llmserve.runtime.outputs import Chunk
from llmserve.runtime.tokenizer_manager import TokenizerManager

LONG = {"max_new_tokens": FOREVER, "ignore_eos": True}


@pytest.fixture(scope="module")
def in_runtime_root(runtime_root: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime_root))
        yield


@pytest.fixture(scope="module")
def engine(in_runtime_root: None, long_model: Path) -> Iterator[Engine]:
    with Engine(str(long_model), name="engine", dtype="float32", max_total_tokens=1 << 16) as engine:
        yield engine


@pytest.fixture
def own_engine(in_runtime_root: None, long_model: Path) -> Iterator[Engine]:
    """One that the test may break."""
    with Engine(str(long_model), dtype="float32", max_total_tokens=1 << 16) as engine:
        yield engine


def in_flight(engine: Engine) -> int:
    return engine._running().tokenizer_manager.in_flight


def children(engine: Engine) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in engine._running().instance.record.children]


# ---- generate ------------------------------------------------------------------------------------------------------


def test_a_generation_says_all_about_itself(engine: Engine) -> None:
    generation = engine.generate("Hello there", max_new_tokens=9, ignore_eos=True, temperature=0.0)
    assert generation.text == engine.tokenizer.decode(generation.output_ids)
    assert generation.finish_reason == "length"
    assert generation.completion_tokens == len(generation.output_ids) == 9
    assert generation.prompt_tokens == len(engine.tokenizer.encode("Hello there"))
    assert generation.logprobs is None


def test_a_text_and_its_tokens_are_the_same_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode("Hello there")
    by_text, by_ids = (engine.generate(prompt, temperature=0.0, max_new_tokens=8) for prompt in ("Hello there", ids))
    assert by_text.output_ids == by_ids.output_ids


def test_a_list_keeps_its_order(engine: Engine) -> None:
    prompts = [f"number {number}" for number in range(100)]
    together = engine.generate(prompts, temperature=0.0, max_new_tokens=4)
    alone = [engine.generate(prompt, temperature=0.0, max_new_tokens=4).output_ids for prompt in prompts[::25]]
    assert [each.output_ids for each in together[::25]] == alone
    assert engine.generate([]) == []


def test_more_prompts_than_the_queue_takes(in_runtime_root: None, tiny_model: Path) -> None:
    with Engine(str(tiny_model), max_queued_requests=2, max_running_requests=2, max_total_tokens=2048) as small:
        assert len(small.generate(["x"] * 20, max_new_tokens=2, ignore_eos=True)) == 20


def test_choices_differ_and_a_seed_repeats_them(engine: Engine) -> None:
    first, again = (engine.generate("x", n=3, seed=5, max_new_tokens=8, ignore_eos=True) for _ in range(2))
    outputs = [choice.output_ids for choice in first.choices]
    assert len({tuple(output) for output in outputs}) == 3
    assert [choice.output_ids for choice in again.choices] == outputs
    assert first.completion_tokens == 24


def test_parameters_may_come_as_one_object(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    assert engine.generate("x", params).completion_tokens == 20
    assert engine.generate("x", params, max_new_tokens=3).completion_tokens == 3


def test_a_stop_string_ends_the_text(engine: Engine) -> None:
    text = engine.generate("x", temperature=0.0, max_new_tokens=16, ignore_eos=True).text
    stop = text[4:6]
    generation = engine.generate("x", temperature=0.0, max_new_tokens=16, ignore_eos=True, stop=stop)
    assert generation.text == text[: text.index(stop)]
    assert generation.finish_reason == "stop"
    assert generation.choices[0].finish is not None
    assert generation.choices[0].finish.matched == stop


def test_logprobs_belong_to_the_tokens(engine: Engine) -> None:
    generation = engine.generate("x", temperature=0.0, max_new_tokens=5, ignore_eos=True, logprobs=3)
    assert generation.logprobs is not None
    assert [entry.token_id for entry in generation.logprobs] == generation.output_ids
    for entry in generation.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy takes the likeliest
        assert entry.logprob < 0


def test_a_bias_decides(engine: Engine) -> None:
    generation = engine.generate("x", temperature=0.0, max_new_tokens=3, ignore_eos=True, logit_bias={65: 100.0})
    assert generation.output_ids == [65] * 3


@pytest.mark.parametrize(
    ("options", "param"),
    [({"temperature": 5.0}, "temperature"), ({"max_new_tokens": 10**9}, "max_tokens"), ({"n": 10**6}, "n")],
)
def test_what_cannot_be_served_is_refused(engine: Engine, options: dict[str, float], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate("x", **options)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_options_that_do_not_exist_or_have_a_wrong_type(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"unknown option 'temprature'; known: .*max_new_tokens"):
        engine.generate("x", temprature=1.0)
    with pytest.raises(RequestError, match="temperature"):
        engine.generate("x", temperature="hot")


def test_one_refused_prompt_refuses_the_list(engine: Engine) -> None:
    with pytest.raises(RequestError, match="empty"):
        engine.generate(["fine", ""], max_new_tokens=4)
    wait_until(lambda: in_flight(engine) == 0, PATIENCE_S, "the others are aborted")


# ---- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_joins_to_the_whole(engine: Engine) -> None:
    options = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    chunks = list(engine.stream("Hello there", **options))
    whole = engine.generate("Hello there", **options)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token_id for chunk in chunks for token_id in chunk.output_ids] == whole.output_ids
    assert len(chunks) > 5
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_leaving_a_stream_aborts_it(engine: Engine) -> None:
    stream = engine.stream("Hello there", **LONG)
    assert next(iter(stream)).completion_tokens >= 1
    assert in_flight(engine) == 1
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: in_flight(engine) == 0, PATIENCE_S, "the request is aborted")


def test_abort_from_another_thread(engine: Engine) -> None:
    results: list[str | None] = []

    def generate() -> None:
        results.append(engine.generate("Hello there", rid="mine", **LONG).finish_reason)

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: engine.abort("mine"), PATIENCE_S, "the request is in flight")
    thread.join(PATIENCE_S)
    assert results == ["abort"]
    assert not engine.abort("mine")


# ---- inside a running loop -----------------------------------------------------------------------------------------


async def test_the_async_twins(engine: Engine) -> None:
    options = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    whole = engine.generate("x", **options)  # the sync one works inside a loop too
    assert (await engine.async_generate("x", **options)).output_ids == whole.output_ids
    chunks: list[Chunk] = [chunk async for chunk in engine.async_stream("x", **options)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(await engine.async_generate(["x", "y"], **options)) == 2
    assert np.array_equal((await engine.async_embed("x")).vector, engine.embed("x").vector)
    assert not await engine.async_abort("nobody")


async def test_requests_of_one_loop_run_together(engine: Engine) -> None:
    generations = await asyncio.gather(
        *(engine.async_generate("x", max_new_tokens=4, ignore_eos=True) for _ in range(16))
    )
    assert [each.completion_tokens for each in generations] == [4] * 16


async def test_cancelling_aborts(engine: Engine) -> None:
    task = asyncio.create_task(engine.async_generate("Hello there", **LONG))
    while in_flight(engine) == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(PATIENCE_S):
        while in_flight(engine):
            await asyncio.sleep(0.005)


async def test_an_engine_of_a_loop(in_runtime_root: None, tiny_model: Path) -> None:
    async with await Engine.create(str(tiny_model), max_total_tokens=2048) as engine:
        assert (await engine.async_generate("x", max_new_tokens=2, ignore_eos=True)).completion_tokens == 2
        processes = children(engine)
    assert not any(process.is_running() for process in processes)


# ---- embeddings ----------------------------------------------------------------------------------------------------


def test_embeddings(engine: Engine) -> None:
    last, other = engine.embed(["one", "two words"])
    assert np.linalg.norm(last.vector) == pytest.approx(1, abs=1e-5)
    assert last.vector.shape == other.vector.shape
    assert not np.allclose(last.vector, other.vector)
    assert other.prompt_tokens == len(engine.tokenizer.encode("two words"))
    mean = engine.embed("two words", pooling="mean", normalize=False).vector
    raw = engine.embed("two words", normalize=False).vector
    assert not np.allclose(mean, raw)
    assert np.allclose(raw / np.linalg.norm(raw), other.vector, atol=1e-5)


# ---- life ----------------------------------------------------------------------------------------------------------


def test_shutdown_leaves_nothing(in_runtime_root: None, tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), max_total_tokens=2048)
    processes, directory = children(engine), engine._running().instance.directory
    assert len(processes) == 2
    assert directory.exists()
    engine.shutdown()
    assert not any(process.is_running() for process in processes)
    assert not directory.exists()
    engine.shutdown()
    with pytest.raises(RequestError, match="shut down") as caught:
        engine.generate("x")
    assert caught.value.status == 503


@pytest.mark.parametrize("which", [0, 1])
def test_the_death_of_a_process_ends_requests_at_once(own_engine: Engine, which: int) -> None:
    stream = iter(own_engine.stream("Hello there", **LONG))
    next(stream)
    victim, others = children(own_engine)[which], children(own_engine)
    victim.send_signal(signal.SIGKILL)
    began = fair_time()
    with pytest.raises(RequestError) as caught:
        for _ in stream:
            pass
    assert fair_time() - began < 2
    assert caught.value.status == 503
    with pytest.raises(RequestError) as refused:
        own_engine.generate("x")
    assert refused.value.status == 503
    wait_until(lambda: not any(process.is_running() for process in others), 5, "the other process ends too")


def test_rows_that_get_lost_on_the_way_end_all(
    in_runtime_root: None, long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is done with the request and the detokenizer lives: only the watchdog can tell who waits for it."""
    monkeypatch.setattr(TokenizerManager, "_deliver", lambda self, batch: None)
    with (
        Engine(str(long_model), dtype="float32", max_total_tokens=1 << 16, watchdog_timeout=3.0) as engine,
        pytest.raises(RequestError, match=r"the detokenizer \(pid \d+\) delivered nothing for 3 s"),
    ):
        engine.generate("Hello there", max_new_tokens=4)


def test_a_model_that_does_not_exist(in_runtime_root: None, runtime_root: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        Engine("no-such-model", name="broken")
    assert not (runtime_root / "llmserve" / "broken").exists()


def test_an_engine_that_nobody_shuts_down_ends_with_the_program(runtime_root: Path, tiny_model: Path) -> None:
    program = (
        "from llmserve import Engine\n"
        f"engine = Engine({str(tiny_model)!r}, name='forgotten', max_total_tokens=2048)\n"
        "print(*engine._running().instance.record.children, len(engine.generate('x', max_new_tokens=2).output_ids))\n"
    )
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime_root)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert result.returncode == 0, result.stderr
    pids = [int(pid) for pid in result.stdout.split()[:2]]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 5, "the children end")
    assert not (runtime_root / "llmserve" / "forgotten").exists()


def test_importing_llmserve_loads_nothing_and_engine_no_torch() -> None:
    program = (
        "import sys, llmserve\n"
        "print(sorted(name for name in sys.modules if name.startswith('llmserve.')))\n"
        "from llmserve import Engine\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, 'fastapi' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=COMMAND_S, check=True
    )
    assert result.stdout.splitlines() == ["[]", "False False False"]
