"""The sampler: every parameter does what it says, draws follow the distribution, and a row depends on itself alone."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmserve.runtime.engine.batch import SampleSpec, int32_bytes
from llmserve.runtime.engine.sampler import adjust, draw, sample, uniform
from llmserve.runtime.messages import Logprobs, SamplingParams
from llmserve.runtime.ops import native

VOCAB = 50


def spec(position: int = 0, seed: int = 0, **fields: Any) -> SampleSpec:
    own = {name: fields.pop(name) for name in SampleSpec.__struct_fields__ if name in fields}
    return SampleSpec(params=SamplingParams(**fields), seed=seed, position=position, **own)


def logits_of(**scores: float) -> Tensor:
    """One row of zeros but for t3=2.5 and so on."""
    row = torch.zeros(1, VOCAB)
    for name, score in scores.items():
        row[0, int(name[1:])] = score
    return row


def token(logits: Tensor, one: SampleSpec) -> int | None:
    return sample(logits, [one])[0].token_id


def draws(logits: Tensor, count: int = 4000, **params: Any) -> Counter[int | None]:
    rows = sample(logits.expand(count, -1), [spec(position=i, **params) for i in range(count)])
    return Counter(row.token_id for row in rows)


def random_logits(rows: int = 1, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = logits_of(t7=3.0, t40=3.0)
    assert token(logits, spec(temperature=0.0)) == 7
    assert token(logits, spec(top_k=1)) == 7


def test_draws_follow_the_distribution() -> None:
    logits = random_logits()
    counts = draws(logits, 20000, temperature=1.0)
    probabilities = logits[0].softmax(-1)
    for i in range(VOCAB):
        expected = 20000 * probabilities[i].item()
        assert abs(counts[i] - expected) < 5 * max(expected, 1) ** 0.5


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.7, "min_p": 0.1},
    ],
)
def test_filters_are_those_of_transformers(params: dict[str, Any]) -> None:
    logits = random_logits()
    warpers = LogitsProcessorList()
    if "temperature" in params:
        warpers.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), logits.clone())[0].softmax(-1)
    counts = draws(logits, 4000, **params)
    for i in range(VOCAB):
        mean = 4000 * expected[i].item()
        assert abs(counts[i] - mean) < 5 * max(mean, 1) ** 0.5
        assert (expected[i] == 0) <= (counts[i] == 0)
    assert counts != draws(logits, 4000)


@pytest.mark.skipif(native.library() is None, reason="no compiler, or a CPU without AVX-512")
@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_the_native_draw_is_the_draw(scale: float) -> None:
    random = np.random.default_rng(0)
    logits = scale * torch.randn(300, 5003, generator=torch.Generator().manual_seed(1))
    logits[:, ::7] = float("-inf")
    specs = [
        spec(
            seed=i,
            temperature=random.choice([0.3, 1.0, 2.0]),
            top_k=int(random.choice([0, 0, 2, 40, 4500, 9000])),
            top_p=random.choice([1.0, 0.999, 0.9, 0.3, 1e-9]),
            min_p=random.choice([0.0, 0.0, 0.01, 0.5]),
        )
        for i in range(300)
    ]
    native_tokens = [result.token_id for result in sample(logits, specs)]
    torch_tokens = [int(draw(row, one.params, uniform(one))) for row, one in zip(logits, specs, strict=True)]
    assert sum(a != b for a, b in zip(native_tokens, torch_tokens, strict=True)) <= 1  # a number on a boundary
    assert len(set(native_tokens)) > 50


def test_top_p_keeps_the_likeliest_token_at_least() -> None:
    assert set(draws(random_logits(), 50, top_p=1e-9)) == {int(random_logits().argmax())}


def test_top_k_larger_than_the_vocabulary_is_no_filter() -> None:
    assert draws(random_logits(), 500, top_k=1000) == draws(random_logits(), 500)


def history(prompt: list[int], output: list[int]) -> dict[str, Any]:
    return {"history": int32_bytes(prompt + output), "prompt_len": len(prompt)}


def test_presence_penalty_is_once_for_a_token_of_the_output() -> None:
    one = spec(presence_penalty=1.5, **history([5, 6], [7, 7, 8]))
    expected = torch.zeros(VOCAB)
    expected[[7, 8]] = -1.5
    assert torch.equal(adjust(torch.zeros(VOCAB), one), expected)
    assert token(logits_of(t7=1.0, t9=0.5), msgspec.structs.replace(one, params=greedy(one))) == 9


def test_frequency_penalty_is_for_each_time_in_the_output() -> None:
    one = spec(frequency_penalty=0.5, **history([5, 6], [7, 7, 8]))
    expected = torch.zeros(VOCAB)
    expected[7], expected[8] = -1.0, -0.5
    assert torch.equal(adjust(torch.zeros(VOCAB), one), expected)
    assert token(logits_of(t7=1.0, t9=0.5), msgspec.structs.replace(one, params=greedy(one))) == 9


def greedy(one: SampleSpec) -> SamplingParams:
    return msgspec.structs.replace(one.params, temperature=0.0)


def test_repetition_penalty_is_over_prompt_and_output_as_in_transformers() -> None:
    logits = random_logits()
    one = spec(repetition_penalty=1.7, **history([5, 6, 6], [7, 8]))
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([[5, 6, 6, 7, 8]]), logits.clone())[0]
    assert torch.equal(adjust(logits[0], one), expected)


def test_logit_bias_adds_to_a_token() -> None:
    logits = logits_of(t7=1.0)
    assert token(logits, spec(temperature=0.0, logit_bias=((9, 1.5),))) == 9
    assert token(logits, spec(temperature=0.0, logit_bias=((7, -100.0), (3, 0.5)))) == 3
    assert draws(logits, 200, logit_bias=((9, 100.0),)) == {9: 200}


def test_forbidden_tokens_are_not_drawn_whatever_their_bias() -> None:
    logits = logits_of(t7=5.0, t9=4.0)
    assert token(logits, spec(temperature=0.0, forbidden=(7,), logit_bias=((7, 100.0),))) == 9
    assert 7 not in draws(logits, 500, forbidden=(7,))


def test_a_mask_allows_its_tokens_only() -> None:
    mask = np.packbits(np.isin(np.arange(VOCAB), [11, 49]), bitorder="little").tobytes()
    assert token(logits_of(t7=5.0, t49=1.0), spec(temperature=0.0, mask=mask)) == 49
    assert set(draws(random_logits(), 300, mask=mask)) == {11, 49}


def test_a_seed_and_a_position_make_the_draw() -> None:
    logits = torch.zeros(1, VOCAB)
    first = [token(logits, spec(seed=1, position=i)) for i in range(60)]
    assert first == [token(logits, spec(seed=1, position=i)) for i in range(60)]
    assert first != [token(logits, spec(seed=2, position=i)) for i in range(60)]
    assert len(set(first)) > 20


def test_the_numbers_are_uniform_and_neighbouring_seeds_share_none() -> None:
    table = np.array([[uniform(spec(seed=seed, position=i)) for i in range(100)] for seed in range(-2, 98)])
    assert 0 <= table.min() < table.max() < 1
    assert np.unique(table).size == table.size
    assert abs(table.mean() - 0.5) < 0.01
    counts = np.histogram(table, bins=10, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi-squared of 9 degrees at 0.1%
    shifted = np.corrcoef(table[1:, :-1].ravel(), table[:-1, 1:].ravel())[0, 1]
    assert abs(shifted) < 0.04


def test_a_row_depends_on_itself_alone() -> None:
    logits = random_logits(8)
    specs = [
        spec(temperature=0.0),
        spec(seed=1, temperature=0.7),
        spec(seed=2, top_k=3),
        spec(seed=3, top_p=0.5, top_logprobs=2),
        spec(seed=4, min_p=0.3),
        spec(seed=5, presence_penalty=1.0, **history([1], [2])),
        spec(temperature=0.0, logit_bias=((4, 9.0),), top_logprobs=0),
        spec(temperature=0.0, top_logprobs=5),
    ]
    together = sample(logits, specs)
    assert together == [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(specs)]
    reverse = sample(logits.flip(0), specs[::-1])
    assert together == reverse[::-1]


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


def test_logprobs_are_those_of_the_model_whatever_bends_the_choice() -> None:
    logits = random_logits()
    expected = logits[0].log_softmax(-1)
    bent = {"temperature": 0.5, "logit_bias": ((9, 50.0),), "top_p": 0.9, "presence_penalty": 1.0}
    row = sample(logits, [spec(top_logprobs=3, **bent)])[0]
    assert row.token_id == 9
    assert row.logprobs is not None
    assert floats(row.logprobs.token_logprobs) == pytest.approx([expected[9].item()], abs=1e-5)
    top = expected.topk(3)
    assert row.logprobs.top == 3
    assert np.frombuffer(row.logprobs.top_ids, "<i4").tolist() == top.indices.tolist()
    assert floats(row.logprobs.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_come_only_when_asked() -> None:
    rows = sample(random_logits(2), [spec(), spec(top_logprobs=0)])
    assert rows[0].logprobs is None
    assert isinstance(rows[1].logprobs, Logprobs)
    assert (rows[1].logprobs.top, rows[1].logprobs.top_ids) == (0, b"")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "top_logprobs": 1}])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    logits[1, 30] = bad
    rows = sample(logits, [spec(**params)] * 3)
    assert "not finite" in rows[1].error
    assert rows[1].token_id is None
    assert not rows[0].error
    assert rows[0].token_id is not None
    assert rows[2] == sample(logits[2:], [spec(**params)])[0]


def test_masked_rows_among_others_are_drawn_as_alone_and_tell_the_logprobs_of_the_model() -> None:
    logits = random_logits(4)
    mask = np.packbits(np.isin(np.arange(VOCAB), [3, 11, 30, 49]), bitorder="little").tobytes()
    specs = [
        spec(temperature=0.0, mask=mask, top_logprobs=2),
        spec(temperature=0.0),
        spec(temperature=1.0, mask=mask, frequency_penalty=2.0, **history([5], [11, 11])),
        spec(temperature=1.0, top_k=2, mask=mask),
    ]
    rows = sample(logits, specs)
    assert [sample(logits[i : i + 1], [one])[0].token_id for i, one in enumerate(specs)] == [r.token_id for r in rows]
    assert {rows[i].token_id for i in (0, 2, 3)} <= {3, 11, 30, 49}
    assert rows[0].logprobs is not None
    told = np.frombuffer(rows[0].logprobs.token_logprobs, "<f4")[0]
    assert told == pytest.approx(float(logits[0].log_softmax(-1)[rows[0].token_id]), abs=1e-5)


def test_a_row_with_nothing_allowed_fails_alone() -> None:
    nothing = bytes(-(-VOCAB // 8))
    for temperature in (0.0, 1.0):
        rows = sample(random_logits(2), [spec(temperature=temperature, mask=nothing), spec(temperature=temperature)])
        assert "no token is allowed" in rows[0].error
        assert rows[1].token_id is not None
