"""Weights: what does not fit is named, what is dangerous is refused; a swap is exact, in place and can be undone."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Paged, load
from safetensors.torch import load_file, save_file
from test_models import CHUNKS, sequences
from torch import Tensor

from checkpoints import make_tiny
from llmserve.runtime.config import ConfigError
from llmserve.runtime.engine.checkpoint import shard_paths
from llmserve.runtime.engine.weights import (
    SwapCancelled,
    commit_weights,
    discard_weights,
    load_weights,
    preflight,
    stage_weights,
    weight_bytes,
    weights_of,
)
from llmserve.runtime.models.hub import Checkpoint, resolve
from llmserve.runtime.models.registry import CausalLM, build_model
from llmserve.runtime.ops import native


def edit(directory: Path, change: Any) -> None:
    """Rewrites the tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def logits(model: CausalLM) -> Tensor:
    return torch.cat(Paged(model).run(sequences(), CHUNKS))


def ignore_progress(done: int, total: int) -> None:
    pass


# ---- loading --------------------------------------------------------------------------------------------------------


def test_progress_ends_at_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = resolve(str(make_tiny(tmp_path, "qwen3")))
    model = build_model(checkpoint.config, torch.float32, torch.device("cpu"))
    seen: list[tuple[int, int]] = []
    load_weights(model, checkpoint, lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_weight_bytes_counts_a_tied_head_once(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path, "qwen2", tie_word_embeddings=True))
    tensors = load_file(tmp_path / "model.safetensors")
    assert weight_bytes(model) == sum(tensor.nbytes for tensor in tensors.values())


def test_a_tied_model_ignores_the_head_of_its_checkpoint(tmp_path: Path) -> None:
    """Some checkpoints hold the tied tensor twice; transformers takes the embedding."""
    make_tiny(tmp_path, "llama", tie_word_embeddings=True)
    expected = logits(load(tmp_path))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(1000, 64)}))
    assert torch.equal(logits(load(tmp_path)), expected)


def test_frequencies_in_an_old_checkpoint_are_not_read(tmp_path: Path) -> None:
    """Llama checkpoints of 2023 hold them for each layer; they follow from the config."""
    make_tiny(tmp_path, "llama")
    expected = logits(load(tmp_path))
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(load(tmp_path)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "layers.1.self_attn.k_proj.weight: missing"),
        (lambda t: t.update({"model.layers.9.mlp.x": torch.ones(2)}), "layers.9.mlp.x: the model has no such tensor"),
        (lambda t: t.update({"lm_head.weight": torch.ones(999, 64)}), r"shape \[999, 64\], the model has \[1000, 64\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "dtype I8 is not supported"),
    ],
    ids=["missing", "left over", "shape", "dtype"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    edit(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_corrupt_file_is_a_clear_error(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


# ---- files that reach out -------------------------------------------------------------------------------------------


def index(directory: Path, file: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))


def test_other_layouts_of_the_same_weights_are_not_read(tmp_path: Path) -> None:
    """mistralai's repositories have consolidated.safetensors beside model.safetensors."""
    make_tiny(tmp_path, "mistral")
    save_file({"tok_embeddings.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert shard_paths(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "pytorch_model.bin", "..", "", None, 7]
)
def test_an_index_names_only_safetensors_beside_it(name: object, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "inner", "llama")
    make_tiny(tmp_path, "llama")
    index(directory, name)
    with pytest.raises(ConfigError, match="is no file of safetensors in"):
        shard_paths(directory)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="it has no model-00002-of-00002"):
        shard_paths(tmp_path)


def test_a_damaged_index_is_a_clear_error(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", shards=2)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no shard index"):
        shard_paths(tmp_path)


def test_a_link_may_not_leave_the_directory(tmp_path: Path) -> None:
    make_tiny(tmp_path / "elsewhere", "llama")
    make_tiny(tmp_path / "model", "llama")
    file = tmp_path / "model/model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere/model.safetensors")
    with pytest.raises(ConfigError, match="a link that leaves"):
        shard_paths(tmp_path / "model")


def test_the_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """snapshots/REVISION/FILE is a link to blobs/DIGEST of the same repository there."""
    snapshot = make_tiny(tmp_path / "models--org--name/snapshots/abc", "llama")
    blobs = tmp_path / "models--org--name/blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert shard_paths(snapshot) == [snapshot / "model.safetensors"]


def test_pickles_are_never_read(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickles, which can run code"):
        resolve(str(tmp_path))


def test_a_pickle_by_another_name_is_not_run(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps({"lm_head.weight": 1}))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


# ---- swaps ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints of one model with different weights, the second in shards."""
    first = make_tiny(tmp_path / "first", "gemma3_text", seed=1)
    second = make_tiny(tmp_path / "second", "gemma3_text", seed=2, shards=2)
    return resolve(str(first)), resolve(str(second))


def addresses(model: CausalLM) -> list[int]:
    values: list[Any] = [weight.value for weight in weights_of(model)]  # type: ignore[attr-defined]
    return [(value if isinstance(value, Tensor) else value.data).data_ptr() for value in values]


def test_a_swap_is_exact_in_place_and_can_be_undone(versions: tuple[Checkpoint, Checkpoint]) -> None:
    first, second = versions
    model = load(first)
    old, new, before = logits(model), logits(load(second)), addresses(model)
    assert not torch.allclose(old, new, atol=0.1)
    assert preflight(model, first, second) == []

    assert stage_weights(model, second, ignore_progress) == weight_bytes(model)
    assert torch.equal(logits(model), old), "staging must not touch what serves"
    commit_weights(model)
    assert torch.equal(logits(model), new)
    commit_weights(model)
    assert torch.equal(logits(model), old), "a second commit rolls back"
    assert addresses(model) == before


@pytest.mark.skipif(native.library() is None, reason="no compiler, or a CPU without AVX-512")
def test_the_compiled_kernels_see_a_swap(versions: tuple[Checkpoint, Checkpoint]) -> None:
    """They hold addresses from before the swap."""
    first, second = versions
    model = load(first)
    before, after = (Paged(model, native=True) for _ in range(2))
    torch.testing.assert_close(torch.cat(before.run(sequences(), CHUNKS)), logits(model), atol=1e-4, rtol=0)
    stage_weights(model, second, ignore_progress)
    commit_weights(model)
    torch.testing.assert_close(torch.cat(after.run(sequences(), CHUNKS)), logits(load(second)), atol=1e-4, rtol=0)


def test_a_discarded_version_leaves_nothing(versions: tuple[Checkpoint, Checkpoint]) -> None:
    first, second = versions
    model = load(first)
    stage_weights(model, second, ignore_progress)
    discard_weights(model)
    with pytest.raises(RuntimeError, match="before it was staged"):
        commit_weights(model)


def test_weights_that_are_not_finite_are_refused(versions: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    first, _ = versions
    model = load(first)
    old = logits(model)
    poisoned = make_tiny(tmp_path / "poisoned", "gemma3_text", seed=2)
    edit(poisoned, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"][3].fill_(float("nan")))
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.up_proj\.weight' has values that are not finite"):
        stage_weights(model, resolve(str(poisoned)), ignore_progress)
    with pytest.raises(RuntimeError, match="before it was staged"):
        commit_weights(model)
    assert torch.equal(logits(model), old)


def test_a_staging_can_be_cancelled(versions: tuple[Checkpoint, Checkpoint]) -> None:
    first, second = versions
    model = load(first)
    calls: list[int] = []

    def cancelled() -> bool:
        calls.append(1)
        return len(calls) == 3

    with pytest.raises(SwapCancelled):
        stage_weights(model, second, ignore_progress, cancelled)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("overrides", "difference"),
    [
        ({"intermediate_size": 128}, "intermediate_size is 128, the model has 96"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight: the model has no such tensor"),
        ({"rope_theta": 500.0}, "config: layers is"),
        ({"query_pre_attn_scalar": 30}, "attention_scale"),
        ({"eos_token_id": 5}, "eos_token_ids is (5,), the model has (2,)"),
    ],
    ids=["shape", "depth", "rope", "scale", "eos"],
)
def test_another_model_is_named_as_such(
    overrides: dict[str, Any], difference: str, versions: tuple[Checkpoint, Checkpoint], tmp_path: Path
) -> None:
    """What has the same shapes but means something else is refused too."""
    first, _ = versions
    other = resolve(str(make_tiny(tmp_path / "other", "gemma3_text", **overrides)))
    differences = preflight(load(first), first, other)
    assert any(difference in text for text in differences)


def test_another_tokenizer_is_named_as_such(versions: tuple[Checkpoint, Checkpoint]) -> None:
    first, second = versions
    file = Path(second.path) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text())))  # the same in another layout
    model = load(first)
    assert preflight(model, first, second) == []
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["a"], tokenizer["model"]["vocab"]["b"] = (
        tokenizer["model"]["vocab"]["b"],
        tokenizer["model"]["vocab"]["a"],
    )
    file.write_text(json.dumps(tokenizer))
    assert preflight(model, first, second) == ["the tokenizer is another one"]
