"""Ranks of a model in forked processes, for tests: as cheap as ranks can be, since torch is imported already."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from llmserve.runtime.distributed.groups import Topology, init_topology, make_store

SECONDS = 170.0


def run_ranks(
    tp_size: int,
    pp_size: int,
    rendezvous: Path,
    work: Callable[..., Any],
    *arguments: object,
    first_is_enough: bool = False,
    timeout_s: float = 160,
) -> list[Any]:
    """What `work(topology, *arguments)` returns on each rank; fails the test when one raises or all take too long.

    `first_is_enough`: only one rank returns, and then the others, which follow it for ever, are killed.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            pytest.MonkeyPatch().setattr(distributed_c10d, "_pickler", None)  # ranks pass no objects to each other
            topology = Topology()
            if tp_size * pp_size > 1:
                store = make_store(f"file://{rendezvous}", rank, tp_size * pp_size)
                topology = init_topology(rank, tp_size, pp_size, store, "cpu", timeout_s)
            results.put((rank, True, work(topology, *arguments)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))

    ranks = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(tp_size * pp_size)]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < len(ranks):
            rank, succeeded, value = results.get(timeout=SECONDS)
            assert succeeded, f"rank {rank}: {value}"
            found[rank] = value
            if first_is_enough:
                break
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [found[rank] for rank in sorted(found)]
