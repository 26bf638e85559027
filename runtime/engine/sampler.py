"""Which token comes next: penalties, filters and the draw, and the logprobs that go with it.

Nothing here depends on the batch: a row's token follows from its own logits and its own SampleSpec. The random number
of a draw is a hash of (seed, position), so it is the same whatever else runs, in whatever order.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llmserve.runtime.engine.batch import RowResult, SampleSpec, int32_array, int32_bytes
from llmserve.runtime.messages import Logprobs, SamplingParams
from llmserve.runtime.ops import argmax, mask, native

_MASK64 = (1 << 64) - 1
_NEGATIVE_INFINITY = float("-inf")


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[RowResult]:
    """One token a row of `logits` (float32 [N, vocabulary], not written to), chosen as specs[row] says.

    A row without a finite best logit gets an error instead of a token. The device is synced only at the end.
    """
    tokens, best = argmax(logits)
    allowed = best if all(map(_plain, specs)) else _choose(logits, specs, tokens, best)
    logprobs = _sampled_logprobs(logits, tokens, specs)
    logits_of_best = best.tolist()
    scores = logits_of_best if allowed is best else allowed.tolist()
    results = []
    for i, (token, logit, score) in enumerate(zip(tokens.tolist(), logits_of_best, scores, strict=True)):
        if not math.isfinite(logit):
            results.append(RowResult(error="the model's logits are not finite"))
        elif not math.isfinite(score):
            results.append(RowResult(error="no token is allowed here"))
        else:
            results.append(RowResult(token_id=token, logprobs=logprobs.get(i)))
    return results


def _plain(spec: SampleSpec) -> bool:
    """Whether the choice is the argmax of the unmodified logits."""
    return spec.params.greedy and not spec.mask and not _adjusted(spec)


def _choose(logits: Tensor, specs: Sequence[SampleSpec], tokens: Tensor, best: Tensor) -> Tensor:
    """Overwrites in `tokens` those that are not plain argmaxes. Returns [rows], the largest
    allowed score of each row.
    """
    allowed = best.clone()
    scores = [adjust(row, spec) if _adjusted(spec) else row for row, spec in zip(logits, specs, strict=True)]
    masked = [i for i, spec in enumerate(specs) if spec.mask]
    if masked:
        rows = mask([scores[i] for i in masked], [specs[i].mask for i in masked])
        index = torch.tensor(masked, device=logits.device)
        tokens[index], allowed[index] = argmax(rows)
        for i, row in zip(masked, rows, strict=True):
            scores[i] = row
    for i, spec in enumerate(specs):
        if _adjusted(spec) and not spec.mask:
            tokens[i : i + 1], allowed[i : i + 1] = argmax(scores[i][None])
    drawn = [i for i, spec in enumerate(specs) if not spec.params.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw_all([scores[i] for i in drawn], allowed[index], [specs[i] for i in drawn])
    return allowed


def _draw_all(rows: list[Tensor], best: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    if not native.usable(*rows):
        return torch.stack([draw(row, spec.params, uniform(spec)) for row, spec in zip(rows, specs, strict=True)])
    draws = [
        native.Draw(
            temperature=spec.params.temperature,
            top_p=spec.params.top_p,
            min_p=spec.params.min_p,
            top_k=spec.params.top_k,
            number=uniform(spec),
        )
        for spec in specs
    ]
    return native.draw(rows, best, draws)


def _adjusted(spec: SampleSpec) -> bool:
    """Whether a bias, a penalty or a forbidden token changes the model's logits."""
    return bool(spec.params.logit_bias or spec.params.penalized or spec.forbidden)


def adjust(logits: Tensor, spec: SampleSpec) -> Tensor:
    """A copy of one row of logits [vocabulary] with logit bias, penalties and forbidden tokens applied, in this order.

    The repetition penalty (Keskar et al., 2019) is over prompt and output, as in transformers; the presence and the
    frequency penalty are over the output, as in OpenAI's API.
    """
    scores, params = logits.clone(), spec.params
    device = scores.device
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        scores.index_add_(0, torch.tensor(ids, device=device), torch.tensor(biases, device=device))
    if params.penalized:
        history = int32_array(spec.history)
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(history).astype(np.int64)).to(device)
            values = scores[seen]
            penalty = params.repetition_penalty
            scores[seen] = torch.where(values < 0, values * penalty, values / penalty)
        ids_out, counts = np.unique(history[spec.prompt_len :], return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        index = torch.from_numpy(ids_out.astype(np.int64)).to(device)
        scores[index] -= torch.from_numpy(penalties.astype(np.float32)).to(device)
    if spec.forbidden:
        scores[torch.tensor(spec.forbidden, device=device)] = _NEGATIVE_INFINITY
    return scores


def draw(scores: Tensor, params: SamplingParams, number: float) -> Tensor:
    """The token, int64 scalar, at which the cumulative distribution of `scores` [vocabulary] passes `number` in [0, 1).

    The distribution is filtered as transformers' warpers do it, in their order: temperature, top_k, top_p, min_p.
    """
    scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[0]:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], _NEGATIVE_INFINITY)
    if params.top_p < 1.0:
        ordered, order = scores.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        likelier = probabilities.cumsum(-1) - probabilities
        dropped = likelier >= params.top_p
        dropped[0] = False
        scores = scores.masked_fill(torch.empty_like(dropped).scatter_(0, order, dropped), _NEGATIVE_INFINITY)
    if params.min_p > 0.0:
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities < params.min_p * probabilities.max(), _NEGATIVE_INFINITY)
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    total = cumulative[-1:]
    passed = torch.searchsorted(cumulative, total * number, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(passed, last)[0].clamp(max=scores.shape[0] - 1)  # in range even if scores are NaN


def uniform(spec: SampleSpec) -> float:
    """The random number in [0, 1) of a draw: SplitMix64 (Steele, Lea and Flood, 2014) of the seed and the position."""
    mixed = _mix64((_mix64(spec.seed & _MASK64) + spec.position * 0x9E3779B97F4A7C15) & _MASK64)
    return (mixed >> 11) * 2.0**-53


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Logprobs of tokens [k] under raw float32 logits [k, vocabulary], with the `top` likeliest tokens of each."""
    logprobs = logits.log_softmax(-1)
    chosen = _float32_bytes(logprobs.gather(-1, tokens[:, None]))
    if top == 0:
        return Logprobs(token_logprobs=chosen)
    values, ids = logprobs.topk(top, -1)
    return Logprobs(
        token_logprobs=chosen,
        top=top,
        top_ids=int32_bytes(ids.cpu().numpy()),
        top_logprobs=_float32_bytes(values),
    )


def _sampled_logprobs(logits: Tensor, tokens: Tensor, specs: Sequence[SampleSpec]) -> dict[int, Logprobs]:
    """The logprobs of the rows that ask for them, by row: computed together, then cut to what each row asked for."""
    wanted = {i: spec.top_logprobs for i, spec in enumerate(specs) if spec.top_logprobs is not None}
    if not wanted:
        return {}
    index, most = torch.tensor(list(wanted), device=logits.device), max(wanted.values())
    of_all = logprobs_of(logits[index], tokens[index], most)
    return {
        i: Logprobs(
            token_logprobs=of_all.token_logprobs[4 * k : 4 * (k + 1)],
            top=top,
            top_ids=of_all.top_ids[4 * most * k : 4 * (most * k + top)],
            top_logprobs=of_all.top_logprobs[4 * most * k : 4 * (most * k + top)],
        )
        for k, (i, top) in enumerate(wanted.items())
    }


def _float32_bytes(values: Tensor) -> bytes:
    return values.to("cpu", torch.float32).numpy().astype("<f4", copy=False).tobytes()
