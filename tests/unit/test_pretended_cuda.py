"""The way through the engine on CUDA devices, as far as it can be gone without one (pretended_cuda.py)."""

import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_ranks
from gguf import GGMLQuantizationType
from pretended_cuda import OnDevice, pretended_cuda
from test_transformers_backend import make as make_any
from tiny_gguf import write_gguf
from torch import Tensor, distributed

from checkpoints import VOCAB_SIZE, make_tiny
from instances import wait_until
from llmserve.runtime.child import ChildInit, Reporter
from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.distributed import collectives, groups
from llmserve.runtime.distributed.groups import Topology, init_topology
from llmserve.runtime.engine import memory
from llmserve.runtime.engine.batch import PlanRow, SampleSpec, StepPlan, Worker, WorkerDied, int32_bytes
from llmserve.runtime.engine.leader import Leader
from llmserve.runtime.engine.ranks import follow
from llmserve.runtime.engine.runner import choose_device, create_rank, create_worker, warm_up
from llmserve.runtime.engine.weights import weights_of
from llmserve.runtime.engine.worker import TpModelWorker
from llmserve.runtime.messages import SamplingParams
from llmserve.runtime.models.hub import resolve
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.scheduler import process

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(
        temperature=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((3, 2.0),),
    ),
)


def no_progress(*what: object) -> None:
    pass


def arguments(model: Path, **options: Any) -> ServerArgs:
    return ServerArgs(model=str(model), max_total_tokens=2048, threads=1, **options)


def specs(position: int) -> list[SampleSpec]:
    """All that a sampler does."""
    mask = np.packbits(np.arange(VOCAB_SIZE) % 7 > 0, bitorder="little").tobytes()
    more: list[dict[str, Any]] = [{"top_logprobs": 3}, {"top_logprobs": 2}, {}]
    more[2] = {"forbidden": (5, 6), "history": int32_bytes([1, 2, 3, 4, 9]), "prompt_len": 3, "mask": mask}
    return [
        SampleSpec(params=params, seed=1, position=position, **fields)
        for params, fields in zip(PARAMS, more, strict=True)
    ]


def answers(worker: Worker) -> tuple[list[int | None], np.ndarray]:
    """Tokens of a prefill in two chunks over two pages and of a decode, and a pooled vector."""
    ids = np.random.default_rng(0).integers(3, VOCAB_SIZE, 300)
    found = []
    for start, end in ((0, 200), (200, 299), (299, 300)):
        chunk = int32_bytes(ids[start:end])
        rows = [
            PlanRow(token_ids=chunk, start=start, pages=int32_bytes([2 * i, 2 * i + 1]), sample=spec, prompt_logprobs=1)
            for i, spec in enumerate(specs(end))
        ]
        rows.append(PlanRow(token_ids=int32_bytes(ids[:20]), start=0, pages=int32_bytes([7]), pool="mean"))
        found += worker.submit(StepPlan(rows=tuple(rows))).result().rows
    return [row.token_id for row in found], np.frombuffer(found[-1].hidden, dtype="<f4")


def attention_of(worker: TpModelWorker) -> str:
    return type(worker._attention).__name__


@pytest.mark.parametrize(
    ("family", "options", "backend"),
    [
        ("llama", {"dtype": "bfloat16"}, "VarlenAttention"),
        ("gemma3_text", {"dtype": "float16"}, "VarlenAttention"),  # with a sliding window
        ("gemma2", {"dtype": "float32"}, "ReferenceAttention"),  # with a softcap
        ("qwen3", {"dtype": "float32"}, "ReferenceAttention"),
        ("qwen3_moe", {"dtype": "float32"}, "ReferenceAttention"),
        ("qwen3_moe", {"dtype": "bfloat16"}, "VarlenAttention"),
    ],
)
def test_cuda_says_what_the_cpu_says(
    family: str, options: dict[str, Any], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tokens go to all experts: rounding would decide between two that score about alike
    overrides = {"num_experts_per_tok": 8} if family == "qwen3_moe" else {}
    checkpoint = resolve(str(make_tiny(tmp_path / "model", family, **overrides)))
    tokens, vector = answers(
        create_worker(arguments(tmp_path, page_size=256, **options, device="cpu"), checkpoint, no_progress)
    )
    with pretended_cuda(monkeypatch):
        worker = create_worker(arguments(tmp_path, **options, device="cuda"), checkpoint, no_progress)
        assert attention_of(worker) == backend
        assert worker.info.page_size == 256
        found, own_vector = answers(worker)
    if options["dtype"] == "float32":
        assert found == tokens
    else:
        same = sum(a == b for a, b in zip(found, tokens, strict=True))
        assert same >= len(tokens) - 3, "of a thousand nearly equal logits rounding may choose another"
    np.testing.assert_allclose(own_vector, vector, rtol=0.05, atol=0.3)


@pytest.mark.parametrize("kind", ["gguf", "transformers"])
def test_other_checkpoints(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a file become numbers; transformers' modules are made on the device."""
    if kind == "gguf":
        make_tiny(tmp_path / "model")
        path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    else:
        path = make_any(tmp_path / "model", "gpt_neox", num_key_value_heads=4, vocab_size=VOCAB_SIZE)
    checkpoint = resolve(str(path))
    args = arguments(tmp_path, dtype="float32", page_size=256, device="cpu")
    expected = answers(create_worker(args, checkpoint, no_progress))[0]
    with pretended_cuda(monkeypatch):
        worker = create_worker(arguments(tmp_path, dtype="float32", device="cuda"), checkpoint, no_progress)
        assert answers(worker)[0] == expected
        worker.swap.stage(checkpoint, no_progress, lambda: False)
        worker.swap.commit()
        assert answers(worker)[0] == expected


def test_new_weights_wait_in_the_memory_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's memory is full of KV pages, and its stream is the serving thread's."""
    old, new = (resolve(str(make_tiny(tmp_path / name, seed=seed))) for name, seed in (("old", 0), ("new", 1)))
    args = arguments(tmp_path, dtype="float32", device="cuda")
    with pretended_cuda(monkeypatch):
        expected = answers(create_worker(args, new, no_progress))[0]
        worker = create_worker(args, old, no_progress)
        before = answers(worker)[0]
        staging = threading.Thread(target=worker.swap.stage, args=(new, no_progress, lambda: False))
        staging.start()  # a thread that can take no memory of a device
        staging.join()
        staged = [weight._staged for weight in weights_of(worker.model)]
        assert all(isinstance(values, Tensor) and not isinstance(values, OnDevice) for values in staged)
        assert answers(worker)[0] == before
        worker.swap.commit()
        assert answers(worker)[0] == expected
    assert expected != before


def test_each_replica_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(model="m", dp_size=2)
    with pretended_cuda(monkeypatch, devices=2) as current:
        assert [choose_device(args, index).index for index in (0, 1)] == [0, 1]
        assert [device.index for device in current] == [0, 1]
    with (
        pretended_cuda(monkeypatch, devices=1),
        pytest.raises(ConfigError, match="2 ranks on this node need a CUDA device each and there are 1"),
    ):
        choose_device(args, 0)


def test_a_replica_takes_its_own_and_says_when_it_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def create(args: ServerArgs, checkpoint: object, progress: object, index: int) -> None:
        seen.append(choose_device(args, index))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(process, "create_worker", create)
    ports, args = PortArgs.init_new(tmp_path), ServerArgs(model="m", dp_size=2)
    checkpoint = resolve(str(make_tiny(tmp_path)))
    init = ChildInit(role="", args=args, ports=ports, directory="", checkpoint=checkpoint, dp_rank=1)
    with (
        pretended_cuda(monkeypatch, devices=2),
        pytest.raises(ConfigError, match=r"memory of GPU 1 \(.*2 GiB\): split"),
    ):
        process.run(init, Reporter(BytesIO()))
    assert seen == [torch.device("cuda", 1)]


@pytest.mark.parametrize(("free", "usable"), [(100 << 30, 85 << 30), (2 << 30, 1 << 30), (1 << 29, 0)])
def test_a_pool_leaves_room_for_activations(free: int, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = memory.PageGeometry(32, 8, 128, 256, torch.bfloat16, torch.device("cuda", 0))
    bytes_per_token = 2 * 32 * 8 * 128 * 2
    args = ServerArgs(model="m")
    with pretended_cuda(monkeypatch, free_bytes=free):
        if usable:
            assert memory.pool_tokens(args, 1 << 20, geometry) == usable // bytes_per_token
        else:
            with pytest.raises(ConfigError, match="a KV pool of 0 tokens"):
                memory.pool_tokens(args, 1 << 20, geometry)


def test_a_device_that_fails_ends_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later step can succeed on it. A step that lacks memory fails alone."""
    worker = create_worker(arguments(tmp_path), resolve(str(make_tiny(tmp_path / "model"))), no_progress)
    plan = StepPlan(rows=(PlanRow(token_ids=int32_bytes([1]), start=0, pages=int32_bytes([0])),))
    for error, raised in (
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with"), WorkerDied),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError),
    ):

        def fail(*arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(worker.model, "forward", fail)
        with pytest.raises(raised, match=r"CUDA (error: an illegal memory access was encountered\)|out of memory)"):
            worker.submit(plan).result()


def serve_on_devices(topology: Topology, args: ServerArgs, new: Path) -> Any:
    """What ranks on pretended devices say before, during and after a swap, and what they say of themselves."""
    monkeypatch, call = pytest.MonkeyPatch(), collectives._call
    of_devices, serving = {id(topology.tp), id(topology.pp), id(topology.weights)}, threading.current_thread()

    def checked(group: groups.Group, operation: str, *rest: Any, **options: Any) -> Any:
        assert id(group) not in of_devices or threading.current_thread() is serving, f"{operation} in another thread"
        return call(group, operation, *rest, **options)

    monkeypatch.setattr(collectives, "_call", checked)
    checkpoint = resolve(args.model)
    with pretended_cuda(monkeypatch, devices=topology.control.size):
        rank = create_rank(args, checkpoint, no_progress, topology, topology.control.rank)
        if topology.control.rank > 0:
            follow(rank)
        leader = Leader(rank, checkpoint, lost=print)
        warm_up(leader, no_progress)
        before = answers(leader)[0]
        staging = threading.Thread(target=leader.swap.stage, args=(resolve(str(new)), no_progress, lambda: False))
        staging.start()
        during = answers(leader)[0]
        staging.join()
        leader.swap.commit()
        after = answers(leader)[0]

        def busy() -> list[float]:
            return [report.busy_s for report in leader.all_reports()]

        wait_until(lambda: len(busy()) == topology.control.size and busy()[-1] > 0, 20, "the report of the last rank")
        return before, during, after, busy()


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_on_devices(tp_size: int, pp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo stands in for NCCL, whose collectives of two threads would wait for each other for ever."""
    init = distributed.init_process_group
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, **options: init("gloo", **options))
    monkeypatch.setattr(groups, "share_memory", lambda *arguments: None)
    monkeypatch.setattr("forked.init_topology", lambda *arguments: init_topology(*arguments[:4], "cuda", 30))
    old, new = (make_tiny(tmp_path / name, seed=seed) for name, seed in (("old", 0), ("new", 1)))
    args = arguments(old, dtype="float32", device="cuda", tp_size=tp_size, pp_size=pp_size)
    ((before, during, after, busy),) = run_ranks(
        tp_size, pp_size, tmp_path / "ranks", serve_on_devices, args, new, first_is_enough=True
    )
    with pretended_cuda(monkeypatch):
        one = arguments(old, dtype="float32", device="cuda")
        expected = [answers(create_worker(one, resolve(str(path)), no_progress))[0] for path in (old, new)]
    assert [before, during, after] == [expected[0], *expected]
    assert len(busy) == tp_size * pp_size
    assert all(seconds > 0 for seconds in busy)
