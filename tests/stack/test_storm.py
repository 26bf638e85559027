"""Many requests at once through the whole stack, a third of whose clients leave: all end, all memory returns."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from loads import all_at_once

from instances import PATIENCE_S
from llmserve import Engine

REQUESTS = 300
POOL_TOKENS = 1024
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def engine(runtime_root: Path, tiny_model: Path) -> Iterator[Engine]:
    """A pool for about ten of the requests that run at once, so that they are retracted all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime_root))
        options = {"max_total_tokens": POOL_TOKENS, "page_size": 4, "chunked_prefill_size": 64}
        with Engine(str(tiny_model), name="storm", dtype="float32", **options) as engine:
            yield engine


class Client:
    """One request: what it asks, and when it leaves (None: it stays)."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 40)))
        self.options = {
            "max_new_tokens": draw.randint(1, 60),
            "seed": number,
            "ignore_eos": True,
            "temperature": draw.choice([0.0, 1.0]),
        }
        self.manner = draw.choice(["whole", "whole", "stream", "stream", "leave", "cancel", "abort"])
        self.patience = draw.randint(0, 20)
        self.output: list[int] | None = None
        """The tokens, where it stayed to the end."""

    async def run(self, engine: Engine, number: int) -> None:
        if self.manner == "whole":
            self.output = (await engine.async_generate(self.prompt, **self.options)).output_ids
        elif self.manner == "abort":
            task = asyncio.create_task(engine.async_generate(self.prompt, rid=f"abort-{number}", **self.options))
            await asyncio.sleep(self.patience * 0.05)
            await engine.async_abort(f"abort-{number}")
            generation = await task
            assert generation.finish_reason in ("abort", "length")
        elif self.manner == "cancel":
            task = asyncio.create_task(engine.async_generate(self.prompt, **self.options))
            await asyncio.sleep(self.patience * 0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            output: list[int] = []
            async with aclosing(engine.async_stream(self.prompt, **self.options)) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    output += chunk.output_ids
                    if self.manner == "leave" and len(output) > self.patience:
                        return
            self.output = output


async def test_a_storm_of_requests_and_departures(engine: Engine) -> None:
    clients = [Client(number) for number in range(REQUESTS)]
    requests = [client.run(engine, number) for number, client in enumerate(clients)]
    await all_at_once(engine, requests, choices=REQUESTS // 2)

    manager = engine._running().tokenizer_manager

    def metrics() -> tuple[int, int, int]:
        latest = manager.scheduler_metrics
        return (latest.running, latest.waiting, latest.kv_tokens_used) if latest is not None else (-1, -1, -1)

    async with asyncio.timeout(PATIENCE_S):
        while manager.in_flight or metrics() != (0, 0, 0):
            await asyncio.sleep(0.02)
    assert manager.scheduler_metrics is not None
    assert manager.scheduler_metrics.retractions_total > 0

    stayed = [client for client in clients if client.output is not None]
    assert len(stayed) > REQUESTS // 2
    for client in stayed:
        assert len(client.output or ()) == client.options["max_new_tokens"]
    for client in random.Random(1).sample(stayed, 60):
        assert engine.generate(client.prompt, **client.options).output_ids == client.output
    outcomes = manager.http_metrics().outcomes
    assert outcomes["length"] + outcomes["abort"] >= REQUESTS
    assert outcomes["error"] == outcomes["rejected"] == outcomes["unavailable"] == 0
