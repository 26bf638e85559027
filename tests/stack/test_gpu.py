"""The stack on a CUDA device, with a world of one rank over NCCL: `pytest -m gpu tests/stack/test_gpu.py -s`.

Compares tokens with the CPU's and prints the speed of decoding and the share of the memory's bandwidth that it reaches.
Without a device it runs on the CPU over gloo, up to the check of the device.
"""

import json
import re
import time
from pathlib import Path

import httpx
import pytest

from instances import RunningInstance, launched, run_cli

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "The three laws of motion are",
]
TOKENS = 64
PORT = 29460
BANDWIDTH_REPEATS = 20
COPY_BYTES = 1 << 30


def ask(instance: RunningInstance, prompt: str) -> list[int]:
    body = {"text": prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    response = httpx.post(f"{instance.url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return list(response.json()["output_ids"])


def decode_tokens_per_s(instance: RunningInstance) -> float:
    """Of one request, without the prompt's step."""
    began = time.perf_counter()
    ask(instance, PROMPTS[0])
    first = time.perf_counter() - began
    body = {"prompt": PROMPTS[0], "max_tokens": 4 * TOKENS, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    httpx.post(f"{instance.url}/v1/completions", json=body, timeout=120).raise_for_status()
    return 3 * TOKENS / (time.perf_counter() - began - first)


def copy_bandwidth() -> float:
    """Bytes a second that a copy on the device reads and writes."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(BANDWIDTH_REPEATS):
        target.copy_(source)
    torch.cuda.synchronize()
    return 2 * COPY_BYTES * BANDWIDTH_REPEATS / (time.perf_counter() - began)


def serve_one_rank(
    root: Path, device: str, port: int, *model: str
) -> tuple[list[list[int]], float, int, dict[str, dict[str, int]]]:
    """Tokens, decode speed, weight bytes and collectives of a world of one rank."""
    options = ("--device", device, "--nccl-port", str(port), "--dtype", "bfloat16", "--max-total-tokens", "4096")
    with launched(root, device, *model, *options) as instance:
        tokens = [ask(instance, prompt) for prompt in PROMPTS]
        speed = decode_tokens_per_s(instance)
        (replica,) = json.loads(run_cli(root, "status", "--instance", device, "--json").stdout)["replicas"]
        (rank,) = (process for process in replica["processes"] if process["role"] == "scheduler")
        assert re.search(rf"device={device}", instance.log_text())
        return tokens, speed, rank["weight_bytes"], rank["collectives"]


def test_a_world_of_one_rank_meets_at_a_port_and_really_reduces(own_root: Path, long_model: Path) -> None:
    """On any machine: the CPU's half of what follows, with gloo in the place of NCCL."""
    tokens, _, _, collectives = serve_one_rank(own_root, "cpu", PORT, str(long_model))
    assert [len(each) for each in tokens] == [TOKENS] * len(PROMPTS)
    assert collectives["all_reduce"]["calls"] > 7 * TOKENS * len(PROMPTS), "three layers, twice in each step, and once"


@pytest.mark.gpu
def test_cuda_says_what_the_cpu_says(own_root: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    expected, cpu_speed, _, _ = serve_one_rank(own_root, "cpu", PORT)
    found, speed, weight_bytes, collectives = serve_one_rank(own_root, "cuda", PORT + 1)
    assert collectives["all_reduce"]["calls"] > 0, "NCCL was not used"
    same = sum(a == b for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs, strict=True))
    total = TOKENS * len(PROMPTS)
    bandwidth = copy_bandwidth()
    share = speed * weight_bytes / bandwidth
    print(f"\ndecode {speed:.1f} tokens/s on CUDA, {cpu_speed:.1f} on the CPU")
    print(f"{share:.1%} of the {bandwidth / 1e9:.0f} GB/s that a copy reaches; {same} of {total} tokens are the CPU's")
    assert all(ours[:4] == theirs[:4] for ours, theirs in zip(found, expected, strict=True))
