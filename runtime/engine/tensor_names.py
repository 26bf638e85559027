"""What the tensors of a checkpoint are called in our models, whose names are those of a llama checkpoint.

hf_name in models/gguf_config.py has translated the names of a GGUF file before.
"""

import re

from llmserve.runtime.models.configs import ModelConfig

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that some checkpoints (phi3's) hold as one tensor, and its parts in the order of their rows."""

_DERIVED = re.compile(r".*rotary_emb\.inv_freq")
"""Buffers in old checkpoints that can be computed from the config."""

_EXPERTS = re.compile(r"(?P<head>.*\.mlp\.experts)\.(?P<leaf>\w+_proj)(\.weight)?")
"""A tensor that holds the matrices of all experts, [experts, outputs, inputs]."""

_MIXTRAL = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
"""The names of mixtral's checkpoints, and ours."""

_LANGUAGE_MODEL = re.compile(r"model\.language_model\.|language_model\.model\.")
"""Prefixes of the language model's tensors in multimodal checkpoints (gemma3's)."""


def model_name(name: str, config: ModelConfig) -> str | None:
    """The model's name of a checkpoint's tensor; None for one that the model does not need."""
    if config.multimodal:
        prefix = _LANGUAGE_MODEL.match(name)
        head = name.removeprefix("language_model.")
        if prefix:
            name = "model." + name[prefix.end() :]
        elif head.startswith("lm_head."):
            name = head
        else:
            return None
    if config.model_type == "mixtral":
        for theirs, ours in _MIXTRAL.items():
            name = name.replace(theirs, ours)
    if _DERIVED.fullmatch(name) or (config.tie_word_embeddings and name.startswith("lm_head.")):
        return None
    return name


def split_name(name: str, config: ModelConfig) -> list[str]:
    """The names of the parts of a fused tensor, in the order of their rows; `name` alone for any other tensor."""
    if experts := _EXPERTS.fullmatch(name):
        leaves = FUSED.get(experts["leaf"], (experts["leaf"],))
        numbers = range(config.num_experts)
        return [f"{experts['head']}.{number}.{leaf}.weight" for number in numbers for leaf in leaves]
    stem, _, suffix = name.rpartition(".")
    parent, _, leaf = stem.rpartition(".")
    return [f"{parent}.{part}.{suffix}" for part in FUSED[leaf]] if leaf in FUSED else [name]
