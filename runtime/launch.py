"""Stack: the processes of one instance, from the first spawn to the removal of its directory.

It waits until all are ready, ends the instance when one of them fails, and shuts them down. It does not know of HTTP,
signals or terminals: serve.py adds an HTTP server, Engine uses it directly. child.py is the side of the child process.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from llmserve.runtime.child import ChildInit, Fact, Progress, Status
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.instance import acquire
from llmserve.runtime.models import hub
from llmserve.runtime.models.sampling_defaults import SamplingDefaults, sampling_defaults
from llmserve.runtime.observer import LaunchObserver, SilentObserver
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.processes import ChildProcess, describe_end
from llmserve.runtime.ranks import Place, alone, check_ports, check_split, network_environment, places, threads_of
from llmserve.runtime.threads import in_thread
from llmserve.runtime.tokenizer import Tokenizer
from llmserve.runtime.tokenizer_manager import TokenizerManager
from llmserve.runtime.watchdog import Watchdog

log = logging.getLogger(__name__)

RESUME_EVERY_S = 0.5
"""How often a drain ends pauses: one may be seen late, in the metrics, or be held for a moment by a weight update."""


class LaunchError(Exception):
    """The instance cannot start. `exit_code` is what the command should exit with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stack:
    """The processes of one instance. Call `start`, use `tokenizer_manager` until `wait_failed` returns, and always
    `stop`.

    `checkpoint`, `sampling_defaults`, `tokenizer_manager` and `facts` (see `facts_of`) are set once `start` has
    returned.
    """

    def __init__(self, args: ServerArgs, observer: LaunchObserver | None = None) -> None:
        """Takes the instance's name and directory; no process starts yet. Raises InstanceError."""
        self.args = args
        self.observer: LaunchObserver = observer or SilentObserver()
        self.instance = acquire(args.name)
        self.facts: dict[str, Fact] = {}
        self.checkpoint: hub.Checkpoint
        self.sampling_defaults: SamplingDefaults
        self.tokenizer_manager: TokenizerManager
        self._front: TokenizerManager | None = None
        self._ports = [PortArgs.init_new(self.instance.directory, replica) for replica in range(args.dp_size)]
        self._children: list[ChildProcess] = []
        self._ranks: dict[ChildProcess, Place] = {}
        self._detokenizer: ChildProcess
        self._failure: asyncio.Future[LaunchError] | None = None
        self._watchdog: Watchdog | None = None
        """Set once the instance serves."""
        self._stopping = False
        self.dismissed = asyncio.Event()
        """Set on a node other than the first when the first node has been stopped."""

    # ---- start -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when every process is ready. Raises LaunchError or ConfigError; call `stop` after those too.

        The registered state stays "starting": the caller calls `announce_ready` once it accepts requests.
        """
        self._failure = asyncio.get_running_loop().create_future()
        if hub.local_path(self.args.model) is not None and alone(self.args):
            # The children import while we read the checkpoint's config: most of the time of a start is theirs. So they
            # start now, before another task of ours does anything.
            self._spawn_all()
        starting = asyncio.create_task(self._start())
        try:
            first: list[asyncio.Future[Any]] = [starting, self._failure]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            await starting
        except Exception as error:
            self._fail(str(error))
            raise
        finally:
            starting.cancel()

    async def _start(self) -> None:
        args = self.args
        self.instance.update(
            host=args.host,
            port=0 if args.node_rank else args.port,
            node_rank=args.node_rank,
            model=args.model,
            served_model_names=args.served_model_names,
        )
        loop = asyncio.get_running_loop()

        def fetched(done: float, total: float) -> None:
            loop.call_soon_threadsafe(self.observer.progress, "model", done, total, "bytes")

        self.checkpoint = await in_thread(hub.resolve, args.model, args.load_format, fetched)
        config = self.checkpoint.config
        self.sampling_defaults = sampling_defaults(args.sampling_defaults, self.checkpoint.generation)
        if not alone(args):
            check_split(args, config)
            check_ports(args)
        if not self._children:
            self._spawn_all()
        log.info("found model path=%s", self.checkpoint.path)
        self.observer.stage("model", f"{self.checkpoint.name} ({config.model_type}, {self.checkpoint.format})")
        self.instance.update(
            model=self.checkpoint.path,
            served_model_names=args.served_model_names or (self.checkpoint.name,),
        )
        self._publish()
        for child in self._children:
            self._give_orders(child)
        if args.node_rank > 0:
            for rank in self._ranks:
                await rank.ready
            self.facts = facts_of([rank.ready.result().facts for rank in self._ranks])
            return
        tokenizer = await in_thread(Tokenizer.load, self.checkpoint.tokenizer_dir)
        inputs = [ports.scheduler_input_ipc_name for ports in self._ports]
        self._front = TokenizerManager(args, self._ports[0], self.checkpoint, tokenizer, inputs)
        self._front.announce = lambda state: self.instance.update(state=state)
        await self._front.start()
        for child in self._children:
            await child.ready
        self.facts = facts_of([rank.ready.result().facts for rank in self._ranks])
        self._front.schedulers.routing.page_size = int(self.facts["page_size"])
        self._front.ready(int(self.facts["max_model_len"]), self._detokenizer.pid)
        self.tokenizer_manager = self._front
        self._watchdog = self._watch()

    def announce_ready(self) -> None:
        """Registers the state "ready": requests are accepted from now on."""
        self.instance.update(state="ready")

    def _spawn_all(self) -> None:
        args = self.args
        environment = scheduler_environment(args)
        for place in places(args):
            role = "scheduler" if alone(args) else place.name
            self._ranks[self._spawn(role, "llmserve.runtime.scheduler.process", environment)] = place
        if args.node_rank == 0:
            self._detokenizer = self._spawn("detokenizer", "llmserve.runtime.detokenizer", LIGHT_ENVIRONMENT)

    def _give_orders(self, child: ChildProcess) -> None:
        place = self._ranks.get(child, Place(0, 0, 0))
        child.send(
            ChildInit(
                role=child.role,
                args=self.args,
                ports=self._ports[place.dp_rank],
                directory=str(self.instance.directory),
                checkpoint=self.checkpoint,
                **place._asdict(),
            )
        )

    def _spawn(self, role: str, module: str, environment: Mapping[str, str]) -> ChildProcess:
        child = ChildProcess(role, module, self.args.name, environment, self._on_status)
        child.ended.add_done_callback(lambda ended: self._on_end(child, ended.result()))
        self._children.append(child)
        log.info("started child=%s pid=%d", role, child.pid)
        return child

    @property
    def options(self) -> dict[str, object]:
        """The options in effect: as given, with the values that the instance has chosen itself."""
        chosen: dict[str, object] = {name: self.facts[name] for name in self.facts if hasattr(self.args, name)}
        chosen |= {"max_total_tokens": self.facts["kv_tokens"], "load_format": self.checkpoint.format}
        return {**msgspec.to_builtins(self.args), **chosen}

    # ---- supervision -----------------------------------------------------------------------------------------------

    async def wait_failed(self) -> LaunchError:
        """Waits until the instance fails and returns why. Its requests have been ended with 503 by then."""
        assert self._failure is not None
        return await asyncio.shield(self._failure)

    @property
    def _failed(self) -> bool:
        return self._failure is not None and self._failure.done()

    def _on_status(self, child: ChildProcess, status: Status) -> None:
        if isinstance(status, Progress) and self._ranks.get(child, Place(0, 0, 0)) == (0, 0, 0):
            self.observer.progress(status.stage, status.done, status.total, status.unit)

    def _on_end(self, child: ChildProcess, code: int) -> None:
        log.log(
            logging.INFO if self._stopping else logging.ERROR,
            "ended child=%s pid=%d code=%d",
            child.role,
            child.pid,
            code,
        )
        if child in self._ranks and code == 0 and self.args.node_rank > 0:
            self.dismissed.set()
            return
        exit_code = child.failure.exit_code if child.failure else 1
        reason = describe_end(child, code)
        if child in self._ranks and self._lose_replica(self._ranks[child].dp_rank, reason):
            return
        self._fail(reason, exit_code)

    def _lose_replica(self, replica: int, reason: str) -> bool:
        """Kills the other ranks of a failed replica and returns True. Returns False, doing nothing, if it is the last
        one or the instance is not serving.
        """
        if self._stopping or self._watchdog is None or self._front is None:
            return False
        others = [number for number in self._front.schedulers.routing.alive if number != replica]
        if not others:
            return False
        if replica in self._front.schedulers.routing.alive:
            log.error("lost replica=%d reason=%r left=%d", replica, reason, len(others))
            for rank, place in self._ranks.items():
                if place.dp_rank == replica:
                    rank.kill()
            self._front.fail_replica(replica, reason)
            self._publish()
        return True

    def _publish(self) -> None:
        """Registers the processes and replicas that are left."""
        alive = self._front.schedulers.routing.alive if self._front is not None else range(self.args.dp_size)
        self.instance.update(
            children=tuple(
                child.pid for child in self._children if child not in self._ranks or self._ranks[child].dp_rank in alive
            ),
            rpc_addresses=tuple(self._ports[number].rpc_ipc_name for number in alive if self.args.node_rank == 0),
            lost_replicas=tuple(number for number in range(self.args.dp_size) if number not in alive),
        )

    def _fail(self, reason: str, exit_code: int = 1) -> None:
        if self._stopping or self._failure is None or self._failure.done():
            return
        self._failure.set_result(LaunchError(reason, exit_code))
        if self._front is not None:
            self._front.fail(reason)

    def _watch(self) -> Watchdog:
        """Ends a replica whose ranks hang, and the instance if that is the last replica or if the detokenizer hangs."""
        front, watchdog = self.tokenizer_manager, Watchdog(self.args.watchdog_timeout)
        watchdog.watch(lambda: front.detokenizer_heard, [self._detokenizer], "has not been heard of", self._fail)
        watchdog.watch(lambda: front.delivered, [self._detokenizer], "delivered nothing", self._fail)
        for replica in front.schedulers.vitals:
            self._watch_replica(watchdog, replica)
        return watchdog

    def _watch_replica(self, watchdog: Watchdog, replica: int) -> None:
        vitals = self.tokenizer_manager.schedulers.vitals[replica]
        ranks = [rank for rank, place in self._ranks.items() if place.dp_rank == replica]

        def end(reason: str) -> None:
            if not self._lose_replica(replica, reason):
                self._fail(reason)

        watchdog.watch(lambda: vitals.moved, ranks, "made no step", end)

    # ---- end -------------------------------------------------------------------------------------------------------

    async def drain(self) -> int:
        """Refuses new requests, waits up to `drain_timeout` seconds for those in flight, and returns how many are left.

        Ends a pause: paused requests would never end, and a supervisor that stops the instance does not resume it.
        """
        timeout = self.args.drain_timeout
        log.info("draining timeout_s=%g in_flight=%d", timeout, self.tokenizer_manager.in_flight)
        self.observer.draining(self.tokenizer_manager.in_flight)
        self.tokenizer_manager.drain()
        self.instance.update(state="draining", ending=True)
        deadline = time.monotonic() + timeout
        resume_at = 0.0
        while self.tokenizer_manager.in_flight and time.monotonic() < deadline:
            if time.monotonic() >= resume_at:
                self.tokenizer_manager.resume_paused()
                resume_at = time.monotonic() + RESUME_EVERY_S
            await asyncio.sleep(0.05)
        return self.tokenizer_manager.in_flight

    def fail_requests(self, reason: str) -> int:
        """Ends the requests in flight with 503 and refuses new ones. Returns how many were in flight."""
        if self._front is None:
            return 0
        left = self._front.in_flight
        self._front.fail(reason)
        return left

    async def stop(self, drain: bool = False) -> None:
        """Ends every process and removes the instance's directory; with `drain`, drains first. May be called again."""
        if drain and not self._stopping and self._watchdog is not None:
            await self.drain()
        self._stopping = True
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._front is not None:
            await self._front.close()
        if self.args.nnodes > 1 and self.args.node_rank == 0 and self._ranks and not self._failed:
            await next(iter(self._ranks)).dismiss()  # so that the other nodes know that nothing is wrong
        await asyncio.gather(*(child.wait_killed() for child in self._children))
        self.instance.release()

    def kill(self) -> None:
        """Like `stop`, but at once and without awaiting: for a process that is about to exit."""
        self._stopping = True
        for child in self._children:
            child.kill()
        self.instance.release()


LIGHT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""For the detokenizer, which decodes one request at a time: thread pools would only cost it memory."""


def scheduler_environment(args: ServerArgs) -> dict[str, str]:
    """The environment of a rank: the number of OpenMP threads, and the network interface that gloo uses.

    The threads wait passively: spinning at a barrier while another process has the core made loading ten times
    slower.
    """
    threads = str(threads_of(args))
    network = {} if alone(args) else network_environment(args)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", **network}


def facts_of(ranks: list[dict[str, Fact]]) -> dict[str, Fact]:
    """The facts that the first rank reported when ready, with `weight_bytes` summed over all ranks."""
    return {**ranks[0], "weight_bytes": sum(int(facts["weight_bytes"]) for facts in ranks)}
