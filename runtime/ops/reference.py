"""The operations of a decoder layer in plain torch: what each one means, on any device and in any dtype.

Sums run in float32 and are rounded once, so that a bfloat16 result is the nearest to the exact one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension: x / rms(x) * weight. `weight` is [x.shape[-1]]."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The new residual x + residual, and its RMSNorm: (normed, residual), both shaped like `x`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's product: silu(gate) * up, where x is [..., 2 * I], gate before up; [..., I]."""
    gate, up = x.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GeGLU's product, tanh approximation: gelu(gate) * up, where x is [..., 2 * I], gate before up; [..., I]."""
    gate, up = x.float().chunk(2, -1)
    return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def apply_rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al., 2021) in the half-split layout of GPT-NeoX and Llama.

    q [T, Hq, D], k [T, Hkv, D], positions [T]; cos_sin [max_position, R] holds cos, then sin, in the halves of a row.
    R may be less than D: the dimensions from R on pass through.
    """
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, -1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(low * cos - high * sin).to(x.dtype), (high * cos + low * sin).to(x.dtype), rest], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]; [..., N]."""
    return functional.linear(x, weight, bias)


def mask(rows: Sequence[Tensor], masks: Sequence[bytes]) -> Tensor:
    """The rows, float32 [V] each, as [n, V] with -inf where a row's mask has no bit; a bit each, the lowest first."""
    bits = np.frombuffer(b"".join(masks), np.uint8).reshape(len(rows), -1)
    allowed = np.unpackbits(bits, axis=1, count=rows[0].shape[0], bitorder="little").view(np.bool_)
    masked = torch.stack(list(rows))
    return masked.masked_fill_(~torch.from_numpy(allowed).to(masked.device), float("-inf"))
