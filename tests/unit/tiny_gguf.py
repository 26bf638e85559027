"""Writing a tiny checkpoint as GGUF as llama.cpp's converter would; names and keys are the gguf package's, not ours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from k_quants import quantize
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "mixtral": MODEL_ARCH.LLAMA,
    "phi3": MODEL_ARCH.PHI3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "granite": MODEL_ARCH.GRANITE,
    "olmo2": MODEL_ARCH.OLMO2,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
}
_PERMUTED = ("llama", "mixtral", "smollm3", "granite")  # the subclasses of LlamaModel in convert_hf_to_gguf.py


def write_gguf(
    checkpoint: Path,
    path: Path,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    floats: Mapping[str, float] = {},
    integers: Mapping[str, int] = {},
    tensors: Mapping[str, np.ndarray] = {},
    exceptions: Mapping[str, GGMLQuantizationType] = {},
) -> Path:
    """Writes the single-file checkpoint in a directory to `path`, with further metadata and tensors.

    `exceptions`: the quantization of the matrices whose names end so.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, config)
    for key, value in floats.items():
        writer.add_float32(f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    for key, count in integers.items():
        writer.add_uint32(f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", count)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    _write_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in _merged(load_file(checkpoint / "model.safetensors")).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        values = _converted(name, tensor, config)
        plain = values.ndim == 1 or ".gate.weight" in name  # a router is never quantized
        kind = GGMLQuantizationType.F32 if plain else quantization
        kind = next((other for end, other in exceptions.items() if name.endswith(end)), kind)
        writer.add_tensor(target, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _merged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With one tensor for all experts of a layer, as Qwen2MoeModel and LlamaModel of convert_hf_to_gguf.py write it."""
    merged: dict[str, Any] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".experts.")
        if rest:
            _, leaf, suffix = rest.split(".")
            head = head.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            head = head if leaf in ("w1", "w2", "w3") else f"model.{head}"
            merged.setdefault(f"{head}.experts.{leaf}.{suffix}", []).append(tensor)
        else:
            merged[name] = tensor
    return {name: np.stack(value) if isinstance(value, list) else value for name, value in merged.items()}


def _write_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if original := scaling.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    match config["model_type"]:
        case "qwen3_moe":
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        case "granite":
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
        case "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
            writer.add_sliding_window(config["sliding_window"])
        case "gemma3_text":
            writer.add_sliding_window(config["sliding_window"])


def _write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")


def _converted(name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """What convert_hf_to_gguf.py does to a tensor's values."""
    if config["model_type"] in _PERMUTED and ".q_proj." in name:
        return _permuted(tensor, config["num_attention_heads"])
    if config["model_type"] in _PERMUTED and ".k_proj." in name:
        return _permuted(tensor, config["num_key_value_heads"])
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)
