"""The process groups of a model that is split over ranks, and this process's place in them."""

import socket
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from llmserve.runtime import machine
from llmserve.runtime.distributed.shared import SharedGroup, share_memory

BACKLOG = 1024
RENDEZVOUS_TIMEOUT_S = 600.0
"""Time for the other ranks to start, on other nodes too, and for reading a tensor."""
SPINS = 300
"""Iterations of a busy wait, about 10 us, before it sleeps: tensor-parallel ranks meet twice per layer."""


class Counts:
    """Counts and bytes of the collectives that this rank has taken part in, by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, operation: str, nbytes: int, calls: int = 1) -> None:
        """Counts `calls` calls of `nbytes` each."""
        self.calls[operation] += calls
        self.bytes[operation] += calls * nbytes

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {name: {"calls": self.calls[name], "bytes": self.bytes[name]} for name in sorted(self.calls)}


@dataclass(frozen=True)
class Group:
    """This process's place among the ranks of one kind of parallelism.

    Without a process group every collective is a no-op. With `shared`, for CPU ranks on one node, they go through
    shared memory.
    """

    rank: int = 0
    size: int = 1
    process_group: distributed.ProcessGroup | None = None
    shared: SharedGroup | None = None
    counts: Counts = field(default_factory=Counts, compare=False)


@dataclass(frozen=True)
class Topology:
    """The groups of one rank. Tensor-parallel ranks (`tp`) hold slices of the same layers, pipeline ranks (`pp`)
    different layers.

    The other groups join all ranks: `weights` on the devices, for the start; `control` on the CPU, for plans and
    reports; `updates` on the CPU, for new weights. Each group is used by one thread at a time, so that operations have
    the same order on all ranks. Groups on CUDA devices all belong to the serving thread: with two threads, NCCL's
    kernels could be queued in different orders on different ranks, and wait for each other for ever.
    """

    tp: Group = Group()
    pp: Group = Group()
    control: Group = Group()
    weights: Group = Group()
    updates: Group = Group()

    @property
    def joined(self) -> bool:
        """Whether there are process groups, even if of this rank alone."""
        return self.weights.process_group is not None

    @property
    def counts(self) -> Counts:
        return self.weights.counts


def init_topology(
    rank: int, tp_size: int, pp_size: int, store: Store, device: str, timeout_s: float, nodes: int = 1
) -> Topology:
    """Joins the tp_size * pp_size ranks that meet in `store` (see make_store); rank = pp_rank * tp_size + tp_rank.

    Every rank must call it. CUDA devices are joined by nccl, CPUs by gloo, and CPUs of one node by shared memory too. A
    collective of a step that takes longer than `timeout_s` raises RankLost. Each of the `nodes` has the same number of
    consecutive ranks.
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
    # with fewer cores than ranks, spinning would take the core from the rank that is waited for
    crowded = world // nodes > machine.cores()
    join = _Join(rank, world // nodes, Counts())
    tp, pp = join(tp_ranks, timeout, spins=0 if crowded else SPINS), join(pp_ranks, timeout)
    control, weights = join([everyone], timeout, backend="gloo"), join([everyone], patient)
    updates = weights if device == "cpu" else join([everyone], patient, backend="gloo")
    return Topology(tp, pp, control, weights, updates)


def make_store(where: str, rank: int, world: int) -> Store:
    """The rendezvous store of the ranks: file://PATH, or tcp://HOST:PORT, where rank 0 listens on that address only.

    A NAME in tcp://HOST:PORT/NAME separates them from ranks of another launch that come to the same port. Raises
    OSError when rank 0 cannot listen.
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
        wait_for_workers=False,  # or this rank could not announce its end before the others have come
        master_listen_fd=listener if rank == 0 else None,
        use_libuv=False,  # which would listen on every interface
    )
    return PrefixStore(name, store) if name else store


@dataclass(frozen=True)
class _Join:
    """Makes groups for rank `rank`. gloo groups within one node, which has `node_size` ranks, share memory."""

    rank: int
    node_size: int
    counts: Counts

    def __call__(
        self, groups: list[list[int]], timeout: timedelta, backend: str | None = None, spins: int = 0
    ) -> Group:
        """Makes all `groups`, which every rank must do in the same order, and returns this rank's.

        A group of one rank gets no process group, unless it is the only rank at all, which still runs the collectives.
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
