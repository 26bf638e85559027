"""Attention on CUDA with torch's varlen_attn, whose FlashAttention kernels read a paged cache through a block table."""

import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend, AttentionSpec, ForwardBatch, KVPool, PageGeometry

NEEDED_TORCH = (2, 13)
"""The first version whose FlashAttention 2 takes a block table and num_splits."""
PAGE_MULTIPLE = 256
"""FlashAttention 2 requires pages of a multiple of so many tokens."""


class VarlenAttention(AttentionBackend):
    """Pages are [page_size, Hkv, D]. Nothing here syncs with the device."""

    name = "varlen"

    def __init__(self, geometry: PageGeometry, num_pages: int) -> None:
        from torch.nn.attention.varlen import varlen_attn  # slow to import, and not needed on CPUs

        self._attend = varlen_attn
        shape = (geometry.page_size, geometry.num_kv_heads, geometry.head_dim)
        self.pool = KVPool(geometry, num_pages, shape, shape)
        self._batch: ForwardBatch | None = None
        self._key_start = torch.empty(0)

    def plan(self, batch: ForwardBatch) -> None:
        self._batch = batch
        self._key_start = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        batch = self._batch
        assert batch is not None
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.flatten(0, 1).index_copy_(0, batch.slot_mapping, k)
        values.flatten(0, 1).index_copy_(0, batch.slot_mapping, v)
        out = self._attend(
            q,
            keys,
            values,
            batch.query_start,
            self._key_start,
            batch.max_query_len,
            batch.max_seq_len,
            scale=spec.scale,
            # FlashAttention counts the tokens to the left, without the token itself
            window_size=(-1 if spec.sliding_window is None else spec.sliding_window - 1, 0),
            enable_gqa=True,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            num_splits=1,  # a token's result must not depend on the longest sequence of the batch
        )
        assert isinstance(out, Tensor)
        return out.flatten(1)


def unsupported(geometry: PageGeometry, softcap: bool) -> str | None:
    """Why varlen_attn does not support this geometry; None if it does."""
    if geometry.device.type != "cuda":
        return f"it runs on CUDA, not on {geometry.device}"
    if tuple(map(int, torch.__version__.split(".")[:2])) < NEEDED_TORCH:
        return f"it needs torch {'.'.join(map(str, NEEDED_TORCH))}, not {torch.__version__}"
    if torch.cuda.get_device_capability(geometry.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if geometry.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {geometry.dtype}"
    if geometry.page_size % PAGE_MULTIPLE:
        return f"it takes pages of a multiple of {PAGE_MULTIPLE} tokens, not of {geometry.page_size}"
    if geometry.head_dim % 8 or geometry.head_dim > 256:
        return f"it takes heads of a multiple of 8 up to 256, not of {geometry.head_dim}"
    if softcap:
        return "it has no softcap of attention scores, which the model asks for"
    return None
