"""Tables of cos and sin for rotary position embeddings, with the frequency scalings that model configs ask for.

The formulas are those of transformers' modeling_rope_utils.py. There the frequencies of "longrope" change while a
sequence grows. Here the longest sequence that is served fixes them: the cache of a prefix must not depend on what came
after it.
"""

import math

import torch
from torch import Tensor

from llmserve.runtime.layers.rope import RopeConfig


def cos_sin_table(rope: RopeConfig, max_positions: int, device: torch.device) -> Tensor:
    """float32 [max_positions, rotary_dim]: cos in the first half of a row, sin in the second."""
    frequencies = inverse_frequencies(rope, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return (torch.cat([angles.cos(), angles.sin()], -1) * rope.attention_factor).to(device)


def inverse_frequencies(rope: RopeConfig, max_positions: int) -> Tensor:
    """float32 [rotary_dim / 2], on the CPU."""
    dim, original = rope.rotary_dim, rope.original_max_position_embeddings
    wavelengths = torch.pow(rope.theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match rope.type:
        case "linear":
            return 1.0 / wavelengths / rope.factor
        case "longrope":
            factors = rope.long_factor if max_positions > original else rope.short_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
        case "llama3":
            return _llama3(rope, 1.0 / wavelengths)
        case "yarn":
            return _yarn(rope, wavelengths)
        case _:
            return 1.0 / wavelengths


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """YaRN (Peng et al., 2023): interpolates the dimensions that turn rarely, extrapolates those that turn often."""

    def dimension(turns: float) -> float:
        length = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return ramp / (rope.factor * wavelengths) + (1 - ramp) / wavelengths
