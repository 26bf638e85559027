"""The scheduler over a real model in fp32: chunks, prefix hits, retractions and company change no token."""

import random
from pathlib import Path

import msgspec
import pytest
from scheduler_harness import Harness

import reference
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.engine.runner import create_worker
from llmserve.runtime.engine.worker import TpModelWorker
from llmserve.runtime.messages import SamplingParams
from llmserve.runtime.models import hub
from llmserve.runtime.tokenizer import Tokenizer

NEW_TOKENS = 12


def worker_of(model: str, max_total_tokens: int) -> TpModelWorker:
    args = ServerArgs(model=model, dtype="float32", max_total_tokens=max_total_tokens, page_size=16)
    return create_worker(args, hub.resolve(model), lambda stage, done, total, unit: None)


@pytest.fixture(scope="module")
def tiny_worker(tiny_model: Path) -> TpModelWorker:
    return worker_of(str(tiny_model), 512)


def test_a_crowd_in_a_small_pool_says_what_each_says_alone(tiny_worker: TpModelWorker) -> None:
    rng = random.Random(1)
    vocab_size = tiny_worker.info.vocab_size
    prefixes = [rng.choices(range(vocab_size), k=length) for length in (0, 20, 50)]
    prompts = [[*rng.choice(prefixes), *rng.choices(range(vocab_size), k=rng.randrange(1, 30))] for _ in range(40)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 20]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            seed=i,
            max_new_tokens=rng.choice([4, 40, 70]),
            ignore_eos=True,
        )
        for i in range(40)
    ]
    crowd = Harness(tiny_worker, max_running_requests=32, chunked_prefill_size=24)
    for i in range(40):
        crowd.send(f"r{i}", prompts[i], params=params[i])
    crowd.run()
    assert crowd.scheduler.results.counters.retractions > 0
    assert crowd.scheduler.table.cached_tokens > 0
    for i in range(40):
        alone = Harness(tiny_worker, prefix_cache=False, chunked_prefill_size=512)
        alone.send("a", prompts[i], params=params[i])
        alone.run()
        assert crowd.output(f"r{i}") == alone.output("a"), i
    crowd.check_empty()


class SmallerPool:
    """The same worker, of whose pool only the first `num_tokens` are used."""

    def __init__(self, worker: TpModelWorker, num_tokens: int) -> None:
        self.info = msgspec.structs.replace(worker.info, num_pages=num_tokens // worker.info.page_size)
        self.submit = worker.submit


def test_the_default_model_says_the_same_however_it_is_scheduled() -> None:
    """In a batch of 64; then in chunks, in a pool that is too small; then again, with prefix hits.

    That these prompts give what transformers gives, alone and in a batch, is test_reference.py's.
    """
    checkpoint = hub.resolve(hub.default_model())
    tokenizer = Tokenizer.load(checkpoint.tokenizer_dir)
    prompts = [tokenizer.encode(prompt) for prompt in reference.PROMPTS]
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
    worker = worker_of(hub.default_model(), 4096)

    batch = Harness(worker, max_running_requests=64, chunked_prefill_size=4096, prefix_cache=False)
    for i in range(64):
        batch.send(f"{i}", prompts[i % 40], params=params)
    batch.run()
    small = Harness(SmallerPool(worker, 768), max_running_requests=64, chunked_prefill_size=40)
    for again in ("cold", "warm"):
        for i, prompt in enumerate(prompts):
            small.send(f"{again}{i}", prompt, params=params)
        small.run()
    assert small.scheduler.results.counters.retractions > 0
    assert sum(small.rows(f"warm{i}")[-1].cached_tokens for i in range(40)) > 0

    for i in range(40):
        output = batch.output(f"{i}")
        assert len(output) == NEW_TOKENS or batch.finish(f"{i}").type == "stop"
        assert small.output(f"cold{i}") == output
        assert small.output(f"warm{i}") == output
    for i in range(40, 64):
        assert batch.output(f"{i}") == batch.output(f"{i - 40}")
    small.check_empty()
