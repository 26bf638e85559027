"""The scheduler over a real model in fp32: chunks, prefix hits, retractions and company change no token."""

import random
from pathlib import Path

from scheduler_harness import Harness

from llmserve.runtime.config import ServerArgs
from llmserve.runtime.engine.runner import create_worker
from llmserve.runtime.messages import SamplingParams
from llmserve.runtime.models import hub


def test_a_crowd_in_a_small_pool_says_what_each_says_alone(tiny_model: Path) -> None:
    args = ServerArgs(model=str(tiny_model), dtype="float32", max_total_tokens=512, page_size=16)
    worker = create_worker(args, hub.resolve(args.model), lambda stage, done, total, unit: None)
    rng = random.Random(1)
    vocab_size = worker.info.vocab_size
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
    crowd = Harness(worker, max_running_requests=32, chunked_prefill_size=24)
    for i in range(40):
        crowd.send(f"r{i}", prompts[i], params=params[i])
    crowd.run()
    assert crowd.scheduler.results.counters.retractions > 0
    assert crowd.scheduler.table.cached_tokens > 0
    for i in range(40):
        alone = Harness(worker, prefix_cache=False, chunked_prefill_size=512)
        alone.send("a", prompts[i], params=params[i])
        alone.run()
        assert crowd.output(f"r{i}") == alone.output("a"), i
    crowd.check_empty()
