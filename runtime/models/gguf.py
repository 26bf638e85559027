"""Reading GGUF files: the header, and what it says as a config.json. Tensor data is read in gguf_tensors.py.

Imports neither torch nor the gguf package: a header is parsed here because that package takes seconds for a vocabulary.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from llmserve.runtime.config import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 26
_LONG_ARRAY = 1024
"""Longer arrays of strings (vocabulary, merges) are left out of the metadata: transformers reads them, once."""


class GgufTensor(msgspec.Struct, frozen=True):
    """Where a tensor's data lies. `shape` is in torch's order, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufHeader(msgspec.Struct, frozen=True):
    """All of a GGUF file but its tensor data. `digest` names the header's contents."""

    path: str
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    digest: str

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of the architecture's own `key`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: str | Path) -> GgufHeader:
    """Parses the header of a GGUF file. Raises ConfigError when it is none, is cut short or makes no sense."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(str(path), data)
    except (struct.error, UnicodeDecodeError, IndexError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path} is not a whole GGUF file: {error}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse_header(path: str, data: mmap.mmap) -> GgufHeader:
    magic, version, tensor_count, key_count = struct.unpack_from("<4sIQQ", data, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ConfigError(f"{path} is not a GGUF file of version 2 or 3")
    position, metadata = 24, {}
    for _ in range(_checked(key_count, path)):
        key, position = _string(data, position)
        (kind,) = struct.unpack_from("<I", data, position)
        metadata[key], position = _value(data, position + 4, kind, path)
    entries = []
    for _ in range(_checked(tensor_count, path)):
        name, position = _string(data, position)
        (rank,) = struct.unpack_from("<I", data, position)
        if rank > 4:
            raise ConfigError(f"{path}: tensor {name!r} has {rank} dimensions")
        dims = struct.unpack_from(f"<{rank}Q", data, position + 4)
        kind, offset = struct.unpack_from("<IQ", data, position + 4 + 8 * rank)
        position += 16 + 8 * rank
        entries.append((name, dims[::-1], kind, offset))
    digest = hashlib.sha256(memoryview(data)[:position]).hexdigest()
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(position / alignment) * alignment
    tensors = tuple(GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries)
    return GgufHeader(path, metadata, tensors, digest)


def _checked(count: int, path: str) -> int:
    if count > _MAX_COUNT:
        raise ConfigError(f"{path} is damaged: it claims {count} entries")
    return count


def _string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    end = position + 8 + length
    if end > len(data):
        raise struct.error("a string reaches past the end")
    return data[position + 8 : end].decode(), end


def _value(data: mmap.mmap, position: int, kind: int, path: str) -> tuple[Any, int]:
    if code := _SCALARS.get(kind):
        return struct.unpack_from(f"<{code}", data, position)[0], position + struct.calcsize(f"<{code}")
    if kind == _STRING:
        return _string(data, position)
    if kind != _ARRAY:
        raise ConfigError(f"{path} is damaged: metadata of type {kind}")
    element, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if code := _SCALARS.get(element):
        layout = struct.Struct(f"<{_checked(count, path)}{code}")
        return list(layout.unpack_from(data, position)), position + layout.size
    if element == _STRING and count > _LONG_ARRAY:
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(_checked(count, path)):
            position += 8 + length_of(data, position)[0]
        return f"<{count} strings>", position
    values = []
    for _ in range(_checked(count, path)):
        value, position = _value(data, position, element, path)
        values.append(value)
    return values, position


# ---- the model's configuration ------------------------------------------------------------------------------------

_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
}
"""llama.cpp's architecture names and transformers' model types."""

_ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3", "olmo2": "Olmo2", "gemma3_text": "Gemma3"}

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are part of the configuration rather than of the weights."""

_FILE_DTYPES = {0: "float32", 1: "float16"}
"""general.file_type of files that are not quantized; bfloat16 serves the others."""


def to_hf_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json that says what the header says. Raises ConfigError for an architecture that we do not know.

    Key names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
    """
    model_type = _MODEL_TYPES.get(header.architecture)
    if model_type is None:
        raise ConfigError(
            f"{header.path} has the architecture {header.architecture!r}; "
            f"GGUF files are served for {', '.join(_MODEL_TYPES)}"
        )
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
    """Linear and yarn are metadata; llama3 and longrope scaling are tensors of factors, one a frequency."""
    kind = header.get("rope.scaling.type")
    original = header.get("rope.scaling.original_context_length")
    factors = {tensor.name: _floats(header.path, tensor) for tensor in header.tensors if tensor.name in ROPE_TENSORS}
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


def _floats(path: str, tensor: GgufTensor) -> list[float]:
    count = math.prod(tensor.shape)
    with open(path, "rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def _family_keys(header: GgufHeader, model_type: str) -> dict[str, Any]:
    """What the file leaves to the family, or says under keys of its own."""
    layers = header.get("block_count") or 0
    match model_type:
        case "qwen2" | "qwen3":
            return {"sliding_window": None, "use_sliding_window": False}
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
                # llama.cpp: the 27B model scales by the width of a head as if the heads filled the hidden size
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
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_name(name: str, model_type: str) -> str:
    """The name in a Hugging Face checkpoint of the GGUF tensor `name`; `name` itself when it has none."""
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
