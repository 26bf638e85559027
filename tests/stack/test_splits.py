"""Through the whole stack a model that is split, or has replicas, says token by token what one process says of it.

Tiny models that are split are compared in tests/unit/test_forked_ranks.py, without the stack.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from loads import all_at_once

import reference
from checkpoints import make_tiny
from llmserve import Engine
from llmserve.runtime.messages import SchedulerMetrics
from llmserve.runtime.models import hub

COUNT = 40
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "page_size": 8}
SMALL: dict[str, Any] = {"chunked_prefill_size": 48, "max_total_tokens": 208}
"""Prompts come in chunks, and a few of them fill the pool."""
NEW_TOKENS = {"default": 12}
SPLITS = {
    "TP 3": {"tp_size": 3},
    "PP 2": {"pp_size": 2},
    "TP 3 PP 2": {"tp_size": 3, "pp_size": 2},
    "DP 2": {"dp_size": 2},
}
CASES = [*(("default", split) for split in SPLITS), *((tiny, "DP 2") for tiny in ("llama", "qwen3", "gemma3_text"))]


@pytest.fixture(scope="module", autouse=True)
def in_runtime_root(runtime_root: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime_root))
        yield


class Model:
    """A checkpoint, the prompts for it, and what one process says to each, with room for all and no prefix cache."""

    def __init__(self, name: str, path: str) -> None:
        self.path = path
        self.greedy: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": NEW_TOKENS.get(name, 24),
            "ignore_eos": True,
        }
        with Engine(path, prefix_cache=False, max_total_tokens=16384, **OPTIONS) as engine:
            if name == "default":
                self.prompts = [engine.tokenizer.encode(text) for text in reference.PROMPTS[: COUNT - 1]]
                self.prompts.append(self.prompts[-1] * 2)
            else:
                self.prompts = list(random_prompts())
            self.expected = [each.output_ids for each in engine.generate(self.prompts, **self.greedy)]


def random_prompts() -> Iterator[list[int]]:
    """Some have a prefix in common."""
    rng = Random(7)
    prefixes = [rng.choices(range(3, 1000), k=length) for length in (0, 20, 34)]
    for _ in range(COUNT):
        yield [*rng.choice(prefixes), *rng.choices(range(3, 1000), k=rng.randrange(1, 10))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Each of them made once."""

    @functools.cache
    def model(name: str) -> Model:
        if name == "default":
            return Model(name, hub.default_model())
        return Model(name, str(make_tiny(tmp_path_factory.mktemp("models") / name, name)))

    return model


async def answers(engine: Engine, model: Model, new_tokens: int, aborted: Sequence[int] = ()) -> list[list[int]]:
    """What it says to all prompts at once. Some are asked twice, the second time for an answer that is cut off."""

    async def abort(number: int) -> list[int]:
        rid = f"aborted-{number}"
        options = {**model.greedy, "max_new_tokens": 100, "rid": rid}
        chunks = [chunk async for chunk in cut_off(engine, rid, model.prompts[number], options)]
        assert chunks[-1].finish_reason in ("abort", "length")  # where it was said too late
        return []

    async def keep(number: int) -> list[int]:
        options = {**model.greedy, "max_new_tokens": new_tokens}
        return (await engine.async_generate(model.prompts[number], **options)).output_ids

    requests = [*(keep(number) for number in range(COUNT)), *(abort(number) for number in aborted)]
    found = await all_at_once(engine, requests, choices=len(requests))
    return found[:COUNT]


async def cut_off(engine: Engine, rid: str, prompt: list[int], options: dict[str, Any]) -> Any:
    began = False
    async for chunk in engine.async_stream(prompt, **options):
        yield chunk
        if not began:
            began = await engine.async_abort(rid)


async def last_metrics(engine: Engine) -> list[SchedulerMetrics]:
    """Of each replica, once all that it has done is in them."""
    schedulers = engine._running().tokenizer_manager.schedulers
    while schedulers.total is None or schedulers.total.running + schedulers.total.waiting:
        await asyncio.sleep(0.05)
    return list(schedulers.metrics.values())


@pytest.mark.parametrize(("name", "split"), CASES)
def test_a_split_changes_no_token(models: Callable[[str], Model], name: str, split: str) -> None:
    model = models(name)
    with Engine(model.path, **OPTIONS, **SMALL, **SPLITS[split]) as engine:
        cold = asyncio.run(answers(engine, model, model.greedy["max_new_tokens"], aborted=(5, 17, 29)))
        warm = asyncio.run(answers(engine, model, 3))
        metrics = asyncio.run(last_metrics(engine))
    assert cold == model.expected
    assert warm == [tokens[:3] for tokens in model.expected]
    assert len(metrics) == SPLITS[split].get("dp_size", 1)
    for replica in metrics:
        assert replica.retractions_total > 0
        assert replica.cached_tokens_total > 0
        assert replica.requests_total > COUNT / 4
