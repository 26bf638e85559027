"""The default model through the whole stack says what transformers says, alone and in a batch."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from loads import all_at_once

import reference
from llmserve import Engine
from llmserve.runtime.outputs import Generation

NEW_TOKENS = 12
PROMPTS = list(reference.PROMPTS)
SIXTY_FOUR = [*PROMPTS, *PROMPTS[:24]]


@pytest.fixture(scope="module", autouse=True)
def in_runtime_root(runtime_root: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime_root))
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The default model in fp32, without a prefix cache, so that every prompt is computed. Its first step takes all of
    them, so they decode together.
    """
    with Engine(dtype="float32", max_total_tokens=32768, chunked_prefill_size=2048, prefix_cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def batch_of_64(engine: Engine) -> list[Generation]:
    return asyncio.run(crowd(engine, SIXTY_FOUR, NEW_TOKENS))


@pytest.fixture(scope="module")
def batched(batch_of_64: list[Generation]) -> list[Generation]:
    """What each prompt gives there."""
    return batch_of_64[: len(PROMPTS)]


async def crowd(engine: Engine, prompts: Sequence[str], new_tokens: int) -> list[Generation]:
    """All of them wait together before the first one begins."""
    requests = [engine.async_generate(prompt, temperature=0.0, max_new_tokens=new_tokens) for prompt in prompts]
    return await all_at_once(engine, requests, choices=len(prompts))


def test_there_are_forty_different_prompts() -> None:
    assert len(set(PROMPTS)) == 40


def test_greedy_in_a_batch_is_what_transformers_chooses(engine: Engine, batched: list[Generation]) -> None:
    for prompt, generation in zip(PROMPTS, batched, strict=True):
        assert generation.output_ids
        choices = reference.greedy_choices(engine.tokenizer.encode(prompt), generation.output_ids)
        assert generation.output_ids == choices, prompt
        stopped = generation.finish_reason == "stop"
        assert len(generation.output_ids) == NEW_TOKENS or stopped, prompt


def test_a_prompt_gives_the_same_at_two_places_of_a_batch(batch_of_64: list[Generation]) -> None:
    outputs = [each.output_ids for each in batch_of_64]
    assert outputs[len(PROMPTS) :] == outputs[: len(SIXTY_FOUR) - len(PROMPTS)]


def test_greedy_alone_is_greedy_in_a_batch(engine: Engine, batched: list[Generation]) -> None:
    alone = [engine.generate(prompt, temperature=0.0, max_new_tokens=8) for prompt in PROMPTS]
    assert [each.output_ids for each in alone] == [each.output_ids[:8] for each in batched]


def test_greedy_survives_chunks_prefix_hits_and_retraction(batch_of_64: list[Generation]) -> None:
    """64 at once, in a pool that holds a few of them, their prompts in chunks; twice, so that prefixes are found."""
    expected = [each.output_ids for each in batch_of_64]
    with Engine(dtype="float32", max_total_tokens=640, chunked_prefill_size=48, page_size=8) as engine:
        cold, warm = (asyncio.run(crowd(engine, SIXTY_FOUR, new_tokens)) for new_tokens in (NEW_TOKENS, 4))
        longest = engine.generate(PROMPTS[-1], temperature=0.0, max_new_tokens=NEW_TOKENS)
        again = engine.generate(PROMPTS[-1], temperature=0.0, max_new_tokens=NEW_TOKENS)
        metrics = engine._running().tokenizer_manager.scheduler_metrics
    assert [each.output_ids for each in cold] == expected
    assert [each.output_ids for each in warm] == [tokens[:4] for tokens in expected]
    assert longest.output_ids == again.output_ids == expected[len(PROMPTS) - 1]
    assert again.cached_tokens >= again.prompt_tokens - 8
    assert metrics is not None
    assert metrics.retractions_total > 0
    assert metrics.evicted_tokens_total > 0


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[7], PROMPTS[36]])
def test_greedy_is_what_transformers_generates(engine: Engine, prompt: str) -> None:
    ids = engine.tokenizer.encode(prompt)
    ours = engine.generate(ids, temperature=0.0, max_new_tokens=8).output_ids
    assert ours == reference.generate(ids, 8)


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(engine: Engine) -> None:
    def drawn(prompt: str) -> Coroutine[Any, Any, Generation]:
        return engine.async_generate(prompt, temperature=1.0, top_p=0.95, seed=7, max_new_tokens=6)

    batch = asyncio.run(all_at_once(engine, [drawn(prompt) for prompt in PROMPTS[:32]], choices=32))
    together = batch[::2]  # half of them, for the time that one alone takes
    alone = [asyncio.run(drawn(prompt)) for prompt in PROMPTS[:32:2]]
    assert [each.text for each in together] == [each.text for each in alone]
    assert [each.output_ids for each in together] == [each.output_ids for each in alone]


def test_another_seed_gives_other_text(engine: Engine) -> None:
    first, second = (engine.generate(PROMPTS[0], temperature=1.0, seed=seed, max_new_tokens=16) for seed in (1, 2))
    assert first.output_ids != second.output_ids


def test_share_of_prompts_that_differ_in_bf16(
    batched: list[Generation], record_property: Callable[[str, object], None]
) -> None:
    """bf16 rounds, so some greedy choices change; how many is reported, and most must not."""
    with Engine(dtype="bfloat16", max_total_tokens=32768) as engine:
        rounded = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=NEW_TOKENS)
    differ = sum(a.output_ids != b.output_ids for a, b in zip(rounded, batched, strict=True))
    share = differ / len(PROMPTS)
    record_property("bf16_share_of_prompts_that_differ", share)
    print(f"bf16 changes the greedy output of {differ} of {len(PROMPTS)} prompts ({share:.0%})")
    first_tokens_differ = sum(a.output_ids[0] != b.output_ids[0] for a, b in zip(rounded, batched, strict=True))
    assert first_tokens_differ <= 4
    assert share < 0.5
