"""Tensor and pipeline parallelism: the ranks together compute what one rank computes."""

import multiprocessing
import traceback
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from paged import Paged, load
from test_models import CHUNKS, sequences
from torch import Tensor

from checkpoints import make_tiny
from llmserve.runtime.attention.base import ForwardBatch
from llmserve.runtime.distributed.collectives import least
from llmserve.runtime.distributed.groups import Group, Topology, init_topology, make_store
from llmserve.runtime.distributed.pipeline import Pipe, stage_layers
from llmserve.runtime.engine.batch import PlanRow, SampleSpec, StepPlan
from llmserve.runtime.engine.leader import without_masks
from llmserve.runtime.engine.weights import load_weights, weight_bytes
from llmserve.runtime.layers.embedding import split_vocab
from llmserve.runtime.layers.linear import split_heads, split_rows
from llmserve.runtime.messages import SamplingParams
from llmserve.runtime.models.hub import resolve
from llmserve.runtime.models.registry import build_model
from llmserve.runtime.ops import native


class Split(NamedTuple):
    tp: int = 1
    pp: int = 1
    nodes: int = 1


class Staged(Paged):
    """One rank of a model that is split into stages."""

    pipe: Pipe

    def compute(self, batch: ForwardBatch) -> Tensor:
        """Logits from the last stage; from an earlier one the hidden states that it sends on."""
        hidden = None if self.pipe.first else self.pipe.receive(batch.num_tokens)
        out = self.model.forward(batch.input_ids, batch.positions, self.attention, hidden)
        if self.pipe.last:
            return self.model.logits(out)
        self.pipe.send(out)
        return out


def run_rank(
    rank: int, split: Split, native_too: bool, rendezvous: str, directory: str, results: "SimpleQueue[Any]"
) -> None:
    try:
        torch.set_num_threads(1)
        store = make_store(rendezvous, rank, split.tp * split.pp)
        topology = init_topology(rank, split.tp, split.pp, store, "cpu", timeout_s=20, nodes=split.nodes)
        checkpoint = resolve(directory)
        model = build_model(checkpoint.config, torch.float32, torch.device("cpu"), topology=topology)
        load_weights(model, checkpoint, lambda done, total: None, topology)
        logits, counts = [], []
        for is_native in (False, True) if native_too else (False,):
            before = topology.counts.snapshot()
            ranked = Staged(model, native=is_native)
            ranked.pipe = Pipe(topology, checkpoint.config.hidden_size, torch.float32, torch.device("cpu"))
            logits.append(torch.cat(ranked.run(sequences(998), CHUNKS)).numpy())
            counts.append(growth(before, topology.counts.snapshot()))
        assert all(count == counts[0] for count in counts), f"counted in the same way: {counts}"
        least(0, topology.weights, torch.device("cpu"))  # a stage that ends early takes along what it still sends
        results.put((rank, weight_bytes(model), logits))
    except Exception:
        results.put((rank, 0, traceback.format_exc()))


def growth(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    nothing = {"calls": 0, "bytes": 0}
    return {name: {key: after[name][key] - before.get(name, nothing)[key] for key in nothing} for name in after}


def run_ranks(split: Split, native_too: bool, directory: Path, rendezvous: Path) -> list[tuple[int, Any]]:
    """(weight bytes, logits of each run) of each rank; a stage that is not the last has hidden states for logits."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    arguments = (split, native_too, f"file://{rendezvous}", str(directory), results)
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(split.tp * split.pp)]
    for process in ranks:
        process.start()
    try:
        found = sorted((results.get() for _ in ranks), key=lambda one: one[0])
        for rank, _, value in found:
            assert not isinstance(value, str), f"rank {rank}: {value}"
        return [(size, value) for _, size, value in found]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("family", "split", "overrides"),
    [
        ("llama", Split(tp=2, pp=2), {"attention_bias": True, "mlp_bias": True}),
        ("llama", Split(tp=2, pp=2, nodes=4), {}),  # over gloo, as all that share no memory
        ("gemma3_text", Split(tp=2, pp=2), {"num_key_value_heads": 1}),  # fewer KV heads than ranks; a tied head
        ("qwen3", Split(tp=4), {"vocab_size": 998}),  # each KV head on two ranks; a vocabulary that does not divide
        ("phi3", Split(tp=2), {}),
        ("granite", Split(tp=2), {}),  # multipliers
        ("smollm3", Split(pp=3), {}),
        ("qwen3_moe", Split(tp=2, pp=2), {"moe_intermediate_size": 128}),  # a rank has a panel of each expert's gate
        ("qwen3_moe", Split(tp=2), {}),  # half a panel
        ("qwen3_moe", Split(tp=2), {"decoder_sparse_step": 2}),  # layers without experts
        ("mixtral", Split(tp=2, nodes=2), {}),
    ],
)
def test_ranks_compute_what_one_computes(family: str, split: Split, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Layer by layer, and where there are kernels and shared memory in native steps too."""
    make_tiny(tmp_path / "model", family, **overrides)
    single = load(tmp_path / "model")
    expected = torch.cat(Paged(single).run(sequences(998), CHUNKS))
    native_too = native.library() is not None and split.nodes == 1
    ranks = run_ranks(split, native_too, tmp_path / "model", tmp_path / "rendezvous")
    for _, runs in ranks[-split.tp :]:
        assert len(runs) == 1 + native_too
        for logits in runs:
            torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=0)
    config = single.config
    tied_twice = config.vocab_size * config.hidden_size * 4 if config.tie_word_embeddings and split.pp > 1 else 0
    once = weight_bytes(single) + tied_twice  # the first and the last stage both have a tied embedding
    assert once <= sum(size for size, _ in ranks) < 1.15 * once, "only norms and shared KV heads are there twice"


def test_ranks_that_do_not_draw_get_no_masks() -> None:
    specs = [SampleSpec(params=SamplingParams(), seed=1, position=2, mask=mask) for mask in (b"\x01", b"")]
    rows = [PlanRow(token_ids=b"1234", start=0, pages=b"", sample=spec) for spec in (*specs, None)]
    lean = without_masks(StepPlan(rows=tuple(rows)))
    assert [row.sample for row in lean.rows] == [specs[1], specs[1], None]
    assert [row.token_ids for row in lean.rows] == [b"1234"] * 3


def test_rows_of_a_rank() -> None:
    third = Group(rank=2, size=4)
    assert split_rows(96, third).slice == slice(48, 72)
    assert split_heads(8, 16, third).slice == slice(64, 96)
    assert split_heads(2, 16, third).slice == slice(16, 32), "ranks 2 and 3 share the second head"
    assert split_vocab(998, third).slice == slice(500, 750)
    assert split_vocab(998, Group(3, 4)).slice == slice(750, 998)
    with pytest.raises(ValueError, match="3 heads cannot be split over 4 ranks"):
        split_heads(3, 16, third)
    with pytest.raises(ValueError, match="98 rows cannot be split over 4 ranks"):
        split_rows(98, third)


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (3, 3), (7, 2), (5, 4), (30, 1)])
def test_stages_share_the_layers(layers: int, stages: int) -> None:
    ranges = [stage_layers(layers, rank, stages) for rank in range(stages)]
    assert [layer for stage in ranges for layer in stage] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert len(ranges[-1]) == min(map(len, ranges)), "the last stage computes logits besides"


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = resolve(str(make_tiny(tmp_path, "llama"))).config
    with pytest.raises(ValueError, match="cannot be split over 3 ranks"):
        build_model(config, torch.float32, torch.device("cpu"), topology=Topology(tp=Group(0, 3)))
