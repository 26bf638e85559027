"""Loads: what requests a benchmark sends, sending them to a server, and the statistics of the answers."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from llmserve.cli.bench.client import Answer, Request

NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car
"""
WORDS = NOUNS.split()
"""What prompts are made of: common English words, most of them one token in any vocabulary."""
WARM_UP = 2
WARM_UP_TOKENS = 8


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` prompts of `input_words` words each, of which the first fraction `shared` is the same in all.

    Without `rate` the load is closed: `concurrency` clients, each sending its next request when the last is answered.
    With `rate` it is open: Poisson arrivals, `rate` a second on average, however many are under way.
    """

    name: str = "bench"
    requests: int = 32
    concurrency: int = 8
    rate: float | None = None
    input_words: int = 128
    shared: float = 0.0
    output_tokens: int = 64
    stream: bool = True
    seed: int = 0

    def prompts(self) -> list[str]:
        rng = random.Random(self.seed)
        common = round(self.input_words * self.shared)
        prefix = words(rng, common)
        return [" ".join([*prefix, *words(rng, self.input_words - common)]) for _ in range(self.requests)]

    def warm_up(self) -> list[str]:
        """Prompts of the same length that share no prefix with the measured ones."""
        rng = random.Random(f"warm-up {self.seed}")
        return [" ".join(words(rng, self.input_words)) for _ in range(WARM_UP)]


SUITE = (
    Load(name="W1 single stream", requests=4, concurrency=1, input_words=128, output_tokens=128),
    Load(name="W2 sixteen clients", requests=48, concurrency=16, input_words=256, output_tokens=128),
    Load(name="W3 sixty-four clients", requests=64, concurrency=64, input_words=128, output_tokens=64),
    Load(name="W4 shared prefix", requests=32, concurrency=8, input_words=1056, shared=1024 / 1056, output_tokens=32),
    Load(name="W5 long prompts", requests=8, concurrency=2, input_words=2048, output_tokens=8),
)


def standard_loads(seed: int, stream: bool) -> tuple[Load, ...]:
    """The standard loads W1 to W5, each with its own seed, so that none finds the prompts of another in the cache."""
    return tuple(
        msgspec.structs.replace(load, seed=seed * len(SUITE) + number, stream=stream)
        for number, load in enumerate(SUITE)
    )


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; None where nothing was observed."""

    p50: float | None
    p95: float | None
    p99: float | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one load. `cpu_share` is the fraction of one core that the load generator itself used."""

    load: Load
    ok: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    ttft: Quantiles
    itl: Quantiles
    e2e: Quantiles
    cpu_share: float

    @property
    def answered(self) -> int:
        """The number of requests that have ended: all, unless Ctrl-C came before."""
        return self.ok + sum(self.errors.values())


async def put(
    load: Load,
    url: str,
    model: str,
    headers: dict[str, str],
    extra: dict[str, Any],
    timeout_s: float,
    on_answer: Callable[[], None],
) -> Result:
    """Warms the server up, sends the load and returns its statistics. `on_answer` is called after each answer.

    When cancelled, it returns those of the answers that have come; without any, it raises CancelledError.
    """
    request = Request(url, headers, timeout_s)
    body = {"model": model, "max_tokens": load.output_tokens, "temperature": 0.0, "ignore_eos": True}
    if load.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body = {name: value for name, value in (body | extra).items() if value is not None}
    for prompt in load.warm_up():
        await request.send(body | {"prompt": prompt, "max_tokens": min(WARM_UP_TOKENS, load.output_tokens)})
    rng = random.Random(load.seed)
    gate = asyncio.Semaphore(load.requests if load.rate else load.concurrency)

    answers: list[Answer] = []

    async def one(prompt: str) -> None:
        async with gate:
            answers.append(await request.send(body | {"prompt": prompt}))
        on_answer()

    began, cpu = time.perf_counter(), time.process_time()
    tasks: list[asyncio.Task[None]] = []
    try:
        for prompt in load.prompts():
            if load.rate and tasks:
                await asyncio.sleep(rng.expovariate(load.rate))
            tasks.append(asyncio.create_task(one(prompt)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        if not answers:
            raise
    return count(load, answers, time.perf_counter() - began, time.process_time() - cpu)


def count(load: Load, answers: list[Answer], seconds: float, cpu_s: float) -> Result:
    good = [answer for answer in answers if not answer.error]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    output_tokens = sum(answer.output_tokens for answer in good)
    return Result(
        load=load,
        ok=len(good),
        errors=errors,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(answer.cached_tokens for answer in good),
        output_tokens=output_tokens,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=output_tokens / seconds,
        tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        ttft=quantiles([answer.ttft_s for answer in good] if load.stream else []),
        itl=quantiles([itl for answer in good if (itl := answer.itl_s) is not None] if load.stream else []),
        e2e=quantiles([answer.e2e_s for answer in good]),
        cpu_share=cpu_s / seconds,
    )


def quantiles(values: list[float]) -> Quantiles:
    """p50, p95 and p99 by the nearest-rank method."""
    ranked = sorted(values)

    def at(percent: int) -> float | None:
        return ranked[max(0, -(-len(ranked) * percent // 100) - 1)] if ranked else None

    return Quantiles(p50=at(50), p95=at(95), p99=at(99))


def words(rng: random.Random, number: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(number)]
