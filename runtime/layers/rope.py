"""RopeConfig: one rotary embedding as plain data. Imports no torch; rotary.py turns it into tables."""

from typing import Literal

import msgspec

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rotary embedding. The first `rotary_dim` dimensions of a head are rotated, the rest pass through."""

    rotary_dim: int
    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn and longrope)."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
