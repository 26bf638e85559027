"""A step's plan as the tensors that a forward pass reads."""

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from llmserve.runtime.attention.base import ForwardBatch
from llmserve.runtime.engine.batch import StepPlan, int32_array


def make_forward_batch(plan: StepPlan, page_size: int, device: torch.device) -> tuple[ForwardBatch, list[int]]:
    """The plan as tensors, and the host's copy of query_start [B + 1]."""
    rows = plan.rows
    lengths = [len(row.token_ids) // 4 for row in rows]
    first = [row.start for row in rows]
    seq_lens = [start + length for start, length in zip(first, lengths, strict=True)]
    starts = [0, *accumulate(lengths)]
    page_counts = [len(row.pages) // 4 for row in rows]
    table = np.zeros((len(rows), max(page_counts)), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : page_counts[i]] = int32_array(row.pages)
    input_ids = int32_array(b"".join([row.token_ids for row in rows])).astype(np.int64)
    owner, positions = np.arange(len(rows)), np.array(first)
    if len(input_ids) > len(rows):
        owner = np.repeat(owner, lengths)
        positions = np.arange(len(input_ids)) + (positions - starts[:-1])[owner]
    slots = table[owner, positions // page_size].astype(np.int64) * page_size + positions % page_size

    def to_device(values: "np.ndarray") -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    batch = ForwardBatch(
        input_ids=to_device(input_ids),
        positions=to_device(positions),
        query_start=to_device(np.array(starts, dtype=np.int32)),
        seq_lens=to_device(np.array(seq_lens, dtype=np.int32)),
        block_table=to_device(table),
        slot_mapping=to_device(slots),
        num_tokens=len(input_ids),
        num_sequences=len(rows),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
    )
    return batch, starts
