"""The bytes of token ids and logprobs in messages (messages.py), as Python values."""

import numpy as np

from llmserve.runtime.messages import Logprobs


def token_ids(data: bytes) -> list[int]:
    """The token ids in int32 bytes."""
    ids: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return ids


def unpacked(logprobs: Logprobs) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each token its logprob, NaN where there is none, and the likeliest tokens at its position with theirs."""
    values = np.frombuffer(logprobs.token_logprobs, dtype="<f4").tolist()
    shape = (len(values), logprobs.top)
    top_ids = np.frombuffer(logprobs.top_ids, dtype="<i4").reshape(shape).tolist()
    top_values = np.frombuffer(logprobs.top_logprobs, dtype="<f4").reshape(shape).tolist()
    tops = [list(zip(ids, others, strict=True)) for ids, others in zip(top_ids, top_values, strict=True)]
    return list(zip(values, tops, strict=True))
