"""The model families that decoder.py covers: how their config.json is read, and the defaults of their config classes.

A family is a configuration of the one decoder, not a class of its own. The names are transformers' model types.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from llmserve.runtime.config import ConfigError
from llmserve.runtime.layers.rope import RopeConfig
from llmserve.runtime.models.configs import Json, LayerConfig
from llmserve.runtime.models.hf_rope import make_rope, read_rope

MAX_EXPERTS = 4096


class Family(msgspec.Struct, frozen=True):
    """How one model type is read.

    `read(config, common)` gives the fields of ModelConfig that differ between families, from a config.json with
    `defaults` filled in and the fields that all families have (hf_config.py). It returns None when the model needs
    something that our decoder does not have.
    """

    read: Callable[[Json, Json], dict[str, Any] | None]
    defaults: Json


def _llama(config: Json, common: Json) -> dict[str, Any] | None:
    rope = read_rope(config, common)
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


def _qwen3_moe(config: Json, common: Json) -> dict[str, Any] | None:
    fields = _llama(
        {**config, "sliding_window": config["sliding_window"] if config["use_sliding_window"] else None}, common
    )
    dense, period = config["mlp_only_layers"] or (), config["decoder_sparse_step"]
    return fields and _with_experts(
        fields | {"qk_norm": "head"},
        config,
        count=config["num_experts"],
        size=config["moe_intermediate_size"],
        normed=config["norm_topk_prob"],
        sparse=lambda i: config["num_experts"] > 0 and i not in dense and (i + 1) % period == 0,
    )


def _mixtral(config: Json, common: Json) -> dict[str, Any] | None:
    fields = _llama(config, common)
    return fields and _with_experts(
        fields,
        config,
        count=config["num_local_experts"],
        size=config["intermediate_size"],
        normed=True,
        sparse=lambda i: True,
    )


def _with_experts(
    fields: dict[str, Any], config: Json, *, count: int, size: int, normed: bool, sparse: Callable[[int], bool]
) -> dict[str, Any]:
    chosen = config["num_experts_per_tok"]
    if count > MAX_EXPERTS:
        raise ConfigError(f"config.json asks for {count} experts")
    if count and not 1 <= chosen <= count:
        raise ConfigError(f"a token cannot go to {chosen} of {count} experts")
    layers = tuple(msgspec.structs.replace(layer, sparse=sparse(i)) for i, layer in enumerate(fields["layers"]))
    return fields | {
        "layers": layers,
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_intermediate_size": size,
        "norm_expert_weights": normed,
    }


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
    """The rotary embedding of each type of layer: gemma 3 has another base frequency for its sliding layers."""
    parameters = config.get("rope_parameters") or {}
    if config["model_type"] != "gemma3_text":
        rope = read_rope(config, common)
        return {"sliding_attention": rope, "full_attention": rope}
    full = {**(config.get("rope_scaling") or {}), **(parameters.get("full_attention") or {})}
    local = {"rope_theta": config["rope_local_base_freq"], **(parameters.get("sliding_attention") or {})}
    return {"sliding_attention": make_rope(config, common, local), "full_attention": make_rope(config, common, full)}


def _layer_types(config: Json, sliding: Callable[[int], bool]) -> list[bool]:
    """Whether each layer has a sliding window: by `layer_types`, else by the family's rule `sliding(layer)`."""
    count = config["num_hidden_layers"]
    if config.get("layer_types"):
        return [kind == "sliding_attention" for kind in config["layer_types"]][:count]
    return [sliding(i) for i in range(count)]


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
    "qwen3_moe": Family(
        _qwen3_moe,
        {
            **_QWEN,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
    ),
    "mixtral": Family(
        _mixtral,
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
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
    "olmo2": Family(_olmo2, {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}),
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
