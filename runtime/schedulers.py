"""The schedulers of an instance as the front sees them, one per replica: their sockets, latest metrics and faults.

routing.py chooses the replica of a request; requests themselves are tracked by the TokenizerManager. Times are those of
time.monotonic, given by the caller.
"""

from collections.abc import Sequence

import msgspec

from llmserve.runtime.histogram import added
from llmserve.runtime.messages import (
    SchedulerInput,
    SchedulerMetrics,
    TokenizedReqInput,
)
from llmserve.runtime.routing import Routing
from llmserve.runtime.vitals import Vitals
from llmserve.runtime.wire import Push


class Schedulers:
    """Connects to the schedulers with `open`; `send` never blocks. Replicas are numbered by dp_rank."""

    def __init__(self, addresses: Sequence[str], page_size: int, max_running: int) -> None:
        self.routing = Routing(len(addresses), page_size, max_running)
        self.metrics: dict[int, SchedulerMetrics] = {}
        """The latest metrics of each replica that is alive."""
        self.vitals: dict[int, Vitals] = {}
        """Of each replica that is alive, once they are ready."""
        self._addresses = addresses
        self._pushes: list[Push] = []

    def open(self) -> None:
        self._pushes = [Push(address) for address in self._addresses]

    def ready(self, now: float) -> None:
        """Expects metrics of all from now on."""
        self.vitals = {number: Vitals(now) for number in self.routing.alive}

    def close(self) -> None:
        for push in self._pushes:
            push.close()

    # ---- to them -----------------------------------------------------------------------------------------------------

    def route(self, message: TokenizedReqInput, now: float) -> int:
        """The replica that a new request should go to: none that hangs, if there is another."""
        return self.routing.choose(message.prompts, avoid=self.faults(now))

    def send(self, message: SchedulerInput, replica: int) -> bool:
        """Sends without blocking, or drops a message for a dead replica. Whether `flush` must be called later."""
        if not self.routing.replicas[replica].alive:
            return False
        self._pushes[replica].send(message)
        return self._pushes[replica].backlog > 0

    def flush(self) -> bool:
        """Sends what could not be sent before. Whether nothing is left."""
        left = [n for n in self.routing.alive if not self._pushes[n].flush()]
        return not left

    @property
    def congested(self) -> bool:
        """Whether no replica keeps up with what it is sent."""
        alive = self.routing.alive
        return bool(alive and self._pushes) and all(self._pushes[n].congested for n in alive)

    # ---- from them ---------------------------------------------------------------------------------------------------

    def take(self, metrics: SchedulerMetrics, now: float) -> None:
        number, routing = metrics.dp_rank, self.routing
        if not (0 <= number < len(routing.replicas) and routing.replicas[number].alive):
            return
        before = self.metrics.get(number)
        self.metrics[number] = metrics
        if number in self.vitals:
            self.vitals[number].take(metrics, now)
        routing.replicas[number].draining = metrics.state == "draining"
        routing.max_pages = metrics.pages_total or routing.max_pages
        if before is not None and before.flushes_total != metrics.flushes_total:
            routing.forget(number)

    def lose(self, number: int) -> None:
        """Forgets a replica that has died, with everything that it was sent."""
        self.routing.replicas[number].alive = False
        self.metrics.pop(number, None)
        self.vitals.pop(number, None)

    def silence_s(self, now: float) -> float:
        """How long ago the quietest of the replicas that are alive sent metrics."""
        return max((now - vitals.heard for vitals in self.vitals.values()), default=0.0)

    def faults(self, now: float) -> dict[int, str]:
        """What is wrong with the replicas that are alive and hang."""
        found = {number: vitals.fault(now) for number, vitals in self.vitals.items()}
        return {number: fault for number, fault in found.items() if fault}

    @property
    def total(self) -> SchedulerMetrics | None:
        """The metrics of all replicas combined; None while one that is alive has sent none yet."""
        found = [self.metrics[number] for number in self.routing.alive if number in self.metrics]
        if not found or len(found) < len(self.routing.alive):
            return None
        return found[0] if len(found) == 1 else total_of(found)


SUMS = tuple(
    name
    for name, kind in SchedulerMetrics.__annotations__.items()
    if kind in (int, "int") and name not in ("dp_rank", "weight_version")
)


def total_of(replicas: Sequence[SchedulerMetrics]) -> SchedulerMetrics:
    """The replicas' metrics as one: sums of counts, the oldest time and weight version, the longest step, and the state
    that all share, else "ready".
    """
    states = {metrics.state for metrics in replicas}
    return msgspec.structs.replace(
        replicas[0],
        **{name: sum(getattr(metrics, name) for metrics in replicas) for name in SUMS},
        time=min(metrics.time for metrics in replicas),
        state=states.pop() if len(states) == 1 else "ready",
        weight_version=min(metrics.weight_version for metrics in replicas),
        step_s=max(metrics.step_s for metrics in replicas),
        in_step_s=max(metrics.in_step_s for metrics in replicas),
        itl=added(metrics.itl for metrics in replicas),
        processes=tuple(process for metrics in replicas for process in metrics.processes),
        requests=tuple(request for metrics in replicas for request in metrics.requests),
    )
