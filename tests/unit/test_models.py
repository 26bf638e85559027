"""Every family's logits against transformers', on tiny random checkpoints: chunked prefill, then decode, over pages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Paged, load
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import FAMILIES, make_tiny
from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.decoder import Decoder
from llmserve.runtime.models.families import FAMILIES as KNOWN_FAMILIES
from llmserve.runtime.models.hf_config import parse_config
from llmserve.runtime.models.registry import CausalLM
from llmserve.runtime.ops import native

LENGTH = 70
CHUNKS = (40, 20, 1, 1, 1, 7)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}


def sequences(vocab_size: int = 1000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (LENGTH,), generator=generator).tolist() for _ in range(2)]


def reference_logits(directory: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), "transformers would make up what is missing"
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].float() for ids in sequences()]


def ways(model: CausalLM) -> list[bool]:
    """Run it op by op, and, where they are there, with the compiled kernels."""
    return [False, True] if isinstance(model, Decoder) and native.library() is not None else [False]


def assert_equal_logits(directory: Path, max_positions: int | None = None) -> None:
    """In fp32, every logit within 1e-4 of transformers', whose logits vary by about one. So do the compiled kernels."""
    model = load(directory, max_positions=max_positions)
    expected = reference_logits(directory)
    for way in ways(model):
        for ours, theirs in zip(Paged(model, native=way).run(sequences(), CHUNKS), expected, strict=True):
            assert theirs.std() > 0.3
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    assert_equal_logits(make_tiny(tmp_path, family))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"head_dim": 48}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 12}),
        ("phi3", {"sliding_window": 20}),
        ("phi3", {"partial_rotary_factor": 0.75}),
        ("llama", {"hidden_size": 80, "intermediate_size": 112}),
        ("gemma2", {"hidden_size": 80}),
        ("gemma2", {"query_pre_attn_scalar": 50, "attn_logit_softcapping": None}),
        ("gemma3_text", {"final_logit_softcapping": 2.0}),
        ("gemma3_text", {"sliding_window_pattern": 2, "rope_scaling": LINEAR}),
        ("mistral", {"sliding_window": None}),
        ("olmo2", {"num_key_value_heads": 4}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 20, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"moe_intermediate_size": 40}),  # no whole panels
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
        ("qwen3_moe", {"num_experts": 0}),
        ("mixtral", {"sliding_window": 16, "num_experts_per_tok": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_variant(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    assert_equal_logits(make_tiny(tmp_path, family, **overrides))


@pytest.mark.parametrize(
    "scaling",
    [LLAMA3, YARN, {**YARN, "truncate": False, "attention_factor": 0.9}, LINEAR],
    ids=lambda s: s["rope_type"],
)
def test_rope_scaling(scaling: dict[str, Any], tmp_path: Path) -> None:
    assert_equal_logits(make_tiny(tmp_path, rope_scaling=scaling))


@pytest.mark.parametrize("max_positions", [512, 128])
def test_longrope_takes_the_factors_of_the_longest_sequence_served(max_positions: int, tmp_path: Path) -> None:
    """Past the original length the long factors, below it the short ones; transformers decides by what it is given."""
    original = 64 if max_positions == 512 else 128
    make_tiny(tmp_path, "phi3", rope_scaling=LONGROPE, original_max_position_embeddings=original)
    assert original < LENGTH or max_positions <= original
    assert_equal_logits(tmp_path, max_positions)


def test_yarn_serves_the_length_that_it_stretches_to(tmp_path: Path) -> None:
    """Qwen 2.5's way to long contexts: max_position_embeddings stays the length that the model was trained with."""
    config = {"model_type": "qwen2", "max_position_embeddings": 32}
    assert parse_config(config).max_position_embeddings == 32
    assert parse_config(config | {"rope_scaling": YARN}).max_position_embeddings == 128


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_older_names_of_longrope(old_name: str) -> None:
    """The first Phi-3 checkpoints call it su, some yarn, as transformers' Phi3Config knows."""
    config = {"model_type": "phi3", "head_dim": 16, "original_max_position_embeddings": 64}
    old = parse_config(config | {"rope_scaling": {**LONGROPE, "rope_type": old_name}})
    assert old.layers == parse_config(config | {"rope_scaling": LONGROPE}).layers
    assert old.layers[0].rope is not None
    assert old.layers[0].rope.type == "longrope"


def test_dynamic_rope_is_plain_up_to_the_original_length(tmp_path: Path) -> None:
    assert_equal_logits(make_tiny(tmp_path, rope_scaling=DYNAMIC))


def test_rope_parameters_of_transformers_5_mean_the_same(tmp_path: Path) -> None:
    old = make_tiny(tmp_path, "gemma3_text", rope_scaling=LINEAR)
    config = json.loads((old / "config.json").read_text())
    saved = AutoConfig.from_pretrained(old).to_dict()
    assert saved["rope_parameters"]["full_attention"]["factor"] == LINEAR["factor"]
    assert parse_config(saved).layers == parse_config(config).layers


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "phi3"])
def test_bfloat16_is_as_near_as_transformers(family: str, tmp_path: Path) -> None:
    """bf16 rounds every intermediate result. Ours may be no further from the fp32 logits than transformers' bf16 is."""
    make_tiny(tmp_path, family, dtype="bfloat16")
    exact = torch.cat(reference_logits(tmp_path))
    theirs = torch.cat(reference_logits(tmp_path, torch.bfloat16))
    noise = (theirs - exact).pow(2).mean().sqrt()
    model = load(tmp_path, torch.bfloat16)
    for way in ways(model):
        ours = torch.cat(Paged(model, torch.bfloat16, native=way).run(sequences(), CHUNKS))
        assert 0 < (ours - exact).pow(2).mean().sqrt() < 1.25 * noise


def test_sharded_checkpoint(tmp_path: Path) -> None:
    """The same tensors in three files."""
    make_tiny(tmp_path / "one", "qwen2")
    make_tiny(tmp_path / "three", "qwen2", shards=3)
    whole, sharded = (Paged(load(tmp_path / name)).run(sequences(), CHUNKS) for name in ("one", "three"))
    assert len(list((tmp_path / "three").glob("*.safetensors"))) == 3
    assert all(torch.equal(a, b) for a, b in zip(whole, sharded, strict=True))


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As transformers 5 has them in memory: [experts, gate and up, inputs], and [experts, outputs, inputs] of down."""
    make_tiny(tmp_path / "each", "qwen3_moe")
    make_tiny(tmp_path / "fused", "qwen3_moe")
    tensors = load_file(tmp_path / "each/model.safetensors")
    fused = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"

        def all_of(leaf: str, experts: str = experts) -> Tensor:
            return torch.stack([tensors[f"{experts}.{number}.{leaf}.weight"] for number in range(8)])

        fused[f"{experts}.gate_up_proj"] = torch.cat([all_of("gate_proj"), all_of("up_proj")], 1)
        fused[f"{experts}.down_proj"] = all_of("down_proj")
    assert fused["model.layers.2.mlp.experts.gate_up_proj"].shape == (8, 128, 64)
    save_file(fused, tmp_path / "fused/model.safetensors")
    one, other = (Paged(load(tmp_path / name)).run(sequences(), CHUNKS) for name in ("each", "fused"))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("native_too", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_answer_alike_in_any_batch(family: str, native_too: bool, tmp_path: Path) -> None:
    """Token by token and alone, or a prompt at once beside another one: a token's experts have other company then."""
    model = load(make_tiny(tmp_path, family))
    if native_too and native.library() is None:
        pytest.skip("no native kernels here")
    together = Paged(model, native=native_too).run(sequences(), CHUNKS)
    for ids, expected in zip(sequences(), together, strict=True):
        (alone,) = Paged(model, count=1, native=native_too).run([ids], (1,) * LENGTH)
        torch.testing.assert_close(alone, expected, atol=0 if native_too else 1e-4, rtol=0)
        assert torch.equal(alone.argmax(-1), expected.argmax(-1))


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_experts_answer_alike_on_any_number_of_threads(tmp_path: Path) -> None:
    """With more threads than cores some come late to a phase, when others are layers ahead."""
    model = load(make_tiny(tmp_path, "qwen3_moe", num_hidden_layers=8))
    before = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 3, 4):
            native.set_threads(threads)
            answers.append(torch.cat(Paged(model, native=True).run(sequences(), CHUNKS)))
    finally:
        native.set_threads(before)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize(
    ("tied", "prefix", "head"),
    [
        (True, "language_model.model.", ""),
        (False, "language_model.model.", "language_model.lm_head."),
        (False, "model.language_model.", "lm_head."),
    ],
    ids=["tied", "untied", "transformers 5"],
)
def test_multimodal_gemma3_serves_its_language_model(tied: bool, prefix: str, head: str, tmp_path: Path) -> None:
    """google/gemma-3-4b-it and larger: the text model under a prefix, beside a vision tower that is not read."""
    make_tiny(tmp_path / "text", "gemma3_text", tie_word_embeddings=tied)
    text = json.loads((tmp_path / "text/config.json").read_text())
    make_tiny(tmp_path / "both", "gemma3_text")
    both = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [2, 5]}
    both["tie_word_embeddings"] = tied
    (tmp_path / "both/config.json").write_text(json.dumps(both | {"text_config": text}))
    (tmp_path / "both/generation_config.json").unlink()
    tensors = load_file(tmp_path / "text/model.safetensors")
    prefixed = {re.sub("^model.", prefix, re.sub("^lm_head.", head, name)): values for name, values in tensors.items()}
    save_file(prefixed | {"vision_tower.weight": torch.ones(2)}, tmp_path / "both/model.safetensors")

    plain, model = load(tmp_path / "text"), load(tmp_path / "both")
    assert model.config.eos_token_ids == (2, 5)
    expected, computed = (Paged(m).run(sequences(), CHUNKS) for m in (plain, model))
    assert all(torch.equal(a, b) for a, b in zip(expected, computed, strict=True))


# ---- configs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KNOWN_FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A config.json may leave out what equals the default of its class."""
    saved = AutoConfig.for_model(family).to_dict()
    bare = parse_config({"model_type": family, "architectures": saved["architectures"]})
    full = parse_config(saved)
    assert full == bare


def test_attention_scale_and_stop_tokens(tmp_path: Path) -> None:
    config = {"model_type": "llama", "head_dim": 64, "eos_token_id": 7}
    assert parse_config(config).attention_scale == 0.125
    assert parse_config(config).eos_token_ids == (7,)
    assert parse_config(config, {"eos_token_id": [9, 8]}).eos_token_ids == (9, 8)
    assert parse_config(config, {"eos_token_id": [-1, 9, 32000]}).eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type"),
        ({"model_type": "llama", "hidden_size": "wide"}, "not usable"),
        ({"model_type": "llama", "vocab_size": "wide"}, r"not usable: .*\$\.vocab_size"),
        ({"model_type": "llama", "intermediate_size": 1.5}, r"not usable: .*\$\.intermediate_size"),
        ({"model_type": "llama", "head_dim": 16, "hidden_size": 0}, r"not usable: .*\$\.hidden_size"),
        ({"model_type": "llama", "num_attention_heads": 0}, "not usable"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "asks for 1000000000 layers"),
        ({"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 4}, "6 attention heads"),
        (
            {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5Model"]},
            "T5Model is an encoder-decoder",
        ),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, "quantized \\(awq\\)"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "cannot go to 9 of 8 experts"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "asks for 1000000000 experts"),
        ({"model_type": "qwen3_moe", "num_experts": "many"}, "not usable"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_config_that_cannot_be_served(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config)
