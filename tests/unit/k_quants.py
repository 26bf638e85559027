"""Quantizing to Q4_K, Q5_K and Q6_K, which the gguf package can only read: plain rounding, not llama.cpp's search.

The blocks: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.
"""

import gguf
import numpy as np
from gguf import GGMLQuantizationType

BLOCK = 256


def quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """As gguf.quants.quantize, of any kind: the blocks of float32 [..., K], uint8 [..., bytes]."""
    quantizers = {
        GGMLQuantizationType.Q4_K: lambda blocks: _with_mins(blocks, 4),
        GGMLQuantizationType.Q5_K: lambda blocks: _with_mins(blocks, 5),
        GGMLQuantizationType.Q6_K: _symmetric,
    }
    if kind not in quantizers:
        return gguf.quants.quantize(values, kind)
    blocks = quantizers[kind](values.reshape(-1, BLOCK).astype(np.float32))
    return blocks.reshape(*values.shape[:-1], -1)


def _rounded(values: np.ndarray, scale: np.ndarray, low: int, high: int) -> np.ndarray:
    """values / scale as whole numbers, 0 where the scale is."""
    quotient = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
    return np.clip(np.rint(quotient), low, high).astype(np.int32)


def _halves(values: np.ndarray) -> np.ndarray:
    """[n, 1, 1] as float16, which is what is divided by."""
    return values.astype(np.float16)


def _with_mins(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Eight groups of 32 with a scale and a min of six bits each, which have a scale each themselves."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1, keepdims=True), 0)
    steps = (groups.max(-1, keepdims=True) - least) / (2**bits - 1)
    scale, min_scale = (_halves(part.max(1, keepdims=True) / 63) for part in (steps, -least))
    scales = _rounded(steps, scale.astype(np.float32), 0, 63)
    mins = _rounded(-least, min_scale.astype(np.float32), 0, 63)
    shifted = groups + mins * min_scale.astype(np.float32)
    codes = _rounded(shifted, scales * np.broadcast_to(scale.astype(np.float32), scales.shape), 0, 2**bits - 1)

    s, m = scales[..., 0], mins[..., 0]
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    runs = (codes & 15).reshape(-1, 4, 2, 32)
    fifth = (codes >> 4 << np.arange(8)[:, None]).sum(1)
    parts = [*packed, *([fifth] if bits == 5 else []), (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(-1, 128)]
    halves = np.concatenate([scale[:, 0], min_scale[:, 0]], -1).view(np.uint8)
    return np.concatenate([halves, *(part.astype(np.uint8) for part in parts)], -1)


def _symmetric(blocks: np.ndarray) -> np.ndarray:
    """Sixteen groups of 16 with a signed scale of eight bits each, which have a scale themselves."""
    groups = blocks.reshape(-1, 16, 16)
    steps = np.abs(groups).max(-1, keepdims=True) / 31
    scale = _halves(steps.max(1, keepdims=True) / 127)
    scales = _rounded(steps, scale.astype(np.float32), 0, 127)
    codes = _rounded(groups, scales * np.broadcast_to(scale.astype(np.float32), scales.shape), -32, 31) + 32

    quarters = codes.reshape(-1, 2, 4, 32)  # of each half of a block
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    high = (quarters >> 4 << 2 * np.arange(4)[:, None]).sum(2)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), scales[..., 0]]
    return np.concatenate([*(part.astype(np.uint8) for part in parts), scale[:, 0].view(np.uint8)], -1)
