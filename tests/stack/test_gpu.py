"""The stack on CUDA devices over NCCL: `pytest -m gpu -s` (CONTRIBUTING.md, "On a GPU").

Compares tokens with the CPU's, and with those of one device where there are several; prints the speed of decoding and
the share of the memory's bandwidth that it reaches. Without a device the first test goes as far as there is a way.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch

from checkpoints import make_tiny
from instances import RunningInstance, free_port, run_cli, start

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "The three laws of motion are",
]
TOKENS = 64
START_S = 300
"""CUDA's libraries are gigabytes, which may come from a cold disk."""
BANDWIDTH_REPEATS = 20
COPY_BYTES = 1 << 30

gpu = pytest.mark.gpu
slow = pytest.mark.timeout(1200)


class Served(NamedTuple):
    tokens: list[list[int]]
    tokens_per_s: float
    weight_bytes: int
    collectives: dict[str, dict[str, int]]


def need_devices(count: int) -> None:
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is no CUDA build; CONTRIBUTING.md says how to install one")
    if torch.cuda.device_count() < count:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA devices, and this needs {count}")


@contextmanager
def instance_of(root: Path, name: str, *arguments: str) -> Iterator[RunningInstance]:
    instance = start(root, name, *arguments, "--max-total-tokens", "4096")
    try:
        instance.wait_ready(START_S)
        yield instance
    finally:
        instance.stop()


def ask(instance: RunningInstance, prompt: str) -> list[int]:
    params = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    response = httpx.post(f"{instance.url}/generate", json={"text": prompt, "sampling_params": params}, timeout=120)
    assert response.status_code == 200, response.text
    return list(response.json()["output_ids"])


def ask_all(instance: RunningInstance) -> list[list[int]]:
    return [ask(instance, prompt) for prompt in PROMPTS]


def decode_tokens_per_s(instance: RunningInstance) -> float:
    """Of one request, without the prompt's step."""
    began = time.perf_counter()
    ask(instance, PROMPTS[0])
    first = time.perf_counter() - began
    body = {"prompt": PROMPTS[0], "max_tokens": 4 * TOKENS, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    httpx.post(f"{instance.url}/v1/completions", json=body, timeout=120).raise_for_status()
    return 3 * TOKENS / (time.perf_counter() - began - first)


def serve_one_rank(root: Path, device: str, dtype: str, *model: str) -> Served:
    """What a world of one rank says."""
    name = f"{device}-{dtype}"
    options = ("--device", device, "--nccl-port", str(free_port()), "--dtype", dtype)
    with instance_of(root, name, *model, *options) as instance:
        tokens = ask_all(instance)
        speed = decode_tokens_per_s(instance)
        (replica,) = json.loads(run_cli(root, "status", "--instance", name, "--json").stdout)["replicas"]
        (rank,) = (process for process in replica["processes"] if process["role"] == "scheduler")
        assert re.search(rf"device={device}", instance.log_text())
        return Served(tokens, speed, rank["weight_bytes"], rank["collectives"])


def agreement(found: list[list[int]], expected: list[list[int]]) -> float:
    """Share of the tokens until the first that differs: what follows it has another past."""
    same = 0
    for ours, theirs in zip(found, expected, strict=True):
        differences = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        same += min(differences, default=len(ours))
    return same / (len(expected) * TOKENS)


def copy_bandwidth() -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(BANDWIDTH_REPEATS):
        target.copy_(source)
    torch.cuda.synchronize()
    return 2 * COPY_BYTES * BANDWIDTH_REPEATS / (time.perf_counter() - began)


def test_a_world_of_one_rank_meets_at_a_port_and_really_reduces(own_root: Path, long_model: Path) -> None:
    """On any machine: the CPU's half of what follows, with gloo in the place of NCCL."""
    served = serve_one_rank(own_root, "cpu", "bfloat16", str(long_model))
    assert [len(each) for each in served.tokens] == [TOKENS] * len(PROMPTS)
    calls = served.collectives["all_reduce"]["calls"]
    assert calls > 7 * TOKENS * len(PROMPTS), "three layers, twice in each step, and once"
    assert agreement(served.tokens, served.tokens) == 1.0


@gpu
@slow
def test_cuda_says_what_the_cpu_says(own_root: Path) -> None:
    need_devices(1)
    cpu = serve_one_rank(own_root, "cpu", "float32")
    exact = serve_one_rank(own_root, "cuda", "float32")
    fast = serve_one_rank(own_root, "cuda", "bfloat16")
    assert fast.collectives["all_reduce"]["calls"] > 0, "NCCL was not used"
    bandwidth = copy_bandwidth()
    print(f"\ndecode {fast.tokens_per_s:.1f} tokens/s on {torch.cuda.get_device_name()} in bfloat16")
    share = fast.tokens_per_s * fast.weight_bytes / bandwidth
    print(f"which reads the weights at {share:.1%} of the {bandwidth / 1e9:.0f} GB/s that a copy reaches")
    close, rounded = (agreement(served.tokens, cpu.tokens) for served in (exact, fast))
    print(f"of the CPU's tokens in float32 {close:.1%} come in float32, and {rounded:.1%} in bfloat16")
    assert close > 0.9
    assert rounded > 0.05, "rounding may choose another token soon, but not at once for every prompt"


@gpu
@slow
@pytest.mark.parametrize(
    ("devices", "split"),
    [
        (2, ("--tp-size", "2")),
        (2, ("--pp-size", "2")),
        (2, ("--dp-size", "2")),
        (4, ("--tp-size", "2", "--pp-size", "2")),
    ],
    ids=["tp", "pp", "dp", "tp-pp"],
)
def test_several_devices_say_what_one_says(
    devices: int, split: tuple[str, ...], own_root: Path, long_model: Path, tmp_path: Path
) -> None:
    need_devices(devices)
    says_what_one_says("cuda", split, own_root, long_model, tmp_path)


def says_what_one_says(device: str, split: tuple[str, ...], root: Path, model: Path, tmp_path: Path) -> None:
    """Before, during and after new weights come in, which must not stop the ranks that serve meanwhile."""
    new = make_tiny(tmp_path / "new", seed=5, max_position_embeddings=1 << 16)
    options = ("--device", device, "--dtype", "float32")
    expected = []
    for path in (model, new):
        with instance_of(root, "one", str(path), *options) as one:
            expected.append(ask_all(one))
    with instance_of(root, "split", str(model), *options, *split) as several:
        assert ask_all(several) == expected[0]
        updated: list[int] = []

        def update() -> None:
            for path in (new, model, new):
                updated.append(run_cli(root, "update-weights", str(path), "--instance", "split", "--yes").returncode)

        updating = threading.Thread(target=update)
        updating.start()
        while updating.is_alive():
            assert ask(several, PROMPTS[0])
        updating.join()
        assert updated == [0, 0, 0]
        assert ask_all(several) == expected[1]
        placed = set(re.findall(r"model ready device=(\S+)", several.log_text()))
        assert device == "cpu" or len(placed) > 1, "each rank has a device of its own"
    with instance_of(root, "half", str(model), "--device", device, "--dtype", "bfloat16", *split) as several:
        assert [len(tokens) for tokens in ask_all(several)] == [TOKENS] * len(PROMPTS)
