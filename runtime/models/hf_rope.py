"""Reading the rotary position embedding of a Hugging Face config.json into a RopeConfig.

The defaults and formulas are those of transformers' modeling_rope_utils.py.
"""

import math
from typing import cast, get_args

from llmserve.runtime.layers.rope import RopeConfig, RopeType
from llmserve.runtime.models.configs import Json


def read_rope(config: Json, common: Json) -> RopeConfig | None:
    """The one rotary embedding of a model, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    `common` holds the fields of ModelConfig that every family has. None for a type of scaling that is not supported.
    """
    return make_rope(config, common, config.get("rope_parameters") or config.get("rope_scaling") or {})


def make_rope(config: Json, common: Json, parameters: Json) -> RopeConfig | None:
    """The RopeConfig that `parameters` describe, with what they omit taken from the config; None as in read_rope."""
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if name == "su" or (config["model_type"] == "phi3" and name == "yarn"):
        name = "longrope"
    if name == "dynamic":
        name = "default"  # the same up to max_position_embeddings, and longer sequences are not served
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
    theta = float(parameters.get("rope_theta") or config["rope_theta"])
    rotary_dim = int(common["head_dim"] * partial)
    if kind == "default":
        return RopeConfig(rotary_dim=rotary_dim, theta=theta)
    return RopeConfig(
        type=kind,
        rotary_dim=rotary_dim,
        theta=theta,
        factor=float(factor),
        original_max_position_embeddings=0 if kind == "linear" else original,
        low_freq_factor=parameters.get("low_freq_factor", 1.0),
        high_freq_factor=parameters.get("high_freq_factor", 4.0),
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
        attention_factor=_attention_factor(kind, parameters, factor, original),
        short_factor=tuple(parameters.get("short_factor", ())),
        long_factor=tuple(parameters.get("long_factor", ())),
    )


def _attention_factor(kind: RopeType, parameters: Json, factor: float, original: int) -> float:
    """What cos and sin are multiplied with, given or by the formula of yarn or longrope; 1 for other types."""
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
