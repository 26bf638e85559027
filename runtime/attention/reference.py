"""Attention in plain torch, one sequence after the other, in float32: slow, and simple enough to be the reference."""

import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend, AttentionSpec, ForwardBatch, KVPool, PageGeometry


class ReferenceAttention(AttentionBackend):
    """Pages are [page_size, Hkv, D], so that a layer's pages are one array of slots. It syncs with the device."""

    name = "reference"

    def __init__(self, geometry: PageGeometry, num_pages: int) -> None:
        shape = (geometry.page_size, geometry.num_kv_heads, geometry.head_dim)
        self.pool = KVPool(geometry, num_pages, shape, shape)
        self._slot_mapping = torch.empty(0)
        self._sequences: list[tuple[int, int, Tensor]] = []

    def plan(self, batch: ForwardBatch) -> None:
        page_size = self.pool.geometry.page_size
        self._slot_mapping = batch.slot_mapping
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        offsets = torch.arange(page_size, device=batch.block_table.device)
        self._sequences = []
        for i, length in enumerate(lengths):
            pages = batch.block_table[i, : -(-length // page_size)].long()
            slots = (pages[:, None] * page_size + offsets).flatten()[:length]
            self._sequences.append((starts[i], starts[i + 1], slots))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.pool.keys[layer].flatten(0, 1), self.pool.values[layer].flatten(0, 1)
        keys[self._slot_mapping] = k
        values[self._slot_mapping] = v
        out = torch.empty_like(q)
        for start, end, slots in self._sequences:
            out[start:end] = attend(q[start:end], keys[slots], values[slots], spec)
        return out.flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention of the last n of m tokens: q [n, Hq, D], k and v [m, Hkv, D], to [n, Hq, D]."""
    (n, q_heads, _), (m, kv_heads, _) = q.shape, k.shape
    k, v = (x.float().repeat_interleave(q_heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = torch.arange(m - n, m, device=q.device)[:, None] - torch.arange(m, device=q.device)
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1).to(q.dtype)
