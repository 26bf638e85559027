"""Tiny random checkpoints, laid out as transformers saves them, with a real tokenizer and chat template."""

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmserve.runtime.engine.tensor_names import FUSED
from llmserve.runtime.models.hf_config import parse_config
from llmserve.runtime.models.registry import build_model

VOCAB_SIZE = 1000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 32,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4, "tie_word_embeddings": True},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "gemma": {**_GEMMA, "architectures": ["GemmaForCausalLM"]},
    "gemma2": {
        **_GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 500.0,
    },
}
"""What a tiny model of each family has beside the common sizes."""


def make_tiny(
    directory: Path, family: str = "llama", *, seed: int = 0, dtype: str = "float32", shards: int = 1, **overrides: Any
) -> Path:
    """Writes a random checkpoint of a family into `directory` and returns that. `overrides` are keys of config.json."""
    config = _BASE | {"model_type": family} | FAMILIES[family] | {"dtype": dtype} | overrides
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(directory)
    save_sharded(directory, dict(random_tensors(config, seed)), shards)
    return directory


def make_endless(directory: Path) -> Path:
    """A tiny llama of 64k positions that never ends a greedy answer itself: its logit of the end token is always 0."""
    make_tiny(directory, max_position_embeddings=1 << 16)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"][EOS_ID] = 0
    save_sharded(directory, tensors)
    return directory


def random_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of every name and shape that a checkpoint with this config has; logits come out about as wide as 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    parsed = parse_config(config)
    shapes = {name: slot.shape for name, slot in build_model(parsed, dtype, torch.device("meta"), 1).slots()}
    if config["model_type"] == "phi3":
        shapes = _fused(shapes)
    if config["model_type"] == "mixtral":
        shapes = {_mixtral_name(name): shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 0.2 * values + (0.0 if parsed.norm_plus_one else 1.0)
        else:
            values *= 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        yield name, values.to(dtype)


def _mixtral_name(name: str) -> str:
    for ours, theirs in {
        ".mlp.": ".block_sparse_moe.",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
    }.items():
        name = name.replace(ours, theirs)
    return name


def _fused(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    whole = {part: name for name, parts in FUSED.items() for part in parts}
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        *head, leaf, suffix = name.split(".")
        target = ".".join([*head, whole.get(leaf, leaf), suffix])
        rows = shape[0] + (result[target][0] if target in result else 0)
        result[target] = (rows, *shape[1:])
    return result


def save_sharded(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Saves tensors as model.safetensors, or as that many files with their index."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE of VOCAB_SIZE tokens: any text goes in and comes out unchanged."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


@functools.cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = Path(argparse.__file__).read_text(encoding="utf-8")
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer.to_str()
