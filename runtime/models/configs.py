"""ModelConfig: what a decoder must know of a model, as plain data. hf_config.py reads it. Imports no torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from llmserve.runtime.layers.rope import RopeConfig

Json = Mapping[str, Any]
"""A JSON object, such as a parsed config.json."""
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from layer to layer. `rope` None: the layer has no positions (NoPE).

    With a sliding window of W a token sees itself and the W - 1 tokens before it.
    """

    rope: RopeConfig | None
    sliding_window: int | None = None
    sparse: bool = False
    """Its MLP is one of experts."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One causal language model. Fields from `norm_style` on are defaults in a model that runs through transformers."""

    architecture: str
    model_type: str
    implementation: Literal["decoder", "transformers"]
    vocab_size: Size
    hidden_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    max_position_embeddings: Size
    dtype: Literal["bfloat16", "float16", "float32"]
    """What the weights were saved in."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    raw: bytes = b""
    """The config.json itself, for transformers; empty for our decoder."""
    multimodal: bool = False
    """The checkpoint holds more than the language model; the other tensors are not read."""

    intermediate_size: int = 0
    layers: tuple[LayerConfig, ...] = ()
    rms_norm_eps: float = 1e-6
    norm_style: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and MLP (llama), after them (olmo2), or both (gemma)."""
    norm_plus_one: bool = False
    """A norm multiplies by 1 + weight (gemma)."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMSNorm of q and k: over each head (qwen3, gemma3) or over all heads together (olmo2)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_expert_weights: bool = False
    """The weights of a token's experts add up to 1."""
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0


class TensorInfo(NamedTuple):
    """What a checkpoint says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: str
    """As the file calls it."""
    nbytes: int
    """Bytes in the file; 0 where the dtype is none that can be read."""
    blocks: int = 0
    """GGML's number of a format in whose blocks a weight may stay; else 0."""
