"""How large the KV pool may be: what the machine has free, what the options ask, what the requests can use."""

from pathlib import Path

import psutil
import torch

from llmserve.runtime.attention.base import PageGeometry
from llmserve.runtime.config import ConfigError, ServerArgs

CPU_SHARE = 0.25
"""Of the memory that is available: the machine has other users, and a pool that is in use does not shrink."""
CUDA_SHARE = 0.85
"""Of the memory that is free once the weights are loaded: the rest is for activations and logits, cuBLAS and NCCL."""
CUDA_REST_BYTES = 1 << 30
"""At least so much is left for these."""


def pool_tokens(args: ServerArgs, max_model_len: int, geometry: PageGeometry, sharing: int = 1) -> int:
    """Tokens in the KV pool: --max-total-tokens, else what fits, but no more than the running requests could ever use.

    `sharing` ranks have the same memory and take as much of it each.
    Raises ConfigError when the pool would not fit into the memory, or hold a single page.
    """
    available = available_bytes(geometry.device) // sharing
    bytes_per_token = geometry.bytes_per_page // geometry.page_size
    if args.max_total_tokens is not None:
        tokens, needed = args.max_total_tokens, args.max_total_tokens * bytes_per_token
        if needed > available:
            raise ConfigError(
                f"--max-total-tokens {tokens} needs {needed >> 20} MiB and {available >> 20} MiB are available; "
                f"at most {available // bytes_per_token} tokens fit"
            )
    else:
        if geometry.device.type == "cuda":
            budget = min(int(available * CUDA_SHARE), max(0, available - CUDA_REST_BYTES))
        else:
            budget = int(available * CPU_SHARE)
        tokens = min(args.max_running_requests * max_model_len, budget // bytes_per_token)
    if tokens < geometry.page_size:
        raise ConfigError(
            f"a KV pool of {tokens} tokens holds no page of {geometry.page_size}; "
            "give --max-total-tokens, or free some memory"
        )
    return tokens


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on `device`, within the limit of the control group where there is one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left there is free too
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    group = _control_group_bytes()
    return available if group is None else min(available, group)


def _control_group_bytes() -> int | None:
    """What this process's control group (version 2, seen from within) leaves; None where there is no limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
