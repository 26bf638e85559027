"""What goes on while a step hangs: the scheduler runs in a thread, its worker waits for a gate."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fake_worker import FakeHandle, FakeWorker
from operated import Operated, refusal

from instances import PATIENCE_S, wait_until
from llmserve.runtime.engine.batch import StepPlan, StepResult
from llmserve.runtime.messages import (
    AbortReqInput,
    AbortReqOutput,
    FlushCacheReqInput,
    GetLoadReqInput,
    GetLoadReqOutput,
    ListRequestsReqInput,
    ListRequestsReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PingReqInput,
    PingReqOutput,
    RpcEnvelope,
    SchedulerMetrics,
)
from llmserve.runtime.scheduler.loop import METRICS_INTERVAL_S
from llmserve.runtime.scheduler.standin import StandIn


class Gate(FakeWorker):
    """Steps hang while `open` is not set: where they are submitted, or where their result is waited for."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)

    def submit(self, plan: StepPlan) -> FakeHandle:
        if self.place == "submit":
            self.pass_through()
        handle = super().submit(plan)
        return LateHandle(handle, self) if self.place == "result" else handle


class LateHandle(FakeHandle):
    def __init__(self, handle: FakeHandle, gate: Gate) -> None:
        self._handle, self._gate = handle, gate

    def result(self) -> StepResult:
        self._gate.pass_through()
        return self._handle.result()


@pytest.fixture(params=["submit", "result"])
def harness(request: pytest.FixtureRequest) -> Operated:
    """Has one place for a request that runs."""
    harness = Operated(worker=Gate(request.param), max_running_requests=1)
    harness.scheduler.waiting = StandIn(harness.scheduler.stand_in, patience_s=0.01)
    return harness


@contextmanager
def hanging(harness: Operated) -> Iterator[None]:
    """In a step that began three seconds ago and ends with the block."""
    worker = harness.worker
    assert isinstance(worker, Gate)
    worker.reached.clear()
    worker.open.clear()
    turn = threading.Thread(target=harness.turn, daemon=True)
    turn.start()
    try:
        assert worker.reached.wait(PATIENCE_S)
        harness.clock += 3
        yield
    finally:
        worker.open.set()
        turn.join(PATIENCE_S)
        assert not turn.is_alive()


def reports(harness: Operated, condition: Callable[[SchedulerMetrics], bool]) -> None:
    """Waits for metrics, which `top` shows, for which the condition holds."""

    def told() -> bool:
        harness.clock += METRICS_INTERVAL_S
        return condition(harness.metrics[-1])

    wait_until(told, PATIENCE_S, "such metrics")


def test_operators_are_answered(harness: Operated) -> None:
    harness.start_running("stuck")
    with hanging(harness):
        calls = [harness.call(request) for request in (PingReqInput(), GetLoadReqInput(), ListRequestsReqInput())]
        wait_until(lambda: all(map(harness.answer, calls)), PATIENCE_S, "the answers")
        ping, load, listed = map(harness.answer, calls)
        assert isinstance(ping, PingReqOutput)
        assert ping.state == "ready"
        assert 3 <= ping.in_step_s < 4
        assert isinstance(load, GetLoadReqOutput)
        assert (load.running, load.waiting) == (1, 0)
        assert isinstance(listed, ListRequestsReqOutput)
        assert [(info.rid, info.state) for info in listed.requests] == [("stuck", "decode")]
        reports(harness, lambda metrics: metrics.in_step_s > 3)
    assert harness.ask(PingReqInput()) == PingReqOutput(step=ping.step + 1, state="ready")


def test_calls_have_all_the_time(harness: Operated) -> None:
    """Their share of it is for what they hold up."""
    harness.start_running("stuck")
    receive = harness.transport.recv

    def receive_slowly() -> tuple[bytes, RpcEnvelope] | None:
        harness.clock += 1
        return receive()

    with hanging(harness):
        harness.transport.recv = receive_slowly  # type: ignore[method-assign]
        calls = [harness.call(PingReqInput()) for _ in range(5)]
        wait_until(lambda: all(map(harness.answer, calls)), PATIENCE_S, "the answers")


def test_who_is_aborted_ends_at_once_or_with_the_step(harness: Operated) -> None:
    harness.start_running("stuck")
    harness.send("waits", [1, 2, 3])
    harness.turn()
    with hanging(harness):
        waits = harness.call(AbortReqInput(rids=("waits",)))
        wait_until(lambda: harness.answer(waits), PATIENCE_S, "the answer")
        assert harness.answer(waits) == AbortReqOutput(aborted=("waits",))
        assert harness.finish("waits").type == "abort"
        stuck, impatient = (harness.call(AbortReqInput(everything=True), timeout_s=seconds) for seconds in (60, 2))
        wait_until(lambda: harness.heard(impatient), PATIENCE_S, "progress")
        harness.clock += 4
        wait_until(lambda: harness.answer(impatient), PATIENCE_S, "the refusal")
        assert refusal(harness.heard(impatient)[-1]) == (
            "timeout",
            "not done in time: aborting (0 of 1 requests); the step under way takes 7 s already",
        )
        assert harness.answer(stuck) is None
    harness.run()
    assert harness.answer(stuck) == AbortReqOutput(aborted=("stuck",))
    assert harness.finish("stuck").type == "abort"
    harness.check_empty()


def test_what_comes_meanwhile_is_heard(harness: Operated) -> None:
    """New requests wait, and end when they have waited too long; clients leave."""
    harness.start_running("stuck")
    with hanging(harness):
        harness.send("late", [1, 2, 3])
        harness.send("left", [1, 2, 3])
        reports(harness, lambda metrics: metrics.waiting == 2)
        harness.inbox.append(AbortReqInput(rids=("left", "stuck")))
        wait_until(lambda: harness.rows("left"), PATIENCE_S, "the end of one")
        harness.clock += harness.scheduler.args.queue_timeout + 1
        wait_until(lambda: harness.rows("late"), PATIENCE_S, "the end of the other")
        assert harness.finish("late").status == 503
        assert not any(row.finish for row in harness.rows("stuck"))
    harness.run()
    assert harness.finish("stuck").type == "abort"
    harness.check_empty()


def test_what_needs_the_memory_waits_for_the_step(harness: Operated) -> None:
    harness.start_running("stuck")
    with hanging(harness):
        flush = harness.call(FlushCacheReqInput())
        wait_until(lambda: harness.answer(flush), PATIENCE_S, "the refusal")
        assert refusal(harness.heard(flush)[-1])[0] == "busy"
        pause = harness.call(PauseGenerationReqInput(mode="retract"))
        wait_until(lambda: harness.heard(pause), PATIENCE_S, "progress")
        assert harness.answer(pause) is None
        assert len(harness.scheduler.table.running) == 1
    harness.turn()
    harness.turn()
    assert harness.answer(pause) == PauseGenerationReqOutput(retracted=1, aborted=0)


def test_what_the_stand_in_cannot_cope_with_is_logged_and_ends_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("lost")

    stand_in = StandIn(fail, patience_s=0.01)
    with pytest.raises(ValueError, match="lost"), stand_in:
        wait_until(lambda: "ValueError: lost" in caplog.text, PATIENCE_S, "the log, while the step goes on")


def test_what_the_stand_in_cannot_cope_with_is_no_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def fail() -> None:
        tried.set()
        raise ValueError("lost")

    worker = Gate("result")
    harness = Operated(worker=worker)
    harness.start_running("a")
    monkeypatch.setattr(worker, "pass_through", lambda: tried.wait(PATIENCE_S))
    harness.scheduler.waiting = StandIn(fail, patience_s=0.01)
    steps = len(worker.plans)
    with pytest.raises(ValueError, match="lost"):
        harness.turn()
    assert len(worker.plans) == steps + 1, "the step was computed again"
