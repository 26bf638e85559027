"""The worker on a tiny checkpoint: what a plan gives is what transformers gives, however the plan is cut."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_worker import FakeWorker
from transformers import AutoModelForCausalLM

from checkpoints import VOCAB_SIZE, make_tiny
from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.engine import memory
from llmserve.runtime.engine.batch import PlanRow, RowResult, SampleSpec, StepPlan, int32_bytes
from llmserve.runtime.engine.runner import create_worker, warm_up
from llmserve.runtime.engine.worker import TpModelWorker
from llmserve.runtime.messages import SamplingParams
from llmserve.runtime.models.hub import Checkpoint, resolve
from llmserve.runtime.ops import PackedWeight, native

PAGE = 16
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return resolve(str(make_tiny(tmp_path_factory.mktemp("model") / "llama")))


needs_kernels = pytest.mark.skipif(native.library() is None, reason="no compiler, or a CPU without AVX-512")


@pytest.fixture(scope="module", params=[pytest.param("native", marks=needs_kernels), "reference"])
def worker(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> TpModelWorker:
    return make_worker(checkpoint, attention_backend=request.param)


def make_worker(checkpoint: Checkpoint, **options: Any) -> TpModelWorker:
    args = ServerArgs(model=checkpoint.path, **{"max_total_tokens": 1024, "threads": 2} | options)
    return create_worker(args, checkpoint, lambda *progress: None)


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def row(ids: list[int], start: int = 0, pages: range = range(64), **fields: Any) -> PlanRow:
    return PlanRow(token_ids=int32_bytes(ids), start=start, pages=int32_bytes(list(pages)), **fields)


def drawn(position: int, params: SamplingParams = GREEDY, **fields: Any) -> SampleSpec:
    return SampleSpec(params=params, seed=5, position=position, **fields)


def run(worker: TpModelWorker, *rows: PlanRow) -> tuple[RowResult, ...]:
    return worker.submit(StepPlan(rows=rows)).result().rows


def generate(worker: TpModelWorker, ids: list[int], count: int, chunk: int) -> list[int]:
    """Greedy tokens after a prompt that is computed `chunk` tokens at a time."""
    known, done, out = list(ids), 0, []
    while len(out) < count:
        now = known[done : done + chunk]
        last = done + len(now) == len(known)
        result = run(worker, row(now, done, sample=drawn(len(known)) if last else None))[0]
        done += len(now)
        assert (result.token_id is not None) == last
        if result.token_id is not None:
            known.append(result.token_id)
            out.append(result.token_id)
    return out


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_greedy_tokens_are_those_of_transformers(worker: TpModelWorker, reference: Any, chunk: int) -> None:
    ids = tokens(37)
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 37:].tolist()
    assert generate(worker, ids, 12, chunk) == expected


def test_rows_of_a_step_do_not_touch_each_other(worker: TpModelWorker) -> None:
    prompts = [tokens(n, seed=n) for n in (1, 15, 16, 17, 40)]
    specs = [drawn(len(ids), top_logprobs=2) for ids in prompts]
    alone = [run(worker, row(ids, sample=spec))[0] for ids, spec in zip(prompts, specs, strict=True)]
    rows = [
        row(ids, pages=range(3 * i, 3 * i + 3), sample=spec)
        for i, (ids, spec) in enumerate(zip(prompts, specs, strict=True))
    ]
    together = run(worker, *rows)
    for one, other in zip(alone, together, strict=True):
        assert other.token_id == one.token_id
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert np.frombuffer(other.logprobs.token_logprobs, "<f4") == pytest.approx(
            np.frombuffer(one.logprobs.token_logprobs, "<f4"), abs=1e-5
        )


@pytest.mark.parametrize("split", [[300], [100, 200], [299, 1]])
def test_prompt_logprobs_are_those_of_transformers(worker: TpModelWorker, reference: Any, split: list[int]) -> None:
    ids = tokens(301)
    with torch.no_grad():
        expected = reference(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    got, ids_got, top_got, start = [], [], [], 0
    for count in split:
        some = row(ids[start : start + count], start, prompt_logprobs=2, next_token=ids[start + count])
        result = run(worker, some)[0]
        assert result.token_id is None
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs.top == 2
        got.append(np.frombuffer(result.prompt_logprobs.token_logprobs, "<f4"))
        ids_got.append(np.frombuffer(result.prompt_logprobs.top_ids, "<i4").reshape(-1, 2))
        top_got.append(np.frombuffer(result.prompt_logprobs.top_logprobs, "<f4").reshape(-1, 2))
        start += count
    top = expected.topk(2)
    chosen = expected[torch.arange(300), torch.tensor(ids[1:])]
    assert np.concatenate(got) == pytest.approx(chosen.numpy(), abs=1e-4)
    assert np.concatenate(top_got) == pytest.approx(top.values.numpy(), abs=1e-4)
    assert (np.concatenate(ids_got) == top.indices.numpy()).mean() > 0.99  # near ties may swap


def test_without_a_next_token_the_last_position_has_no_logprob(worker: TpModelWorker) -> None:
    result = run(worker, row(tokens(5), prompt_logprobs=0))[0]
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs.token_logprobs) == 4 * 4
    alone = run(worker, row(tokens(1), prompt_logprobs=3))[0]
    assert alone.prompt_logprobs is not None
    assert alone.prompt_logprobs.token_logprobs == b""


def test_pooled_hidden_states_are_those_of_transformers(worker: TpModelWorker, reference: Any) -> None:
    ids = tokens(20)
    with torch.no_grad():
        hidden = reference.model(torch.tensor([ids])).last_hidden_state[0]
    mean, last = run(worker, row(ids, pool="mean"), row(ids, pages=range(10, 12), pool="last"))
    assert np.frombuffer(mean.hidden, "<f4") == pytest.approx(hidden.sum(0).numpy(), abs=1e-3)
    assert np.frombuffer(last.hidden, "<f4") == pytest.approx(hidden[-1].numpy(), abs=1e-4)


def test_a_failed_forward_is_raised_by_its_handle_and_by_no_other(worker: TpModelWorker) -> None:
    handle = worker.submit(StepPlan(rows=(row(tokens(40), pages=range(1)),)))  # its pages hold 16 tokens
    assert handle.done()
    with pytest.raises(IndexError):
        handle.result()
    assert run(worker, row(tokens(4), sample=drawn(4)))[0].token_id is not None


def test_a_model_that_is_not_finite_fails_its_rows(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "bad", "llama")
    worker = make_worker(resolve(str(directory)))
    head = dict(worker.model.slots())["lm_head.weight"].weight
    head.value.exchange(PackedWeight(torch.full(head.shape, float("nan"))))  # type: ignore[attr-defined]
    greedy, random = run(
        worker, row([5], sample=drawn(1)), row([6], pages=range(1, 2), sample=drawn(1, SamplingParams()))
    )
    assert "not finite" in greedy.error
    assert "not finite" in random.error


def test_the_same_seed_draws_the_same_alone_and_in_a_batch(worker: TpModelWorker) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.95, top_k=200)
    specs = [msgspec.structs.replace(drawn(9, params), seed=seed) for seed in range(16)]
    ids = tokens(9)
    alone = [run(worker, row(ids, sample=spec))[0].token_id for spec in specs]
    rows = [row(ids, pages=range(i, i + 1), sample=spec) for i, spec in enumerate(specs)]
    assert [result.token_id for result in run(worker, *rows)] == alone
    assert len(set(alone)) > 8


def test_bfloat16_is_the_checkpoints_or_the_options(tmp_path: Path, checkpoint: Checkpoint) -> None:
    half = resolve(str(make_tiny(tmp_path / "half", dtype="bfloat16")))
    page_bytes = 2 * 3 * PAGE * 2 * 16  # K and V, layers, tokens, KV heads, head_dim
    assert make_worker(half).info.bytes_per_page == page_bytes * 2
    assert make_worker(half, dtype="float32").info.bytes_per_page == page_bytes * 4
    assert make_worker(checkpoint, dtype="bfloat16").info.bytes_per_page == page_bytes * 2


def test_float16_becomes_bfloat16_on_a_cpu_unless_it_is_asked_for(tmp_path: Path) -> None:
    half = resolve(str(make_tiny(tmp_path / "half", dtype="float16")))
    assert [make_worker(half, device="cpu", dtype=dtype).info.in_effect["dtype"] for dtype in ("auto", "float16")] == [
        "bfloat16",
        "float16",
    ]


@pytest.mark.parametrize(
    ("page_size", "max_model_len", "computed"),
    [(16, 512, [4, 1]), (1, 512, [4, 1]), (2, 4, [3, 1]), (16, 2, [1, 1]), (1, 1, [1])],
)
def test_the_warm_up_keeps_to_the_pages_and_the_context(
    page_size: int, max_model_len: int, computed: list[int]
) -> None:
    worker = FakeWorker(page_size=page_size, max_model_len=max_model_len)
    warm_up(worker, lambda *progress: None)
    assert [len(plan.rows[0].token_ids) // 4 for plan in worker.plans] == computed


def test_pages_of_one_token(worker: TpModelWorker, checkpoint: Checkpoint) -> None:
    small, ids = make_worker(checkpoint, page_size=1), tokens(30)
    (expected,), (found,) = (run(each, row(ids, sample=drawn(30))) for each in (worker, small))
    assert found.token_id == expected.token_id


def test_what_is_in_effect_is_what_the_options_say(checkpoint: Checkpoint) -> None:
    options = {"device": "cpu", "dtype": "bfloat16", "attention_backend": "reference", "threads": 1}
    worker = make_worker(checkpoint, page_size=8, **options)
    assert worker.info.in_effect == options
    assert torch.get_num_threads() == 1
    assert worker.info.page_size == 8


def test_the_pool_is_what_the_options_say(checkpoint: Checkpoint) -> None:
    info = make_worker(checkpoint, max_total_tokens=1000).info
    assert (info.num_pages, info.page_size, info.max_model_len) == (62, 16, 512)
    assert info.vocab_size == VOCAB_SIZE
    assert make_worker(checkpoint, max_total_tokens=200).info.max_model_len == 192
    assert make_worker(checkpoint, max_model_len=100).info.max_model_len == 100
    for options, said in (
        ({"max_model_len": 513}, "the model allows 512"),
        ({"max_model_len": 300, "max_total_tokens": 200}, "pool of 192 tokens"),
        ({"max_total_tokens": 15}, "no page of 16"),
        ({"max_total_tokens": 10**12}, "MiB are available"),
        ({"device": "cuda"}, "finds no CUDA device"),
    ):
        if "cuda" in str(options) and torch.cuda.is_available():
            continue
        with pytest.raises(ConfigError, match=said):
            make_worker(checkpoint, **options)


def test_the_pool_is_no_larger_than_the_requests_can_use(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = {"max_total_tokens": None, "max_running_requests": 3}
    assert make_worker(checkpoint, **unlimited).info.num_pages == 3 * 512 // PAGE
    bytes_per_token = 2 * 3 * 2 * 16 * 4
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * 640 * bytes_per_token)
    assert make_worker(checkpoint, **unlimited).info.num_pages == 640 // PAGE
