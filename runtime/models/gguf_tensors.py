"""Tensors of a GGUF file as in a Hugging Face checkpoint: dequantized, and with the changes of llama.cpp's converter
undone.

Block formats: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h. The common ones are dequantized
by torch, several times faster than by the gguf package, which does the rest.
"""

from collections.abc import Callable
from math import prod

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.gguf import GgufTensor

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


_PART = 1 << 15
"""Values that are dequantized at once. They stay in the CPU's cache, and torch does not split so little work among
threads, which on a busy machine would wait for each other at every operation.
"""


def nbytes(tensor: GgufTensor) -> int:
    """The bytes that a tensor takes in the file. Raises ConfigError for an unknown or impossible format."""
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"tensor {tensor.name!r} has the unknown GGML type {tensor.ggml_type}") from error
    if not tensor.shape or tensor.shape[-1] % block:
        raise ConfigError(f"tensor {tensor.name!r} of shape {tensor.shape} does not fill its blocks of {block}")
    return prod(tensor.shape) // block * size


def dequantize(data: Tensor, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """The values [*tensor.shape] of a tensor's bytes (uint8), dequantized to `dtype`; unquantized ones keep their
    dtype.
    """
    kind = GGMLQuantizationType(tensor.ggml_type)
    if kind in _PLAIN:
        return data.view(_PLAIN[kind]).reshape(tensor.shape)
    block, size = GGML_QUANT_SIZES[kind]
    if kind in _KERNELS:
        count = _PART // block
        values = torch.empty(len(data) // size, block, dtype=dtype, device=data.device)
        for part, blocks in zip(torch.split(values, count), torch.split(data.view(-1, size), count), strict=True):
            part.copy_(_KERNELS[kind](blocks).view(-1, block))
        return values.view(tensor.shape)
    rows = data.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * size).numpy()
    try:
        return torch.from_numpy(quants.dequantize(rows, kind)).reshape(tensor.shape)
    except NotImplementedError as error:
        raise ConfigError(f"tensor {tensor.name!r} is {kind.name}, which cannot be read") from error


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """The `count` float16 numbers at byte `start` of each block, as float32 [blocks, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """[blocks, n] bytes to [blocks, 2 * n] four-bit numbers: all low halves, then all high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return torch.addcmul(_half(blocks, 2), _nibbles(blocks[:, 4:]).float(), _half(blocks, 0))


def _fifth_bits(data: Tensor) -> Tensor:
    """[blocks, 4] bytes to [blocks, 32] fifth bits, as numbers that are 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data.unsqueeze(-1) >> shifts & 1) << 4).flatten(1)


def _q5_0(blocks: Tensor) -> Tensor:
    return ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return torch.addcmul(_half(blocks, 2), values.float(), _half(blocks, 0))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The six-bit scales and mins of Q4_K and Q5_K times those of their block, float32 [blocks, 8, 1] each."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 2 & 48)], -1).float()
    mins = torch.cat([second & 63, (third >> 4) | (second >> 2 & 48)], -1).float()
    return (scales * _half(blocks, 0)).unsqueeze(-1), (mins * _half(blocks, 2)).unsqueeze(-1)


def _k_nibbles(data: Tensor) -> Tensor:
    """[blocks, 128] bytes to [blocks, 8, 32]: 32 bytes hold one group in low halves, the next in high ones."""
    runs = data.reshape(-1, 4, 1, 32)
    return torch.cat([runs & 15, runs >> 4], 2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(blocks)
    return _k_nibbles(blocks[:, 16:]).float() * scales - mins


def _q5_k(blocks: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(blocks)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4
    return (_k_nibbles(blocks[:, 48:]) | fifth).float() * scales - mins


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = torch.cat([low & 15, low >> 4], 2).flatten(2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = ((high >> shifts & 3) << 4).flatten(2)
    values = (low | high).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return values * scales.unsqueeze(-1)


_KERNELS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}

_PERMUTED = ("llama", "mistral", "granite", "smollm3")
"""Architectures whose q and k rows llama.cpp stores with the halves of each head interleaved."""

_NORM_PLUS_ONE = ("gemma", "gemma2", "gemma3")


def undo_conversion(values: Tensor, name: str, architecture: str, num_heads: int, num_kv_heads: int) -> Tensor:
    """Undoes what llama.cpp's converter did to a tensor's values; `name` is its GGUF name."""
    if architecture in _NORM_PLUS_ONE and name.endswith("norm.weight"):
        return values.float() - 1
    if architecture in _PERMUTED and ".attn_q." in name:
        return _split_halves(values, num_heads)
    if architecture in _PERMUTED and ".attn_k." in name:
        return _split_halves(values, num_kv_heads)
    return values


def _split_halves(values: Tensor, heads: int) -> Tensor:
    """Rows of each head from (pair, half) order to (half, pair) order."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
