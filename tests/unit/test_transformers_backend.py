"""Architectures without a configuration of ours, through transformers' own modules over our pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Paged, load
from test_models import CHUNKS, assert_equal_logits, sequences
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import write_tokenizer
from llmserve.runtime.config import ConfigError
from llmserve.runtime.engine.weights import commit_weights, preflight, stage_weights
from llmserve.runtime.models.hub import resolve
from llmserve.runtime.models.registry import build_model
from llmserve.runtime.models.transformers_backend import TransformersModel

_BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}


def make(directory: Path, model_type: str, seed: int = 0, **overrides: Any) -> Path:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **_BASE | overrides)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gpt_neox", {"num_key_value_heads": 4}),  # parallel residual, partial rotary, LayerNorm
        ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "num_key_value_heads": 4}),
        (
            "cohere2",
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16},
        ),
        ("starcoder2", {"sliding_window": 16}),
        # the last two leave the sliding window to their masks
        (
            "qwen2_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 1,
            },
        ),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
        ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),  # has scalars
        ("glm4", {"head_dim": 16}),  # gate and up in one tensor under the name that phi3 gives it
    ],
)
def test_logits_equal_transformers(model_type: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    scale = {"logit_scale": 1.0} if model_type == "cohere2" else {}
    make(tmp_path, model_type, **overrides, **scale)
    assert resolve(str(tmp_path)).config.implementation == "transformers"
    assert_equal_logits(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("mamba", {}, "has layers of the kind linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "has layers of the kind conv"),
        (
            "bamba",
            {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
            "has layers of the kind linear_attention",
        ),
        ("bloom", {"n_layer": 3, "n_head": 4, "seq_length": 512}, "does not use transformers' attention interface"),
    ],
)
def test_what_is_more_than_plain_attention_is_refused(
    model_type: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path, model_type, **overrides)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_attention_sinks_are_refused_by_the_first_step(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    make(tmp_path, "gpt_oss", num_local_experts=4, head_dim=16, rope_parameters=rope)
    with pytest.raises(ConfigError, match="GptOssForCausalLM attends in a way that cannot be served"):
        Paged(load(tmp_path)).step([[1], [2]])


def test_a_layer_with_a_state_of_its_own_is_refused_by_the_first_step(tmp_path: Path) -> None:
    """Whatever the config says of its layers, each must reach the pages."""
    model = load(make(tmp_path, "gpt_neox", num_key_value_heads=4))
    assert isinstance(model, TransformersModel)
    layer = model._base.layers[1].attention

    def recurrent(hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    layer.forward = recurrent
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM has layers that are no plain attention"):
        Paged(model).step([[1], [2]])


def test_an_unknown_model_type_is_a_clear_error(tmp_path: Path) -> None:
    make(tmp_path, "gpt_neox", num_key_value_heads=4)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"gpt_neox"', '"gpt_xyz"'))
    with pytest.raises(ConfigError, match="transformers cannot read a config of type 'gpt_xyz'"):
        load(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """transformers itself only warns, and makes up random weights."""
    from safetensors.torch import load_file, save_file

    make(tmp_path, "gpt_neox", num_key_value_heads=4)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.dense_4h_to_h\.weight: missing"):
        load(tmp_path)


def test_a_swap(tmp_path: Path) -> None:
    first = resolve(str(make(tmp_path / "first", "gpt_neox", seed=1, num_key_value_heads=4)))
    second = resolve(str(make(tmp_path / "second", "gpt_neox", seed=2, num_key_value_heads=4)))
    model = load(first)
    old, new = (torch.cat(Paged(m).run(sequences(), CHUNKS)) for m in (model, load(second)))
    assert preflight(model, first, second) == []
    stage_weights(model, second, lambda done, total: None)
    commit_weights(model)
    assert torch.equal(torch.cat(Paged(model).run(sequences(), CHUNKS)), new)
    commit_weights(model)
    assert torch.equal(torch.cat(Paged(model).run(sequences(), CHUNKS)), old)


def test_a_swap_by_another_model_is_refused(tmp_path: Path) -> None:
    """It has tensors of the same shapes."""
    first = resolve(str(make(tmp_path / "first", "gpt_neox", num_key_value_heads=4)))
    other = resolve(str(make(tmp_path / "other", "gpt_neox", num_key_value_heads=4, use_parallel_residual=False)))
    assert preflight(load(first), first, other) == ["config: use_parallel_residual is False, the model has True"]


def test_it_is_not_split_over_ranks(tmp_path: Path) -> None:
    from llmserve.runtime.distributed.groups import Group, Topology

    config = resolve(str(make(tmp_path, "gpt_neox", num_key_value_heads=4))).config
    with pytest.raises(ValueError, match="cannot be split over ranks"):
        build_model(config, torch.float32, torch.device("cpu"), topology=Topology(tp=Group(0, 2)))
