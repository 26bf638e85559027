"""The size of the KV pool, from the free memory, the options and what the running requests could use at most."""

import torch

from llmserve.runtime import machine
from llmserve.runtime.attention.base import PageGeometry
from llmserve.runtime.config import ConfigError, ServerArgs

CPU_SHARE = 0.25
"""Fraction of the available memory: other processes need some, and a pool that was used does not shrink."""
CUDA_SHARE = 0.85
"""Fraction of the memory left after loading the weights; the rest is for activations, logits, cuBLAS and NCCL.
"""
CUDA_REST_BYTES = 1 << 30
"""The least that is left for these."""


def pool_tokens(args: ServerArgs, max_model_len: int, geometry: PageGeometry, sharing: int = 1) -> int:
    """Tokens in the KV pool: --max-total-tokens, else as many as fit, up to what the running requests could ever use.

    `sharing`: ranks that share this memory evenly.
    Raises ConfigError when the pool would not fit into the memory, or would hold less than one page.
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
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees what loading has cached
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.memory().available
