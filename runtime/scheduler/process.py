"""The scheduler process: it makes the worker and the sockets, says that it is ready, and runs the loop."""

# ruff: noqa: E402

import logging
from pathlib import Path

from llmserve.runtime import kernel_build
from llmserve.runtime.child import ChildInit, Reporter

kernel_build.begin_build()  # now, where there is nothing built yet: the compiler takes longer than what follows

from llmserve.runtime.engine.runner import create_worker
from llmserve.runtime.messages import SchedulerInput, SchedulerMetrics
from llmserve.runtime.scheduler.control import Control
from llmserve.runtime.scheduler.loop import Scheduler
from llmserve.runtime.scheduler.rpc import RpcServer
from llmserve.runtime.tokenizer import IncrementalDecoder, Tokenizer
from llmserve.runtime.watchers import Watchers
from llmserve.runtime.wire import Poller, Pull, Push, Router

log = logging.getLogger(__name__)


def run(init: ChildInit, report: Reporter) -> None:
    """Serves until the process is ended. Raises ConfigError for options that do not fit, and WorkerDied."""
    ports = init.ports
    tokenizer = Tokenizer.load(init.checkpoint.tokenizer_dir)
    worker = create_worker(init.args, init.checkpoint, report.progress)
    inbox = Pull(ports.scheduler_input_ipc_name, SchedulerInput)
    router = Router(ports.rpc_ipc_name)
    tokens, text = Push(ports.detokenizer_ipc_name), Push(ports.tokenizer_ipc_name)
    metrics, watchers = Push(ports.metrics_ipc_name), Watchers(Path(init.directory))

    def make_decoder(skip_special_tokens: bool, stop: tuple[str, ...], min_tokens: int) -> IncrementalDecoder:
        return IncrementalDecoder(tokenizer, skip_special_tokens, stop, min_tokens)

    def offer_metrics(message: SchedulerMetrics) -> None:
        metrics.offer(message)
        watchers.offer(message)

    scheduler = Scheduler(
        init.args,
        worker,
        make_decoder,
        inbox,
        tokens=tokens,
        embeddings=text,
        offer_metrics=offer_metrics,
        dp_rank=init.dp_rank,
    )
    # A lease travels down the pipeline: the detokenizer passes it on to the front, which has metrics too.
    control = Control(scheduler, init.checkpoint.path, watchers, forward=tokens.send)
    scheduler.control = RpcServer(router, control.start, reply=text.send, busy=lambda: not scheduler.quiet)
    scheduler.snapshots.bad_frames = lambda: inbox.bad_frames + router.bad_frames
    scheduler.snapshots.dropped_messages = lambda: metrics.dropped + watchers.dropped
    info = worker.info
    report.ready(
        kv_tokens=info.num_pages * info.page_size,
        kv_bytes=info.num_pages * info.bytes_per_page,
        page_size=info.page_size,
        max_model_len=info.max_model_len,
        weight_bytes=info.weight_bytes,
    )
    scheduler.run(Poller(inbox, router).wait)
