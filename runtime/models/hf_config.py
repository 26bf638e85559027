"""Reading a Hugging Face config.json into a ModelConfig. What is particular to a family is in families.py.

A model type without a family gets the common fields only, and runs through transformers' modules. Imports no torch.
"""

from typing import Any

import msgspec

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.configs import Json, ModelConfig
from llmserve.runtime.models.families import FAMILIES

MAX_LAYERS = 4096


def parse_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """The ModelConfig of a config.json. Of a generation_config.json only `eos_token_id` counts, before the config's.

    Raises ConfigError for a model that cannot be served.
    """
    try:
        parsed = _parse(config, generation or {})
        model = msgspec.convert(msgspec.to_builtins(parsed), ModelConfig)  # checks every type and size
        # Ids outside the vocabulary are never generated.
        stop = tuple(token_id for token_id in model.eos_token_ids if 0 <= token_id < model.vocab_size)
        return msgspec.structs.replace(model, eos_token_ids=stop)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config.json is not usable: {type(error).__name__}: {error}") from error


def _parse(config: Json, generation: Json) -> ModelConfig:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"the checkpoint is quantized ({method}), which is not supported; use the unquantized one or a GGUF file"
        )
    architecture = next(iter(config.get("architectures") or ()), "")
    text = config
    if config["model_type"] == "gemma3" and "text_config" in config:
        text = {"model_type": "gemma3_text", **config["text_config"]}
    if config.get("is_encoder_decoder"):
        raise ConfigError(
            f"{architecture or config['model_type']} is an encoder-decoder model; only decoders can be served"
        )
    family = FAMILIES.get(text["model_type"])
    known = {**family.defaults, **text} if family else text
    hidden_size = _needed(known, "hidden_size", "n_embd", "d_model")
    num_heads = _needed(known, "num_attention_heads", "n_head", "n_heads")
    stop = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id", known.get("eos_token_id")))
    common: dict[str, Any] = {
        "architecture": architecture,
        "model_type": text["model_type"],
        "vocab_size": known["vocab_size"],
        "hidden_size": hidden_size,
        "num_layers": _needed(known, "num_hidden_layers", "n_layer", "n_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _first(known, "num_key_value_heads", "num_kv_heads", "n_head_kv") or num_heads,
        "head_dim": known.get("head_dim") or hidden_size // num_heads,
        "max_position_embeddings": _needed(
            known, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"
        ),
        "dtype": _dtype(_first(known, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype")),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", known.get("tie_word_embeddings", True))),
        "eos_token_ids": stop,
        "multimodal": text is not config,
    }
    if not 1 <= common["num_layers"] <= MAX_LAYERS:
        raise ConfigError(f"config.json asks for {common['num_layers']} layers")
    if num_heads % common["num_kv_heads"]:
        raise ConfigError(f"{num_heads} attention heads cannot share {common['num_kv_heads']} key-value heads evenly")
    specifics = family.read(known, common) if family else None
    if specifics is None:
        return ModelConfig(**common, implementation="transformers", raw=msgspec.json.encode(config))
    common["max_position_embeddings"] = _longest(known, common["max_position_embeddings"])
    return ModelConfig(**common, **specifics, implementation="decoder")


def _longest(config: Json, positions: int) -> int:
    """The longest sequence in tokens: `max_position_embeddings`, or what yarn scaling extends it to."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings")
    if (scaling.get("rope_type") or scaling.get("type")) != "yarn" or not original:
        return positions
    return max(positions, int(original * scaling.get("factor", 1.0)))


def _first(config: Json, *keys: str) -> Any:
    """The value of the first key that has one, else None. Architectures have different keys for the same thing."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _needed(config: Json, *keys: str) -> Any:
    """As `_first`, for a value that every config must have. Raises KeyError."""
    value = _first(config, *keys)
    if value is None:
        raise KeyError(keys[0])
    return value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _dtype(name: str | None) -> str:
    return name if name in ("bfloat16", "float16", "float32") else "bfloat16"
