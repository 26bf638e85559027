"""ModelConfig: what a decoder must know of a model, read from a Hugging Face config.json.

The families are configurations of one decoder, not classes. A model type without an entry in FAMILIES gets only the
general facts and runs through transformers' own modules. Imports no torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec

from llmserve.runtime.config import ConfigError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Json = Mapping[str, Any]


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


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from layer to layer. `rope` None: the layer has no positions (NoPE).

    With a sliding window of W a token sees itself and the W - 1 tokens before it.
    """

    rope: RopeConfig | None
    sliding_window: int | None = None


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's own sampling parameters (generation_config.json); None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One causal language model. Fields from `norm_style` on are defaults in a model that runs through transformers."""

    architecture: str
    model_type: str
    implementation: Literal["decoder", "transformers"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: Literal["bfloat16", "float16", "float32"]
    """What the weights were saved in."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation: GenerationDefaults = GenerationDefaults()
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


def parse_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """The ModelConfig of a config.json and, if there is one, a generation_config.json.

    Raises ConfigError for what cannot be served.
    """
    try:
        return _parse(config, generation or {})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
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
    hidden_size = _first(known, "hidden_size", "n_embd", "d_model")
    num_heads = _first(known, "num_attention_heads", "n_head", "n_heads")
    stop = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id", known.get("eos_token_id")))
    common: dict[str, Any] = {
        "architecture": architecture,
        "model_type": text["model_type"],
        "vocab_size": known["vocab_size"],
        "hidden_size": hidden_size,
        "num_layers": _first(known, "num_hidden_layers", "n_layer", "n_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _first(known, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=None) or num_heads,
        "head_dim": known.get("head_dim") or hidden_size // num_heads,
        "max_position_embeddings": _first(known, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        "dtype": _dtype(
            _first(known, "dtype", "torch_dtype", default=None) or config.get("dtype") or config.get("torch_dtype")
        ),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", known.get("tie_word_embeddings", True))),
        "eos_token_ids": stop,
        "bos_token_id": next(iter(_ids(config.get("bos_token_id", known.get("bos_token_id")))), None),
        "generation": _generation_defaults(generation),
        "multimodal": text is not config,
    }
    specifics = family.read(known, common) if family else None
    if specifics is None:
        return ModelConfig(**common, implementation="transformers", raw=msgspec.json.encode(config))
    model = ModelConfig(**common, **specifics, implementation="decoder")
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(f"{model.num_heads} attention heads cannot share {model.num_kv_heads} key-value heads evenly")
    return model


def _first(config: Json, *keys: str, **default: Any) -> Any:
    """The value of the first key that is there; architectures name the same things differently."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default:
        return default["default"]
    raise KeyError(keys[0])


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _dtype(name: str | None) -> str:
    return name if name in ("bfloat16", "float16", "float32") else "bfloat16"


def _generation_defaults(generation: Json) -> GenerationDefaults:
    names = GenerationDefaults.__struct_fields__
    return msgspec.convert(
        {name: generation[name] for name in names if generation.get(name) is not None}, GenerationDefaults, strict=False
    )


# ---- rotary embeddings ----------------------------------------------------------------------------------------------


def _rope(config: Json, common: Json, parameters: Json) -> RopeConfig | None:
    """The RopeConfig of `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

    None for an unknown type. The defaults are those of transformers' modeling_rope_utils.py.
    """
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if name == "su" or (config["model_type"] == "phi3" and name == "yarn"):
        name = "longrope"
    if name not in get_args(RopeType):
        return None
    kind = cast(RopeType, name)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    original = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or common["max_position_embeddings"]
    )
    factor = parameters.get("factor") or common["max_position_embeddings"] / original
    return RopeConfig(
        type=kind,
        rotary_dim=int(common["head_dim"] * partial),
        theta=float(parameters.get("rope_theta") or config["rope_theta"]),
        factor=float(factor),
        original_max_position_embeddings=original,
        low_freq_factor=parameters.get("low_freq_factor", 1.0),
        high_freq_factor=parameters.get("high_freq_factor", 4.0),
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
        attention_factor=_attention_factor(kind, parameters, factor, original),
        short_factor=tuple(parameters.get("short_factor", ())),
        long_factor=tuple(parameters.get("long_factor", ())),
    )


def _attention_factor(kind: str, parameters: Json, factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)


def _one_rope(config: Json, common: Json) -> RopeConfig | None:
    return _rope(config, common, config.get("rope_parameters") or config.get("rope_scaling") or {})


def _layer_types(config: Json, sliding: Callable[[int], bool]) -> list[bool]:
    """Which layers have the sliding window: as `layer_types` lists it, else by the family's rule."""
    count = config["num_hidden_layers"]
    if config.get("layer_types"):
        return [kind == "sliding_attention" for kind in config["layer_types"]][:count]
    return [sliding(i) for i in range(count)]


# ---- families -------------------------------------------------------------------------------------------------------


class Family(msgspec.Struct, frozen=True):
    """`read` turns a config.json with the family's defaults filled in into the fields of ModelConfig that are its own.

    It returns None when the model needs something that our decoder does not have.
    """

    read: Callable[[Json, Json], dict[str, Any] | None]
    defaults: Json


def _llama(config: Json, common: Json) -> dict[str, Any] | None:
    rope = _one_rope(config, common)
    if rope is None or config["hidden_act"] != "silu":
        return None
    window = config.get("sliding_window")
    return {
        "intermediate_size": config["intermediate_size"],
        "layers": (LayerConfig(rope=rope, sliding_window=window),) * config["num_hidden_layers"],
        "rms_norm_eps": config["rms_norm_eps"],
        "qkv_bias": config.get("attention_bias", False),
        "output_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "attention_scale": common["head_dim"] ** -0.5,
    }


def _qwen(config: Json, common: Json) -> dict[str, Any] | None:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    fields = _llama({**config, "sliding_window": None}, common)
    if fields is None:
        return None
    rope = fields["layers"][0].rope
    types = _layer_types(config, lambda i: window is not None and i >= config["max_window_layers"])
    fields["layers"] = tuple(LayerConfig(rope=rope, sliding_window=window if sliding else None) for sliding in types)
    if config["model_type"] == "qwen2":
        return fields | {"qkv_bias": True, "output_bias": False}
    return fields | {"qk_norm": "head"}


def _smollm3(config: Json, common: Json) -> dict[str, Any] | None:
    fields = _llama({**config, "sliding_window": None}, common)
    if fields is None:
        return None
    rope, window = fields["layers"][0].rope, config["sliding_window"] if config["use_sliding_window"] else None
    interval = config["no_rope_layer_interval"]
    rotated = config["no_rope_layers"] or [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]
    types = _layer_types(config, lambda i: window is not None and not rotated[i])
    fields["layers"] = tuple(
        LayerConfig(rope=rope if rotated[i] else None, sliding_window=window if sliding else None)
        for i, sliding in enumerate(types)
    )
    return fields


def _granite(config: Json, common: Json) -> dict[str, Any] | None:
    fields = _llama(config, common)
    return fields and fields | {
        "attention_scale": config["attention_multiplier"],
        "embedding_multiplier": config["embedding_multiplier"],
        "residual_multiplier": config["residual_multiplier"],
        "logit_divisor": config["logits_scaling"],
    }


def _olmo2(config: Json, common: Json) -> dict[str, Any] | None:
    fields = _llama(config, common)
    return fields and fields | {"norm_style": "post", "qk_norm": "projection"}


def _gemma(config: Json, common: Json) -> dict[str, Any] | None:
    activation = config["hidden_activation"] or config.get("hidden_act")
    ropes = _gemma_ropes(config, common)
    if config.get("use_bidirectional_attention"):
        raise ConfigError("this checkpoint attends in both directions, so it cannot generate text")
    if activation not in ("gelu_pytorch_tanh", "gelu") or None in ropes.values():
        return None
    version = {"gemma": 1, "gemma2": 2, "gemma3_text": 3}[config["model_type"]]
    scalar = common["head_dim"] if version == 1 else config["query_pre_attn_scalar"]
    period = {1: 1, 2: 2, 3: config.get("sliding_window_pattern", 6)}[version]
    types = _layer_types(config, lambda i: bool((i + 1) % period))
    return {
        "intermediate_size": config["intermediate_size"],
        "layers": tuple(
            LayerConfig(
                rope=ropes["sliding_attention" if sliding else "full_attention"],
                sliding_window=config["sliding_window"] if sliding else None,
            )
            for sliding in types
        ),
        "rms_norm_eps": config["rms_norm_eps"],
        "norm_style": "pre" if version == 1 else "sandwich",
        "norm_plus_one": True,
        "qk_norm": "head" if version == 3 else "none",
        "activation": "gelu_tanh",
        "qkv_bias": config["attention_bias"],
        "output_bias": config["attention_bias"],
        "attention_scale": scalar**-0.5,
        "attention_softcap": config.get("attn_logit_softcapping") if version == 2 else None,
        "logit_softcap": config.get("final_logit_softcapping"),
        "embedding_multiplier": common["hidden_size"] ** 0.5,
    }


def _gemma_ropes(config: Json, common: Json) -> dict[str, RopeConfig | None]:
    """Gemma 3 rotates its sliding layers with another base; the older ones have one rotary embedding."""
    parameters = config.get("rope_parameters") or {}
    if config["model_type"] != "gemma3_text":
        rope = _one_rope(config, common)
        return {"sliding_attention": rope, "full_attention": rope}
    full = {**(config.get("rope_scaling") or {}), **(parameters.get("full_attention") or {})}
    local = {"rope_theta": config["rope_local_base_freq"], **(parameters.get("sliding_attention") or {})}
    return {"sliding_attention": _rope(config, common, local), "full_attention": _rope(config, common, full)}


_COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA = {
    **_COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {
    **_COMMON,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    **_COMMON,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, {**_LLAMA, "sliding_window": None}),
    "mistral": Family(
        _llama,
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(_qwen, _QWEN),
    "qwen3": Family(_qwen, {**_QWEN, "head_dim": 128}),
    "phi3": Family(
        _llama,
        {
            **_LLAMA,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
    ),
    "smollm3": Family(
        _smollm3,
        {
            **_LLAMA,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
    "granite": Family(
        _granite,
        {
            **_LLAMA,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    ),
    "olmo2": Family(
        _olmo2, {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
    ),
    "gemma": Family(
        _gemma,
        {
            **_GEMMA,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "hidden_activation": None,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma2": Family(_gemma, {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3_text": Family(
        _gemma,
        {
            **_GEMMA,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
    ),
}
