"""The operations that decoder layers are made of. Each has a reference in torch (reference.py), which says what it is.

Where the CPU and a compiler allow, native kernels take over (csrc/); the results are the same but for rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmserve.runtime.ops import native, reference
from llmserve.runtime.ops.blocks import BLOCK_FORMATS, BlockFormat, Blocks
from llmserve.runtime.ops.packed import PackedWeight, takes_blocks

__all__ = [
    "BLOCK_FORMATS",
    "BlockFormat",
    "Blocks",
    "PackedWeight",
    "add_rms_norm",
    "apply_rotary",
    "argmax",
    "embedding",
    "gelu_tanh_and_mul",
    "grouped_linear",
    "linear",
    "logits",
    "mask",
    "rms_norm",
    "silu_and_mul",
    "takes_blocks",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension: x / rms(x) * weight. `weight` is [x.shape[-1]]."""
    if native.usable(x):
        return native.rms_norm(x, None, weight.float(), eps)[0]
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The new residual x + residual, and its RMSNorm: (normed, residual), both shaped like `x`."""
    if native.usable(x, residual) and x.shape == residual.shape:
        return native.rms_norm(x, residual, weight.float(), eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's product: silu(gate) * up, where x is [..., 2 * I], gate before up; [..., I]."""
    return native.activate_and_multiply(x, 0) if native.usable(x) else reference.silu_and_mul(x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GeGLU's product, tanh approximation: gelu(gate) * up, where x is [..., 2 * I], gate before up; [..., I]."""
    return native.activate_and_multiply(x, 1) if native.usable(x) else reference.gelu_tanh_and_mul(x)


def apply_rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al., 2021) in the half-split layout of GPT-NeoX and Llama.

    q [T, Hq, D], k [T, Hkv, D], positions [T]; cos_sin float32 [max_position, R] holds cos in the first half of a row
    and sin in the second. R may be less than D: the dimensions from R on pass through.
    """
    if q.device.type == "cpu":
        rotated_q, rotated_k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
        if native.usable(rotated_q, rotated_k):
            native.rotate(rotated_q, positions, cos_sin)
            native.rotate(rotated_k, positions, cos_sin)
            return rotated_q, rotated_k
    return reference.apply_rotary(q, k, positions, cos_sin)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]; [..., N]."""
    if not isinstance(weight, PackedWeight):
        return reference.linear(x, weight, bias)
    if weight.panels and x.dtype == weight.dtype:
        return native.linear(x.contiguous(), weight.descriptor, bias)
    return reference.linear(x, weight.unpack(), bias)


def grouped_linear(x: Tensor, counts: Tensor, weight: PackedWeight, outputs: int) -> Tensor:
    """A linear layer for each group of rows: x [R, K], of which the first counts[0] are the first group's.

    The groups share `weight` evenly. Of each one's part, which begins at a panel, the first `outputs` rows are used:
    the result is [R, outputs].
    """
    part = weight.out_features // len(counts)
    if not weight.panels and x.device.type == "cuda" and x.dtype == torch.bfloat16:  # waits for no count
        parts = weight.data.view(len(counts), part, -1)[:, :outputs]
        return torch.nn.functional.grouped_mm(x, parts.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    groups = enumerate(torch.split(x, counts.tolist()))
    return torch.cat([_linear_part(rows, weight, group * part, outputs) for group, rows in groups if len(rows)])


def _linear_part(x: Tensor, weight: PackedWeight, first: int, count: int) -> Tensor:
    if weight.panels and x.dtype == weight.dtype:
        return native.linear(x.contiguous(), weight.part(first, count), None)
    return reference.linear(x, weight.unpack()[first : first + count])


def logits(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """As `linear` of an output head: float32 [..., N], from the sums themselves where the kernel can give them."""
    if isinstance(weight, PackedWeight) and weight.panels and x.dtype == weight.dtype:
        return native.linear(x.contiguous(), weight.descriptor, None, wide=True)
    return linear(x, weight).float()


def argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the first largest of each row of float32 [N, V], int64 [N], and its value, [N]. A NaN is largest."""
    if native.usable(scores):
        return native.argmax(scores)
    best, tokens = scores.max(-1)
    return tokens, best


def mask(rows: Sequence[Tensor], masks: Sequence[bytes]) -> Tensor:
    """The rows, float32 [V] each, as [n, V] with -inf where a row's mask has no bit; a bit each, the lowest first."""
    return native.mask(rows, masks) if native.usable(*rows) else reference.mask(rows, masks)


def embedding(ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    """The rows of table [N, K] that ids [T] name, [T, K]."""
    return table.rows(ids) if isinstance(table, PackedWeight) else torch.nn.functional.embedding(ids, table)
