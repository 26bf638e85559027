"""Weights that stay in a file's blocks: the kernels against the dequantized weight, whole models, swaps to and fro."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from forked import run_ranks
from gguf import GGMLQuantizationType
from paged import Paged, load
from test_gguf import without_tokenizer
from test_models import CHUNKS, sequences
from tiny_gguf import write_gguf
from tokenizers import Tokenizer
from torch import Tensor

from checkpoints import make_tiny
from llmserve.runtime import ops
from llmserve.runtime.config import ConfigError
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.engine.weights import (
    commit_weights,
    discard_weights,
    load_weights,
    stage_weights,
    weight_bytes,
    weights_of,
)
from llmserve.runtime.models.gguf import GgufTensor
from llmserve.runtime.models.gguf_tensors import dequantize
from llmserve.runtime.models.hub import Checkpoint, default_model, resolve
from llmserve.runtime.models.registry import CausalLM, build_model
from llmserve.runtime.ops import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler, or a CPU without AVX-512")

KINDS = [GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]
SHAPES = [(64, 2), (960, 18), (1000, 2), (30, 3), (1, 1), (577, 48)]
"""Outputs, and how many groups of 32 inputs; of 256 where such are a block."""
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
"""What a tiny model needs to have whole blocks of 256 inputs."""
DIRECT_ROWS = 12
"""More rows are multiplied with weights that are rounded to bf16 first."""


def ignore_progress(done: int, total: int) -> None:
    pass


def random_blocks(kind: GGMLQuantizationType, outputs: int, groups: int) -> tuple[ops.Blocks, Tensor]:
    """Blocks of every code, scales of both signs and zero among them; and the exact weights, float64 [N, K]."""
    random = np.random.default_rng(outputs)
    format = ops.BLOCK_FORMATS[kind]
    inputs = -(-groups * 32 // format.block_inputs) * format.block_inputs
    blocks = random.integers(0, 256, (outputs * inputs // format.block_inputs, format.block_bytes), dtype=np.uint8)
    halves = random.normal(size=blocks[:, format.halves].view(np.float16).shape).astype(np.float16)
    halves[::7] = 0
    blocks[:, format.halves] = halves.view(np.uint8)
    data = torch.from_numpy(blocks.reshape(outputs, -1))
    exact = dequantize(data.flatten(), GgufTensor("", "w", (outputs, inputs), kind, 0), torch.float32).double()
    return ops.Blocks(data, format), exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "groups"), SHAPES)
def test_a_packed_weight_holds_the_blocks(kind: GGMLQuantizationType, outputs: int, groups: int) -> None:
    blocks, exact = random_blocks(kind, outputs, groups)
    packed = ops.PackedWeight(blocks)
    assert torch.equal(packed.unpack(), exact.bfloat16())
    ids = torch.tensor([outputs - 1, 0, 0])
    assert torch.equal(ops.embedding(ids, packed), exact[ids].bfloat16())
    padded = -(-outputs // native.PANEL) * native.PANEL
    assert packed.nbytes == padded * blocks.data.shape[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "groups"), SHAPES)
def test_products(kind: GGMLQuantizationType, outputs: int, groups: int) -> None:
    """With few rows nothing but x is rounded; with more the weights are, too, as in a weight of values."""
    blocks, exact = random_blocks(kind, outputs, groups)
    packed, rounded = ops.PackedWeight(blocks), ops.PackedWeight(exact.bfloat16())
    x = torch.randn(130, exact.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    scale = (x.double().abs() @ exact.abs().T).clamp_min(1e-9)
    for rows in (*range(1, 17), 64, 97, 130):
        part = x[:rows].contiguous()
        products = ops.logits(part, packed)
        if rows <= DIRECT_ROWS:
            error = (products - part.double() @ exact.T).abs() / scale[:rows]
            assert error.max() < 1e-5
        else:
            assert torch.equal(products, ops.logits(part, rounded))
        difference = ops.linear(part, packed, bias).float() - (products + bias.float())
        assert (difference.abs() <= 2**-8 * (products + bias.float()).abs()).all(), "only the result is rounded"


def test_a_row_of_a_small_product_does_not_depend_on_the_others() -> None:
    packed = ops.PackedWeight(random_blocks(GGMLQuantizationType.Q4_1, 960, 18)[0])
    x = torch.randn(DIRECT_ROWS, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = ops.linear(x, packed)
    for row in range(DIRECT_ROWS):
        assert torch.equal(ops.linear(x[row : row + 1], packed)[0], together[row])


# ---- models ---------------------------------------------------------------------------------------------------------


def formats(model: CausalLM) -> set[int]:
    """The formats of the linear weights, 0 for values. A router is of values always."""
    packed = [getattr(slot.weight, "value", None) for name, slot in model.slots() if ".mlp.gate." not in name]
    parts = [part for value in packed if isinstance(value, ops.PackedWeight) for part in value.parts()]
    return {part.format.number if part.format else 0 for part in parts}


def run(model: CausalLM, chunks: tuple[int, ...] = CHUNKS, native: bool = True) -> Tensor:
    return torch.cat(Paged(model, torch.bfloat16, native=native).run(sequences(), chunks))


def sizes(kind: GGMLQuantizationType) -> dict[str, int]:
    """Of a tiny model all of whose matrices are made of whole blocks."""
    return WIDE if ops.BLOCK_FORMATS[kind].block_inputs == 256 else {}


BF16_ERROR = 0.05
"""What the logits of tiny models, which vary by 1.5, may be off in bf16 by: 0.02 to 0.04 with weights of values."""


def error(logits: Tensor, exact: Tensor) -> float:
    return (logits - exact).pow(2).mean().sqrt().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        # to all experts, as rounding would decide between two that score about alike
        ("qwen3_moe", {"num_experts_per_tok": 8}),
    ],
)
def test_a_file_is_served_in_its_blocks(
    kind: GGMLQuantizationType, family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Rows of q and k in llama's files are permuted; a tied head is the embedding."""
    make_tiny(tmp_path, family, **sizes(kind), **overrides)
    file = without_tokenizer(write_gguf(tmp_path, tmp_path / "tiny.gguf", kind))
    exact = torch.cat(Paged(load(file)).run(sequences(), CHUNKS))
    assert formats(load(file)) == {0}, "a float32 model dequantizes"
    model = load(file, torch.bfloat16)
    assert formats(model) == {kind}
    for natively in (True, False):
        assert error(run(model, native=natively), exact) < BF16_ERROR


def test_a_merged_weight_of_two_formats_is_dequantized(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    kinds = {"v_proj.weight": GGMLQuantizationType.Q8_0, "down_proj.weight": GGMLQuantizationType.F16}
    mixed = write_gguf(tmp_path, tmp_path / "mixed.gguf", GGMLQuantizationType.Q4_0, exceptions=kinds)
    file = without_tokenizer(mixed)
    model = load(file, torch.bfloat16)
    named = {name: slot.weight for name, slot in model.slots()}
    kept: dict[str, Any] = {
        name: named[f"model.layers.0.{name}.weight"]
        for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert {name: weight.value.format is not None for name, weight in kept.items()} == {
        "self_attn.q_proj": False,
        "self_attn.v_proj": False,
        "self_attn.o_proj": True,
        "mlp.up_proj": True,
        "mlp.down_proj": False,
    }
    assert error(run(model), torch.cat(Paged(load(file)).run(sequences(), CHUNKS))) < BF16_ERROR


def k_file(directory: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
    """A tiny model as llama.cpp's Q4_K_M would have it: of Q4_K, but for the values, some of down and the head."""
    make_tiny(directory, "llama", seed=seed, **(WIDE | overrides))
    names = ("v_proj.weight", "1.mlp.down_proj.weight", "embed_tokens.weight", "lm_head.weight")
    exceptions = dict.fromkeys(names, GGMLQuantizationType.Q6_K)
    file = write_gguf(directory, directory / "tiny.gguf", GGMLQuantizationType.Q4_K, exceptions=exceptions)
    return without_tokenizer(file)


def test_a_merged_weight_keeps_two_formats_that_begin_at_panels(tmp_path: Path) -> None:
    """256 rows of queries and 128 of keys in one, 128 of values in another; the embedding is the head's."""
    file = k_file(tmp_path, tie_word_embeddings=True)
    model, exact = load(file, torch.bfloat16), load(file)
    assert formats(model) == {GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K}
    name = "model.layers.0.self_attn.q_proj.weight"
    merged, values = (dict(of.slots())[name].weight.value for of in (model, exact))
    assert [part.format.number for part in merged.parts()] == [
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q6_K,
    ]
    assert torch.equal(merged.unpack(), values.unpack().bfloat16())
    assert merged.block_bytes == 384 * 144 + 128 * 210
    expected = torch.cat(Paged(exact).run(sequences(), CHUNKS))
    for natively in (True, False):
        assert error(run(model, native=natively), expected) < BF16_ERROR


def logits_of_rank(topology: Topology, file: Checkpoint) -> tuple[set[int], np.ndarray]:
    model = build_model(file.config, torch.bfloat16, torch.device("cpu"), topology=topology)
    load_weights(model, file, ignore_progress, topology)
    return formats(model), torch.cat(Paged(model, torch.bfloat16).run(sequences(), CHUNKS)).numpy()


def test_ranks_keep_the_blocks_that_they_hold_whole(tmp_path: Path) -> None:
    """96 inputs of the down projection are 48 a rank, which cuts a block; its other weights stay in blocks."""
    make_tiny(tmp_path, "llama")
    file = without_tokenizer(write_gguf(tmp_path, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1))
    exact = torch.cat(Paged(load(file)).run(sequences(), CHUNKS))
    for kept, logits in run_ranks(2, 1, tmp_path / "rendezvous", logits_of_rank, file):
        assert kept == {0, GGMLQuantizationType.Q4_1}
        assert error(torch.from_numpy(logits), exact) < BF16_ERROR


def test_ranks_keep_blocks_of_256_that_they_hold_whole(tmp_path: Path) -> None:
    """Two ranks have 256 of down's 512 inputs each, and half a block of what attention gives out."""
    file = k_file(tmp_path, intermediate_size=512)
    exact = torch.cat(Paged(load(file)).run(sequences(), CHUNKS))
    for kept, logits in run_ranks(2, 1, tmp_path / "rendezvous", logits_of_rank, file):
        assert kept == {0, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K}
        assert error(torch.from_numpy(logits), exact) < BF16_ERROR


def matrices(model: CausalLM) -> dict[str, np.ndarray]:
    """The rounded values of each linear weight."""
    values: dict[str, Any] = {name: getattr(slot.weight, "value", None) for name, slot in model.slots()}
    return {name: v.unpack().float().numpy() for name, v in values.items() if isinstance(v, ops.PackedWeight)}


def matrices_of_rank(topology: Topology, file: Checkpoint) -> tuple[set[int], dict[str, np.ndarray]]:
    model = build_model(file.config, torch.bfloat16, torch.device("cpu"), topology=topology)
    load_weights(model, file, ignore_progress, topology)
    return formats(model), matrices(model)


def test_stages_keep_the_blocks(tmp_path: Path) -> None:
    file = k_file(tmp_path)
    whole = matrices(load(file, torch.bfloat16))
    stages = run_ranks(1, 2, tmp_path / "rendezvous", matrices_of_rank, file)
    assert [0 in kept for kept, _ in stages] == [False, False]
    assert set().union(*(own for _, own in stages)) == set(whole)
    for _, own in stages:
        for name, values in own.items():
            assert np.array_equal(values, whole[name]), name


# ---- swaps ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def versions(tmp_path: Path) -> dict[str, Checkpoint]:
    """Versions of one model that differ in their weights and in how a file holds them."""
    made = {}
    for seed, kind in enumerate(("BF16", "Q4_1", "Q8_0")):
        make_tiny(tmp_path / kind, "llama", seed=seed)
        file = write_gguf(tmp_path / kind, tmp_path / f"{kind}.gguf", GGMLQuantizationType[kind])
        made[kind] = without_tokenizer(file)
    make_tiny(tmp_path / "other", "llama", seed=9)
    made["other Q4_1"] = without_tokenizer(
        write_gguf(tmp_path / "other", tmp_path / "other.gguf", GGMLQuantizationType.Q4_1)
    )
    return made


@pytest.mark.parametrize("names", [("Q4_1", "BF16"), ("BF16", "Q8_0"), ("Q4_1", "Q8_0"), ("Q4_1", "other Q4_1")])
def test_a_swap_across_formats_and_back(names: tuple[str, str], versions: dict[str, Checkpoint]) -> None:
    """The compiled kernels were made before it and see it; a second commit brings the old weights back."""
    first, second = (versions[name] for name in names)
    model = load(first, torch.bfloat16)
    fresh = load(second, torch.bfloat16)
    paged = [Paged(model, torch.bfloat16, native=True) for _ in range(4)]
    old, new = run(model), run(fresh)
    sizes = weight_bytes(model), weight_bytes(fresh)
    assert not torch.equal(old, new)

    def logits() -> Tensor:
        return torch.cat(paged.pop().run(sequences(), CHUNKS))

    stage_weights(model, second, ignore_progress)
    assert torch.equal(logits(), old), "staging must not touch what serves"
    commit_weights(model)
    assert torch.equal(logits(), new)
    assert (formats(model), weight_bytes(model)) == (formats(fresh), sizes[1])
    commit_weights(model)
    assert torch.equal(logits(), old), "a second commit rolls back"
    commit_weights(model)
    discard_weights(model)
    stage_weights(model, first, ignore_progress)
    commit_weights(model)
    assert torch.equal(logits(), old)
    assert weight_bytes(model) == sizes[0]


def test_a_swap_of_weights_in_two_formats_and_back(tmp_path: Path) -> None:
    """To others like them, and to values: the kernels see it through the descriptor that they know."""
    make_tiny(tmp_path / "values", "llama", seed=3, **WIDE)
    values = without_tokenizer(write_gguf(tmp_path / "values", tmp_path / "values.gguf", GGMLQuantizationType.BF16))
    first, *others = k_file(tmp_path / "1", 1), k_file(tmp_path / "2", 2), values
    model = load(first, torch.bfloat16)
    old, size = run(model), weight_bytes(model)
    served = [Paged(model, torch.bfloat16, native=True) for _ in range(2 * len(others))]
    for other in others:
        fresh = load(other, torch.bfloat16)
        stage_weights(model, other, ignore_progress)
        commit_weights(model)
        assert torch.equal(torch.cat(served.pop().run(sequences(), CHUNKS)), run(fresh))
        assert (formats(model), weight_bytes(model)) == (formats(fresh), weight_bytes(fresh))
        commit_weights(model)
        discard_weights(model)
        assert torch.equal(torch.cat(served.pop().run(sequences(), CHUNKS)), old)
        assert weight_bytes(model) == size


def test_experts_are_swapped_across_formats_and_back(tmp_path: Path) -> None:
    files = []
    for seed, kind in enumerate(("Q4_0", "BF16")):
        make_tiny(tmp_path / kind, "qwen3_moe", seed=seed)
        made = write_gguf(tmp_path / kind, tmp_path / f"{kind}.gguf", GGMLQuantizationType[kind])
        files.append(without_tokenizer(made))
    model = load(files[0], torch.bfloat16)
    old, new = run(model), run(load(files[1], torch.bfloat16))
    assert not torch.equal(old, new)
    served = [Paged(model, torch.bfloat16, native=True) for _ in range(2)]
    stage_weights(model, files[1], ignore_progress)
    commit_weights(model)
    assert torch.equal(torch.cat(served[0].run(sequences(), CHUNKS)), new)
    commit_weights(model)
    assert torch.equal(torch.cat(served[1].run(sequences(), CHUNKS)), old)


def test_blocks_are_a_third_of_values(versions: dict[str, Checkpoint]) -> None:
    """Q4_1 takes 5 bits a weight, bf16 16; the embedding is read row by row and stays bf16 where no head shares it."""
    matrices = sum(
        weight.shape[0] * weight.shape[1] for weight in weights_of(load(versions["BF16"])) if len(weight.shape) == 2
    )
    embedding = 1000 * 64
    difference = weight_bytes(load(versions["BF16"], torch.bfloat16)) - weight_bytes(
        load(versions["Q4_1"], torch.bfloat16)
    )
    assert difference == (matrices - embedding) * (16 - 5) / 8


@pytest.mark.parametrize(("kind", "half"), [("Q4_K", 2), ("Q6_K", 208)])
def test_blocks_of_256_that_are_not_finite_are_refused(kind: str, half: int, tmp_path: Path) -> None:
    """Whatever is in a scale or a unit of least values; the other bytes of a block may be anything."""
    format = ops.BLOCK_FORMATS[GGMLQuantizationType[kind]]
    data = torch.zeros(2, 3 * format.block_bytes, dtype=torch.uint8) + 255
    data.view(-1, format.block_bytes)[:, format.halves] = 0
    assert ops.Blocks(data, format).finite()
    data[1, format.block_bytes + half + 1] = 0x7C  # the high byte of an infinity
    assert not ops.Blocks(data, format).finite()


def test_blocks_that_are_not_finite_are_refused(versions: dict[str, Checkpoint]) -> None:
    model = load(versions["BF16"], torch.bfloat16)
    reader = gguf.GGUFReader(versions["Q4_1"].path, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.2.ffn_up.weight")
    tensor.data[5, 22:24] = np.array([np.inf], dtype=np.float16).view(np.uint8)  # the second block's least value
    reader.data.flush()
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.up_proj\.weight' has values that are not finite"):
        stage_weights(model, versions["Q4_1"], ignore_progress)


# ---- the default model ----------------------------------------------------------------------------------------------


def test_default_model_is_nearer_to_exact_in_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a token's logits are from those in float32, in steps of twelve tokens: further with rounded weights.

    By 17% here in the geometric mean over tokens, which a few with large activations do not decide.
    """
    checkpoint = resolve(default_model())
    tokenizer = Tokenizer.from_file(f"{checkpoint.tokenizer_dir}/tokenizer.json")
    ids = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text()).ids
    texts = [ids[start : start + 24] for start in range(1000, 1000 + 12 * 24, 24)]

    def logits(dtype: torch.dtype, kept: set[int]) -> Tensor:
        model = load(checkpoint, dtype)
        assert formats(model) == kept
        return torch.cat(Paged(model, dtype, len(texts), native=True).run(texts, (1,) * 24))

    exact = logits(torch.float32, {0})
    in_blocks = logits(torch.bfloat16, {GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0}) - exact
    monkeypatch.setattr("llmserve.runtime.layers.weight.takes_blocks", lambda *weight: False)
    rounded = logits(torch.bfloat16, {0}) - exact
    ratio = (in_blocks.norm(dim=-1) / rounded.norm(dim=-1)).log().mean().exp()
    assert ratio < 0.93
