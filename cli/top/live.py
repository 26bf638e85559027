"""Live: the source of samples that is a running instance.

It binds a PULL socket in the instance's directory and leases the metrics of all replicas over RPC, so that it takes
messages from nobody else; it finds the instance again after a restart. It also carries out the user's actions.
"""

import os
import secrets
import threading
import time
from typing import cast

import msgspec

from llmserve.cli import format
from llmserve.cli.rpc import Remote
from llmserve.cli.top import gpus
from llmserve.cli.top.keys import Abort, Action, Flush
from llmserve.cli.top.samples import Gpus, Link, Recorder, Status
from llmserve.cli.top.source import Ended, Item, Notice, Source
from llmserve.runtime.client import RpcCallError
from llmserve.runtime.instance import InstanceError, InstanceRecord, find_instance
from llmserve.runtime.messages import (
    AbortReqInput,
    FlushCacheReqInput,
    MetricsInput,
    SchedulerMetrics,
    SubscribeMetricsReqInput,
)
from llmserve.runtime.ports import ipc_address
from llmserve.runtime.wire import Poller, Pull

LEASE_S = 10.0
RENEW_S = 3.0
LOOK_S = 1.0
"""How often the instance is checked."""
POLL_S = 0.25
CALL_TIMEOUT_S = 5.0
ACTION_TIMEOUT_S = 30.0
GPU_S = 2.0


class Live(Source):
    """A running instance, by name. `found` is its record as it was first; it may restart and be found again."""

    def __init__(self, found: InstanceRecord, recorder: Recorder | None = None) -> None:
        super().__init__()
        self._record = found
        self._recorder = recorder
        self._link: Link | None = None

    def start(self) -> None:
        super().start()
        if gpus.are_here():
            self._spawn(self._watch_gpus)

    def act(self, action: Action) -> None:
        self._spawn(lambda: self.put(Notice(self._do(action))))

    def put(self, item: Item) -> None:
        if self._recorder is not None and not isinstance(item, Notice | Ended):
            self._recorder.add(item)
        super().put(item)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self._record = find_instance(self._record.name)
                if self._record.state == "starting":
                    self._say("starting", self._record.stopped)
                else:
                    self._watch()
            except InstanceError as error:
                self._say("dead", str(error))
            except RpcCallError as error:
                self._say("lost", str(error))
            self._ends.wait(LOOK_S / 2)

    def _watch(self) -> None:
        """Passes on metrics until the instance ends. Raises RpcCallError or InstanceError then."""
        record = self._record
        if self._link is None or self._link.status != "lost":  # keep showing what was wrong until it is resolved
            self._say("connecting")
        endpoint = f"watch-{os.getpid()}-{secrets.token_hex(4)}"
        path = record.directory / endpoint
        pull = Pull(ipc_address(path), MetricsInput)
        lease = Lease(record, endpoint)
        try:
            poller = Poller(pull)
            look, heard = 0.0, False
            status: Status = "connected"
            stopped = ""
            while not self._ends.is_set():
                if time.monotonic() >= look:
                    look = time.monotonic() + LOOK_S
                    if not record.alive:
                        raise InstanceError(f"its process {record.pid} is gone", 69)
                    found = find_instance(record.name)
                    if found.rpc_addresses != record.rpc_addresses:  # a replica has died
                        lease.end()
                        self._record = record = found
                        lease = Lease(record, endpoint)
                    if lease.error is not None:
                        raise lease.error
                    # A front that drains says so in its record, while the scheduler reports its usual state.
                    status = "draining" if found.state == "draining" else "connected"
                    stopped = found.stopped
                    if stopped and self._link is not None and self._link.status in ("connecting", "connected"):
                        self._say(self._link.status, stopped)
                    if pull.bad_frames and not heard:
                        self._say("lost", "it is of another version: start llmserve top again")
                    heard = False
                poller.wait(POLL_S)
                while (message := pull.recv()) is not None:
                    if isinstance(message, SchedulerMetrics):
                        heard = True
                        self._say(status, stopped)
                    self.put(cast(MetricsInput, message))
        finally:
            lease.end()
            pull.close()
            path.unlink(missing_ok=True)

    def _say(self, status: Status, detail: str = "") -> None:
        """Puts a Link into the queue, if it differs from the last one."""
        record = self._record
        link = Link(
            time=time.time(),
            status=status,
            name=record.name,
            model=record.served_model_names[0] if record.served_model_names else record.model,
            address=record.address,
            detail=detail,
            replicas=len(record.rpc_addresses),
            lost_replicas=record.lost_replicas,
        )
        if self._link is None or link != msgspec.structs.replace(self._link, time=link.time):
            self._link = link
            self.put(link)

    def _do(self, action: Action) -> str:
        """Carries out an action; returns a message about the result."""
        try:
            with Remote(self._record, ACTION_TIMEOUT_S) as remote:
                if isinstance(action, Abort):
                    answers = remote.some(AbortReqInput(rids=tuple(action)))
                    aborted = {rid for answer in answers.values() for rid in answer.aborted}
                    gone = len(action) - len(aborted) if answers.failure is None else 0
                    done = f"aborted {format.plural(len(aborted), 'request')}" + (f", {gone} had ended" if gone else "")
                    return but(done, answers.failure)
                if isinstance(action, Flush):
                    flushed = remote.some(FlushCacheReqInput())
                    pages = sum(answer.pages_freed for answer in flushed.values())
                    return but(f"flushed {format.plural(pages, 'page')}", flushed.failure)
        except RpcCallError as error:
            if isinstance(action, Flush) and error.code == "busy":
                return "not flushed, as requests run: `llmserve flush-cache --wait` waits for them"
            return str(error)
        return ""

    def _watch_gpus(self) -> None:
        while not self._ends.is_set():
            if found := gpus.ask_nvidia_smi():
                self.put(Gpus(time=time.time(), gpus=found))
            self._ends.wait(GPU_S)


def but(done: str, failure: RpcCallError | None) -> str:
    """`done`, followed by the error of the replicas that failed."""
    return done if failure is None else f"{done}; {failure}"


class Lease:
    """Renews the lease of metrics for `endpoint` until `end`, in a thread, because a scheduler in a long step answers
    late.
    """

    def __init__(self, record: InstanceRecord, endpoint: str) -> None:
        self.error: RpcCallError | None = None
        """Why the lease could not be renewed."""
        self._record = record
        self._request = SubscribeMetricsReqInput(endpoint=endpoint, lease_s=LEASE_S)
        self._ends = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def end(self) -> None:
        """Stops renewing the lease, which then runs out."""
        self._ends.set()

    def _renew(self) -> None:
        with Remote(self._record, CALL_TIMEOUT_S) as remote:
            while not self._ends.is_set():
                try:
                    remote.each(self._request)
                except RpcCallError as error:
                    if error.code != "timeout":
                        self.error = error
                        return
                else:
                    self._ends.wait(RENEW_S)
