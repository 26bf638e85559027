"""The ranks that one model is split over, and this process's place among them. collectives.py has the collectives."""

import os
import socket
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from llmserve.runtime.distributed.shared import SharedGroup, share_memory

BACKLOG = 1024
RENDEZVOUS_TIMEOUT_S = 600.0
"""For the other ranks to start, on other nodes too, and for the reading of a tensor."""
SPINS = 300
"""Turns of a wait, about 10 us, before it sleeps: ranks that share a layer come together twice in it."""


class Counts:
    """Collectives that this rank has taken part in, by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, operation: str, nbytes: int, calls: int = 1) -> None:
        """So many calls of `nbytes` each."""
        self.calls[operation] += calls
        self.bytes[operation] += calls * nbytes

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {name: {"calls": self.calls[name], "bytes": self.bytes[name]} for name in sorted(self.calls)}


@dataclass(frozen=True)
class Group:
    """This process's place among the ranks of one kind of parallelism. Without a process group every collective is a
    no-op; with shared memory, which CPU ranks of one node have, they go through that.
    """

    rank: int = 0
    size: int = 1
    process_group: distributed.ProcessGroup | None = None
    shared: SharedGroup | None = None
    counts: Counts = field(default_factory=Counts, compare=False)


@dataclass(frozen=True)
class Topology:
    """Tensor-parallel ranks hold slices of the same layers, pipeline ranks hold different layers.

    The others join all ranks: `weights` on the devices, for the start; `control` in the CPU's memory, for plans and
    reports; `updates` there too, for new weights. Each is used by one thread at a time, so that no rank mixes up their
    order. Those on CUDA devices are all the serving thread's: NCCL's kernels wait for the other ranks on one stream,
    where two threads would put them in an order that differs from rank to rank.
    """

    tp: Group = Group()
    pp: Group = Group()
    control: Group = Group()
    weights: Group = Group()
    updates: Group = Group()

    @property
    def joined(self) -> bool:
        """Whether there are process groups, be it of this rank alone."""
        return self.weights.process_group is not None

    @property
    def counts(self) -> Counts:
        return self.weights.counts


def init_topology(
    rank: int, tp_size: int, pp_size: int, store: Store, device: str, timeout_s: float, nodes: int = 1
) -> Topology:
    """Joins the tp_size * pp_size ranks that meet in `store` (see make_store); rank = pp_rank * tp_size + tp_rank.

    Every rank must call it. nccl joins CUDA devices, gloo CPUs, and shared memory those of one node. A collective of a
    step that takes longer than `timeout_s` raises. Each of the `nodes` has the same number of ranks, the first ones
    first.
    """
    world = tp_size * pp_size
    patient, timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S), timedelta(seconds=timeout_s)
    distributed.init_process_group(
        "nccl" if torch.device(device).type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=patient,
    )
    tp_ranks = [[stage * tp_size + i for i in range(tp_size)] for stage in range(pp_size)]
    pp_ranks = [[stage * tp_size + i for stage in range(pp_size)] for i in range(tp_size)]
    everyone = list(range(world))
    crowded = world // nodes > len(os.sched_getaffinity(0))  # then whom we wait for may want the core that we spin on
    join = _Join(rank, world // nodes, Counts())
    tp, pp = join(tp_ranks, timeout, spins=0 if crowded else SPINS), join(pp_ranks, timeout)
    control, weights = join([everyone], timeout, backend="gloo"), join([everyone], patient)
    updates = weights if device == "cpu" else join([everyone], patient, backend="gloo")
    return Topology(tp, pp, control, weights, updates)


def make_store(where: str, rank: int, world: int) -> Store:
    """Where ranks find each other: file://PATH, or tcp://HOST:PORT, where rank 0 listens on that address alone.

    With tcp://HOST:PORT/NAME they do not see those of another launch, with another name, that come to the same port.
    Raises OSError when rank 0 cannot listen.
    """
    kind, _, place = where.partition("://")
    if kind == "file":
        return FileStore(place, world)
    address, _, name = place.partition("/")
    host, _, port = address.rpartition(":")
    host, listener = host.strip("[]"), -1
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family, backlog=BACKLOG).detach()
    store = TCPStore(
        host,
        int(port),
        world,
        is_master=rank == 0,
        timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        wait_for_workers=False,  # until they have come this one could not tell them that it ends
        master_listen_fd=listener if rank == 0 else None,
        use_libuv=False,  # which would listen on every interface
    )
    return PrefixStore(name, store) if name else store


@dataclass(frozen=True)
class _Join:
    """Makes groups for rank `rank`; those of gloo share memory where they lie within `node_size` ranks of one node."""

    rank: int
    node_size: int
    counts: Counts

    def __call__(
        self, groups: list[list[int]], timeout: timedelta, backend: str | None = None, spins: int = 0
    ) -> Group:
        """Makes every group, which all ranks must do in the same order, and returns this rank's.

        A rank alone in a group gets none, unless it is alone altogether: then it wants the collectives all the same.
        """
        mine = Group(counts=self.counts)
        for ranks in groups:
            if len(ranks) == 1 and distributed.get_world_size() > 1:
                continue
            handle = distributed.new_group(ranks, timeout=timeout, backend=backend)
            if self.rank in ranks:
                place, shared = ranks.index(self.rank), None
                if len(ranks) > 1 and distributed.get_backend(handle) == "gloo" and self._on_one_node(ranks):
                    shared = share_memory(handle, place, len(ranks), timeout.total_seconds(), spins)
                mine = Group(place, len(ranks), handle, shared, self.counts)
        return mine

    def _on_one_node(self, ranks: list[int]) -> bool:
        return len({rank // self.node_size for rank in ranks}) == 1
