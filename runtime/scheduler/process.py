"""The scheduler process: it makes the worker and the sockets, says that it is ready, and runs the loop."""

import logging

from llmserve.runtime.child import ChildInit, Reporter
from llmserve.runtime.engine.runner import create_worker
from llmserve.runtime.messages import SchedulerInput
from llmserve.runtime.scheduler.loop import Scheduler
from llmserve.runtime.tokenizer import IncrementalDecoder, Tokenizer
from llmserve.runtime.wire import Poller, Pull, Push, Router

log = logging.getLogger(__name__)


def run(init: ChildInit, report: Reporter) -> None:
    """Serves until the process is ended. Raises ConfigError for options that do not fit, and WorkerDied."""
    ports = init.ports
    tokenizer = Tokenizer.load(init.checkpoint.tokenizer_dir)
    worker = create_worker(init.args, init.checkpoint, report.progress)
    inbox = Pull(ports.scheduler_input_ipc_name, SchedulerInput)
    rpc = Router(ports.rpc_ipc_name)
    metrics = Push(ports.metrics_ipc_name)

    def make_decoder(skip_special_tokens: bool, stop: tuple[str, ...], min_tokens: int) -> IncrementalDecoder:
        return IncrementalDecoder(tokenizer, skip_special_tokens, stop, min_tokens)

    scheduler = Scheduler(
        init.args,
        worker,
        make_decoder,
        inbox,
        tokens=Push(ports.detokenizer_ipc_name),
        embeddings=Push(ports.tokenizer_ipc_name),
        offer_metrics=metrics.offer,
        dp_rank=init.dp_rank,
    )
    scheduler.snapshots.bad_frames = lambda: inbox.bad_frames + rpc.bad_frames
    scheduler.snapshots.dropped_messages = lambda: metrics.dropped
    info = worker.info
    report.ready(
        kv_tokens=info.num_pages * info.page_size,
        kv_bytes=info.num_pages * info.bytes_per_page,
        page_size=info.page_size,
        max_model_len=info.max_model_len,
        weight_bytes=info.weight_bytes,
    )
    scheduler.run(Poller(inbox, rpc).wait)
