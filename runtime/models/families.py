"""The model families that decoder.py covers, and how their config.json is read.

A family is a configuration of the one decoder, not a class of its own. The names are transformers' model types.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from llmserve.runtime.config import ConfigError
from llmserve.runtime.layers.rope import RopeConfig
from llmserve.runtime.models.configs import Json, LayerConfig
from llmserve.runtime.models.defaults import DEFAULTS
from llmserve.runtime.models.hf_rope import make_rope, read_rope

MAX_EXPERTS = 4096

Reader = Callable[[Json, Json], dict[str, Any] | None]
"""`read(config, common)` gives the fields of ModelConfig that differ between families, from a config.json with the
family's defaults filled in and the fields that all families have (hf_config.py). It returns None when the model needs
something that our decoder does not have.
"""


class Family(msgspec.Struct, frozen=True):
    """How one model type is read. `defaults` are the fields that its config.json may leave out."""

    read: Reader
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


_READERS: dict[str, Reader] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "phi3": _llama,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
}

FAMILIES = {name: Family(read, DEFAULTS[name]) for name, read in _READERS.items()}
