"""ModelConfig: the configuration of a model as plain data. hf_config.py makes it. Imports no torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from llmserve.runtime.layers.rope import RopeConfig

Json = Mapping[str, Any]
"""A JSON object, such as a parsed config.json."""
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What may differ from layer to layer. `rope` is None in a layer without positions (NoPE).

    With a sliding window of W a token attends to itself and the W - 1 tokens before it.
    """

    rope: RopeConfig | None
    sliding_window: int | None = None
    sparse: bool = False
    """Whether its MLP is a mixture of experts."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A causal language model. The fields from `intermediate_size` on are for our decoder only (`implementation`)."""

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
    """The dtype that the weights were saved in."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    raw: bytes = b""
    """The config.json itself, for transformers; empty with our decoder."""
    multimodal: bool = False
    """Whether the checkpoint holds more than the language model, whose other tensors are not read."""

    intermediate_size: int = 0
    layers: tuple[LayerConfig, ...] = ()
    rms_norm_eps: float = 1e-6
    norm_style: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and MLP (llama), after them (olmo2), or both (gemma)."""
    norm_plus_one: bool = False
    """Whether a norm multiplies by 1 + weight (gemma)."""
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
    """Whether the router's weights of a token's experts are normalized to a sum of 1."""
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0


class TensorInfo(NamedTuple):
    """What a checkpoint's header says about a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """As the file names it."""
    nbytes: int
    """Bytes in the file; 0 for a dtype that is not supported."""
    blocks: int = 0
    """GGML's number of the block format, if a weight may stay in these blocks; else 0."""
