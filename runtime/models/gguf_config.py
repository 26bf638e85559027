"""Translates a GGUF header into the terms of a Hugging Face checkpoint: its config.json and the names of its tensors.

Imports no torch. llama.cpp's keys and names are those of https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/.
"""

import math
import struct
from typing import Any

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.gguf import GgufHeader, GgufTensor

_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
}
"""llama.cpp's architecture names and transformers' model types."""

_ARCHITECTURES = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "gemma3_text": "Gemma3",
}

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the configuration rather than to the weights."""

_FILE_DTYPES = {0: "float32", 1: "float16"}
"""The dtypes of general.file_type for unquantized files; all others are served in bfloat16."""


def to_hf_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json for a header. Raises ConfigError for an architecture that is not supported, or missing
    metadata.
    """
    model_type = _MODEL_TYPES.get(header.architecture)
    if model_type is None:
        raise ConfigError(
            f"{header.path} has the architecture {header.architecture!r}; "
            f"GGUF files are served for {', '.join(_MODEL_TYPES)}"
        )
    if model_type == "llama" and header.get("expert_count"):
        model_type = "mixtral"
    names = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in names:
        raise ConfigError(f"{header.path} has no token embedding, so it is not a language model")
    needed = ("embedding_length", "block_count", "context_length", "feed_forward_length", "attention.head_count")
    for key in (*needed, "attention.head_count_kv", "attention.layer_norm_rms_epsilon"):
        value = header.get(key)
        if value is None and not key.endswith("_kv"):
            raise ConfigError(f"{header.path} lacks the metadata {header.architecture}.{key}")
        if isinstance(value, list):
            raise ConfigError(f"{header.path} has layers of different {key}, which is not supported")
    hidden_size, heads = header.get("embedding_length"), header.get("attention.head_count")
    head_dim = header.get("attention.key_length") or hidden_size // heads
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [f"{_ARCHITECTURES.get(model_type, model_type.title())}ForCausalLM"],
        "vocab_size": names["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": header.get("feed_forward_length"),
        "num_hidden_layers": header.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.get("context_length"),
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.get("rope.freq_base", 10000.0),
        "partial_rotary_factor": header.get("rope.dimension_count", head_dim) / head_dim,
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "sliding_window": header.get("attention.sliding_window"),
        "dtype": _FILE_DTYPES.get(header.metadata.get("general.file_type", -1), "bfloat16"),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _stop_ids(header),
    }
    config["rope_scaling"] = _rope_scaling(header)
    config.update(_family_keys(header, model_type))
    return {key: value for key, value in config.items() if value is not None}


def _stop_ids(header: GgufHeader) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [header.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(token for token in found if token is not None))


def _rope_scaling(header: GgufHeader) -> dict[str, Any] | None:
    """`rope_scaling`. Linear and yarn scaling are metadata; llama3 and longrope are tensors with a factor per
    frequency.
    """
    kind = header.get("rope.scaling.type")
    original = header.get("rope.scaling.original_context_length")
    factors = {tensor.name: _floats(tensor) for tensor in header.tensors if tensor.name in ROPE_TENSORS}
    if same := factors.get("rope_freqs.weight"):
        return {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
    if factors:
        scaling = {"rope_type": "longrope", "original_max_position_embeddings": original}
        scaling["short_factor"], scaling["long_factor"] = (factors[name] for name in ROPE_TENSORS[1:])
        return scaling | {"attention_factor": header.get("rope.scaling.attn_factor")}
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": header.get("rope.scaling.factor", 1.0)}
        return scaling | ({"original_max_position_embeddings": original} if original else {})
    return None


def _floats(tensor: GgufTensor) -> list[float]:
    count = math.prod(tensor.shape)
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def _family_keys(header: GgufHeader, model_type: str) -> dict[str, Any]:
    """The keys that are particular to a family, from its own metadata or, where a file has none, from llama.cpp's
    code.
    """
    layers = header.get("block_count") or 0
    match model_type:
        case "qwen2" | "qwen3":
            return {"sliding_window": None, "use_sliding_window": False}
        case "qwen3_moe":
            return {
                "sliding_window": None,
                "use_sliding_window": False,
                "num_experts": header.get("expert_count"),
                "num_experts_per_tok": header.get("expert_used_count"),
                "moe_intermediate_size": header.get("expert_feed_forward_length"),
                "norm_topk_prob": True,  # as in llama.cpp, for every model of this architecture
            }
        case "mixtral":
            return {
                "num_local_experts": header.get("expert_count"),
                "num_experts_per_tok": header.get("expert_used_count"),
            }
        case "phi3":
            return {"original_max_position_embeddings": header.get("rope.scaling.original_context_length")}
        case "granite":
            return {
                "attention_multiplier": header.get("attention.scale"),
                "embedding_multiplier": header.get("embedding_scale"),
                "residual_multiplier": header.get("residual_scale"),
                "logits_scaling": header.get("logit_scale"),
            }
        case "gemma2":
            return {
                "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
                "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
                # as in llama.cpp: the 27B model scales by hidden size / heads, which is not its head_dim
                "query_pre_attn_scalar": header.get("embedding_length") / header.get("attention.head_count")
                if layers == 46
                else header.get("attention.key_length", 256),
            }
        case "gemma3_text":
            return {
                "final_logit_softcapping": header.get("final_logit_softcapping"),
                "rope_local_base_freq": header.get("rope.freq_base_swa", 10000.0),
                "rope_theta": header.get("rope.freq_base", 1000000.0),
                "query_pre_attn_scalar": header.get("embedding_length") / header.get("attention.head_count")
                if layers == 62
                else header.get("attention.key_length", 256),
            }
        case _:
            return {}


# ---- names ----------------------------------------------------------------------------------------------------------

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_name(name: str, model_type: str) -> str:
    """The Hugging Face name of the GGUF tensor `name`; `name` itself when it has none."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or rest not in _LAYER_NAMES:
        return name
    target = _LAYER_NAMES[rest]
    if rest == "ffn_norm" and model_type in ("gemma2", "gemma3_text"):
        target = "pre_feedforward_layernorm"
    if rest == "ffn_up" and model_type == "phi3":
        target = "mlp.gate_up_proj"
    return f"model.layers.{block}.{target}.{suffix}"
