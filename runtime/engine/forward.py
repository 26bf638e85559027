"""A step's plan as the tensors that a forward pass reads."""

import numpy as np
import torch
from torch import Tensor

from llmserve.runtime.attention.base import ForwardBatch
from llmserve.runtime.engine.batch import StepPlan, int32_array


def make_forward_batch(plan: StepPlan, page_size: int, device: torch.device) -> tuple[ForwardBatch, list[int]]:
    """The plan as tensors, and the host's copy of query_start [B + 1]."""
    rows = plan.rows
    lengths = np.array([len(row.token_ids) // 4 for row in rows], dtype=np.int32)
    first = np.array([row.start for row in rows], dtype=np.int32)
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    page_counts = [len(row.pages) // 4 for row in rows]
    table = np.zeros((len(rows), max(page_counts)), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : page_counts[i]] = int32_array(row.pages)
    input_ids = int32_array(b"".join(row.token_ids for row in rows)).astype(np.int64)
    owner = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(len(input_ids)) - (starts[:-1] - first)[owner]
    slots = table[owner, positions // page_size].astype(np.int64) * page_size + positions % page_size
    seq_lens = first + lengths

    def to_device(values: "np.ndarray") -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    batch = ForwardBatch(
        input_ids=to_device(input_ids),
        positions=to_device(positions),
        query_start=to_device(starts),
        seq_lens=to_device(seq_lens),
        block_table=to_device(table),
        slot_mapping=to_device(slots),
        num_tokens=len(input_ids),
        num_sequences=len(rows),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return batch, starts.tolist()
