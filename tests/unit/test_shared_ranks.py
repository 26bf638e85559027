"""Collectives of ranks that share memory, in forked processes."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_ranks
from torch import Tensor

from instances import PATIENCE_S, fair_time
from llmserve.runtime.distributed.collectives import all_gather, all_reduce, broadcast, least, receive, send, total
from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.ops import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")

CHUNK = 256 << 10
SIZES = (1, 576, 5 * CHUNK + 12)
"""In numbers: more than the ring of chunks holds, too."""


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def talk(topology: Topology) -> list[list[Any]]:
    """For each case what this rank has after each collective, in float32: a queue passes arrays best."""
    group, found = topology.tp, []
    assert group.shared is not None
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            own = values(group.rank, size, dtype)
            summed = all_reduce(own.clone(), group)
            gathered = all_gather(own, group)
            told = broadcast(own.clone(), group)
            passed = torch.empty_like(own)
            if group.rank == 0:
                send(own, 1, group)
                receive(passed, group.size - 1, group)
            else:
                receive(passed, group.rank - 1, group)
                send(own, (group.rank + 1) % group.size, group)
            found.append([x.float().numpy() for x in (summed, gathered, told, passed)])
    assert least(7 - group.rank, group, torch.device("cpu")) == 5
    assert total(group.rank, group, torch.device("cpu")) == 3
    return found


def test_collectives(tmp_path: Path) -> None:
    """Sums are made in rank order in float32, with the same bits everywhere."""
    of_ranks = run_ranks(3, 1, tmp_path / "ranks", talk)
    cases = [(size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)]
    for rank, found in enumerate(of_ranks):
        for (size, dtype), (summed, gathered, told, passed) in zip(cases, found, strict=True):
            parts = [values(other, size, dtype) for other in range(3)]
            exact = (parts[0].float() + parts[1].float()) + parts[2].float()
            assert_same(summed, exact.to(dtype))
            assert_same(gathered, torch.cat(parts))
            assert_same(told, parts[0])
            assert_same(passed, parts[rank - 1])


def assert_same(found: Any, expected: Tensor) -> None:
    assert torch.equal(torch.from_numpy(found), expected.float())


def lose_a_rank(topology: Topology, how: str, operation: str) -> tuple[str, float, float]:
    """Rank 1 is killed or does nothing; what the others are told, and after how many seconds, also by `fair_time`."""
    group, x = topology.tp, torch.ones(4)
    least(0, topology.weights, torch.device("cpu"))  # a group that waits until all have come
    if group.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_S)
    began, fair_began = time.monotonic(), fair_time()
    with pytest.raises(RankLost) as raised:  # noqa: PT012
        if operation == "all_reduce":
            all_reduce(x, group)
        elif operation == "receive":
            receive(x, 1, group)
        else:
            for _ in range(5):  # what the ring holds is taken without the reader
                send(torch.empty(CHUNK, dtype=torch.uint8), 1, group)
    return str(raised.value), time.monotonic() - began, fair_time() - fair_began


@pytest.mark.parametrize("operation", ["all_reduce", "receive", "send"])
def test_a_rank_that_dies_is_missed(operation: str, tmp_path: Path) -> None:
    ((text, _, seconds),) = run_ranks(3, 1, tmp_path / "ranks", lose_a_rank, "dies", operation, first_is_enough=True)
    assert text == "rank 1 of 3 has ended"
    assert seconds < 5


def test_a_rank_that_does_not_answer_is_missed(tmp_path: Path) -> None:
    arguments = ("hangs", "all_reduce")
    ((text, seconds, _),) = run_ranks(
        2, 1, tmp_path / "ranks", lose_a_rank, *arguments, first_is_enough=True, timeout_s=0.5
    )
    assert text == "a rank has not answered for 0.5 s"
    assert seconds >= 0.5


def say_and_leave(topology: Topology) -> list[Any]:
    group = topology.tp
    if group.rank == 0:
        for i in range(3):
            broadcast(torch.full((2,), float(i)), group)
        return []
    time.sleep(0.3)
    return [broadcast(torch.empty(2), group).tolist() for _ in range(3)]


def test_what_was_said_before_an_end_arrives(tmp_path: Path) -> None:
    _, heard = run_ranks(2, 1, tmp_path / "ranks", say_and_leave)
    assert heard == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def wait_long(topology: Topology) -> float:
    """CPU seconds that a wait for half a second takes."""
    group, x = topology.tp, torch.ones(4)
    all_reduce(x, group)
    if group.rank == 1:
        time.sleep(0.5)
    began = time.process_time()
    all_reduce(x, group)
    return time.process_time() - began


def test_waiting_sleeps(tmp_path: Path) -> None:
    waited, _ = run_ranks(2, 1, tmp_path / "ranks", wait_long)
    assert waited < 0.1


def mapped(topology: Topology) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "llmserve-ranks" in line]


def test_the_memory_has_no_name_that_could_be_left_behind(tmp_path: Path) -> None:
    for lines in run_ranks(2, 1, tmp_path / "ranks", mapped):
        assert lines
        assert all(line.endswith("/memfd:llmserve-ranks (deleted)") for line in lines)
