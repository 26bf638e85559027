"""Attention with the native kernels (ops/csrc/attention.h): CPU, float32 or bfloat16, prefill and decode mixed."""

import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend, AttentionSpec, ForwardBatch, KVPool, PageGeometry
from llmserve.runtime.ops import native

_WORD_BYTES = 4


class NativeAttention(AttentionBackend):
    """A page holds keys as [Hkv, blocks, D / pack, 16, pack] and values as [Hkv, blocks, 16 / pack, D, pack].

    `pack` numbers fill four bytes, the unit of a dot product instruction.
    """

    name = "native"

    def __init__(self, geometry: PageGeometry, num_pages: int, num_heads: int) -> None:
        """Raises ValueError when the kernels do not support this geometry."""
        kernels = native.library()
        if reason := unsupported(geometry):
            raise ValueError(reason)
        assert kernels is not None
        pack = _WORD_BYTES // geometry.dtype.itemsize
        blocks = geometry.page_size // native.BLOCK
        self.pool = KVPool(
            geometry,
            num_pages,
            (geometry.num_kv_heads, blocks, geometry.head_dim // pack, native.BLOCK, pack),
            (geometry.num_kv_heads, blocks, native.BLOCK // pack, geometry.head_dim, pack),
            native.empty,
        )
        self.num_heads = num_heads
        self._kernels = kernels
        self._dtype = native.DTYPES[geometry.dtype]
        self.handle: int = kernels.llmserve_plan_new()
        self._batch: ForwardBatch | None = None

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._kernels.llmserve_plan_delete(self.handle)

    def plan(self, batch: ForwardBatch) -> None:
        self._batch = batch  # the plan points into its tensors
        geometry = self.pool.geometry
        step = native.Batch(
            tokens=batch.num_tokens,
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            block_table=batch.block_table.data_ptr(),
            table_stride=batch.block_table.stride(0),
        )
        self._kernels.llmserve_plan_make(
            self.handle,
            step,
            batch.num_sequences,
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            geometry.num_kv_heads,
            self.num_heads // geometry.num_kv_heads,
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = (part if part.stride()[1:] == (part.shape[2], 1) else part.contiguous() for part in (q, k, v))
        tokens, heads, head_dim = q.shape
        out = torch.empty((tokens, heads * head_dim), dtype=q.dtype)
        call = native.AttentionCall(
            keys=self.pool.keys[layer].data_ptr(),
            values=self.pool.values[layer].data_ptr(),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            heads=heads,
            kv_heads=k.shape[1],
            head_dim=head_dim,
            page_size=self.pool.geometry.page_size,
            scale=spec.scale,
            window=spec.sliding_window or 0,
            softcap=spec.softcap or 0.0,
        )
        self._kernels.llmserve_attention(self._dtype, self.handle, call)
        return out


def unsupported(geometry: PageGeometry) -> str | None:
    """Why the kernels do not support this geometry; None if they do."""
    if geometry.device.type != "cpu":
        return f"it runs on the CPU, not on {geometry.device}"
    if geometry.dtype not in native.DTYPES:
        return f"it takes float32 and bfloat16, not {geometry.dtype}"
    if geometry.page_size % native.BLOCK:
        return f"it takes pages of a multiple of {native.BLOCK} tokens, not of {geometry.page_size}"
    if geometry.head_dim % native.BLOCK:
        return f"it takes heads of a multiple of {native.BLOCK}, not of {geometry.head_dim}"
    if native.library() is None:
        return "the native kernels could not be built (the log says why)"
    return None
