"""The scheduler process: makes the worker and the sockets, reports that it is ready, and runs the loop.

With several ranks, each is a process that runs this module; rank 0 schedules and the others follow it.
"""

# ruff: noqa: E402

import hashlib
import logging
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from llmserve.runtime import kernel_build
from llmserve.runtime.child import ChildInit, Reporter

kernel_build.begin_build()  # before the imports, because compiling takes longer than these

import msgspec
import torch
from llguidance import LLTokenizer
from torch.distributed import DistError

from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.distributed.farewell import await_farewell, say_farewell
from llmserve.runtime.distributed.groups import Topology, init_topology, make_store
from llmserve.runtime.distributed.presence import find_gone
from llmserve.runtime.engine.batch import Worker, WorkerDied
from llmserve.runtime.engine.leader import Leader
from llmserve.runtime.engine.ranks import follow
from llmserve.runtime.engine.runner import choose_device, create_rank, create_worker, warm_up
from llmserve.runtime.engine.shared_source import same_everywhere
from llmserve.runtime.messages import SchedulerInput, SchedulerMetrics
from llmserve.runtime.ranks import Place, places, rank_name, ranks_per_node, rendezvous
from llmserve.runtime.scheduler.control import Verbs
from llmserve.runtime.scheduler.guides import Guides, vocabulary_of
from llmserve.runtime.scheduler.loop import Scheduler
from llmserve.runtime.scheduler.rpc import RpcServer
from llmserve.runtime.scheduler.standin import StandIn
from llmserve.runtime.tokenizer import IncrementalDecoder, Tokenizer
from llmserve.runtime.watchers import Watchers
from llmserve.runtime.wire import Poller, Pull, Push, Router

log = logging.getLogger(__name__)

SHARED_OPTIONS = ("tp_size", "pp_size", "nnodes", "dtype", "page_size", "max_total_tokens", "max_model_len")
"""Options that must be the same on all nodes."""
NO_TIMEOUT_S = 86_400.0
LOST_GRACE_S = 3.0
"""How long a rank waits before it reports the loss of another one: on the same node the main process notices at once
which one has died.
"""
DISMISSAL_GRACE_S = 0.5
"""The same for a rank on another node, which may have ended on purpose and announced it."""


def run(init: ChildInit, report: Reporter) -> None:
    """Serves until the process is ended. Raises ConfigError for options that cannot be used here, and WorkerDied."""
    args = init.args
    index = places(args).index(Place(init.dp_rank, init.pp_rank, init.tp_rank))
    try:
        if args.tp_size * args.pp_size == 1 and args.nccl_port is None:
            serve(init, report, create_worker(args, init.checkpoint, report.progress, index))
        else:
            run_rank(init, report, index)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the model does not fit into the memory of GPU {index} ({str(error).splitlines()[0]}): split it with "
            "--tp-size or --pp-size, lower --max-total-tokens, or free some memory"
        ) from error


def run_rank(init: ChildInit, report: Reporter, index: int) -> None:
    """Runs one of several ranks: rank 0 serves, the others follow. `index` is its number on this machine."""
    args = init.args
    topology = Topology()
    try:
        topology = join(init, report, choose_device(args, index))
        rank = create_rank(args, init.checkpoint, report.progress, topology, index)
        if topology.control.rank > 0:
            report.ready(weight_bytes=rank.info.weight_bytes)
            follow(rank)
        leader = Leader(rank, init.checkpoint, lost=lambda text: end_lost(init, report, topology, text))
        warm_up(leader, report.progress)
        serve(init, report, leader)
    except (RankLost, WorkerDied) as error:
        end_lost(init, report, topology, str(error))


def end_lost(init: ChildInit, report: Reporter, topology: Topology, reason: str) -> NoReturn:
    """Ends this rank after it has lost another one. The report names lost ranks on other nodes."""
    args = init.args
    gone = find_gone(topology.control) if args.nnodes > 1 else []
    if gone:
        names = " and the ".join(rank_name(args, init.dp_rank, rank) for rank in gone)
        reason = f"lost the {names} ({reason})"
    log.error("rank lost reason=%s", reason)
    elsewhere = gone and all(rank // ranks_per_node(args) != args.node_rank for rank in gone)
    time.sleep(DISMISSAL_GRACE_S if elsewhere else LOST_GRACE_S)
    report.error(reason)
    os._exit(1)  # at exit torch would wait for the ranks that are gone


def join(init: ChildInit, report: Reporter, device: torch.device) -> Topology:
    """Joins the groups of this rank. From then on, ranks on other nodes notice when rank 0 ends on purpose. Raises
    ConfigError when they cannot meet, or when the nodes have different options or models, and RankLost when some do not
    come.
    """
    args = init.args
    rank = init.pp_rank * args.tp_size + init.tp_rank
    where = rendezvous(args, init.directory, init.dp_rank)
    timeout_s = args.watchdog_timeout or NO_TIMEOUT_S
    world = args.tp_size * args.pp_size
    if args.nnodes > 1:
        log.info("waiting for the ranks of all nodes nodes=%d address=%s", args.nnodes, where.split("/")[2])
    try:
        store = make_store(where, rank, world)
    except OSError as error:
        address, fault = where.split("/")[2], os.strerror(error.errno or 0)
        raise ConfigError(f"the ranks cannot meet at {address}: {fault}; choose another port") from error
    except DistError as error:
        raise not_met(args, error) from error
    if args.nnodes > 1:
        own = make_store(where, rank or 1, world)  # a client of its own, which no other thread blocks
        if rank == 0:
            report.farewell = partial(say_farewell, own, world - 1)
        else:
            # at once, because whatever is under way would wait for ranks that have ended
            leaving = partial(await_farewell, own, leave=partial(os._exit, 0))
            threading.Thread(target=leaving, daemon=True, name="farewell").start()
    try:
        topology = init_topology(rank, args.tp_size, args.pp_size, store, device.type, timeout_s, args.nnodes)
    except DistError as error:
        raise not_met(args, error) from error
    if args.nnodes > 1:
        shared = msgspec.json.encode([init.checkpoint.config, *(getattr(args, name) for name in SHARED_OPTIONS)])
        digest = hashlib.blake2b(shared, digest_size=7).digest()
        same_everywhere(digest, "model or options", topology.weights, device)
    return topology


def not_met(args: ServerArgs, error: DistError) -> RankLost:
    """The RankLost that torch's error on joining the ranks means."""
    advice = f"; launch all {args.nnodes} nodes, with the same options" if args.nnodes > 1 else ""
    return RankLost(f"the ranks have not all met ({str(error).splitlines()[0].rstrip('.')}){advice}")


def serve(init: ChildInit, report: Reporter, worker: Worker) -> None:
    """Runs the scheduler of `worker`: makes its sockets, reports that it is ready, and runs the loop."""
    ports = init.ports
    tokenizer = Tokenizer.load(init.checkpoint.tokenizer_dir)
    inbox = Pull(ports.scheduler_input_ipc_name, SchedulerInput)
    router = Router(ports.rpc_ipc_name)
    tokens, text = Push(ports.detokenizer_ipc_name), Push(ports.tokenizer_ipc_name)
    metrics, watchers = Push(ports.metrics_ipc_name), Watchers(Path(init.directory))

    def make_decoder(skip_special_tokens: bool, stop: tuple[str, ...], min_tokens: int) -> IncrementalDecoder:
        return IncrementalDecoder(tokenizer, skip_special_tokens, stop, min_tokens)

    def vocabulary() -> LLTokenizer:
        return vocabulary_of(tokenizer, worker.info.vocab_size, worker.info.eos_token_ids)

    def offer_metrics(message: SchedulerMetrics) -> None:
        metrics.offer(message)
        watchers.offer(message)

    scheduler = Scheduler(
        init.args,
        worker,
        make_decoder,
        Guides(vocabulary),
        inbox,
        tokens=tokens,
        embeddings=text,
        offer_metrics=offer_metrics,
        dp_rank=init.dp_rank,
        depth=init.args.pp_size,
    )
    if isinstance(worker, Leader):
        scheduler.snapshots.ranks = worker.all_reports
        scheduler.snapshots.active_s = lambda: worker.active_s
    # Leases of metrics are passed down the pipeline to the front, which has metrics too.
    verbs = Verbs(scheduler, init.checkpoint.path, watchers, forward=tokens.send)
    scheduler.control = RpcServer(
        router,
        verbs.start,
        reply=text.send,
        busy=lambda: not scheduler.quiet,
        in_step_s=lambda: scheduler.in_step_s,
    )
    scheduler.snapshots.bad_frames = lambda: inbox.bad_frames + router.bad_frames
    scheduler.snapshots.dropped_messages = lambda: metrics.dropped + watchers.dropped
    info = worker.info
    report.ready(
        kv_tokens=info.num_pages * info.page_size,
        kv_bytes=info.num_pages * info.bytes_per_page,
        page_size=info.page_size,
        max_model_len=info.max_model_len,
        weight_bytes=info.weight_bytes,
        **info.in_effect,
    )
    scheduler.waiting = StandIn(scheduler.stand_in)
    scheduler.run(Poller(inbox, router).wait)
