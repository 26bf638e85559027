"""Who watches the metrics: leases, and watchers that leave or do not read."""

import math
import socket
from pathlib import Path

import pytest
from operated import Operated, refusal

from instances import PATIENCE_S, fair_time
from llmserve.runtime.messages import (
    MetricsInput,
    SubscribeMetricsReqInput,
    SubscribeMetricsReqOutput,
)
from llmserve.runtime.ports import ipc_address
from llmserve.runtime.watchers import MAX_WATCHERS
from llmserve.runtime.wire import Poller, Pull


def test_a_lease_pushes_metrics_until_it_ends(tmp_path: Path) -> None:
    harness = Operated(tmp_path)
    pull = Pull(ipc_address(tmp_path / "watch-1"), MetricsInput)
    request = SubscribeMetricsReqInput(endpoint="watch-1", lease_s=5.0)
    assert harness.ask(request) == SubscribeMetricsReqOutput(lease_s=5.0)
    assert harness.forwarded == [request]
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    Poller(pull).wait(PATIENCE_S)
    assert pull.recv() is not None
    harness.clock += 4.0
    assert harness.ask(request) == SubscribeMetricsReqOutput(lease_s=5.0)  # renewed
    harness.clock += 4.0
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    assert len(harness.watchers) == 1
    harness.clock += 2.0
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    assert len(harness.watchers) == 0
    pull.close()


def test_a_watcher_that_has_left_is_forgotten_before_its_lease_ends(tmp_path: Path) -> None:
    """It took its socket's file away; what it no longer gets does not count as dropped."""
    harness = Operated(tmp_path)
    pull = Pull(ipc_address(tmp_path / "watch-1"), MetricsInput)
    harness.ask(SubscribeMetricsReqInput(endpoint="watch-1", lease_s=60.0))
    pull.close()
    (tmp_path / "watch-1").unlink()
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    assert len(harness.watchers) == 0
    assert harness.watchers.dropped == 0


def test_a_watcher_that_does_not_read_is_dropped_from_and_delays_nothing(tmp_path: Path) -> None:
    harness = Operated(tmp_path)
    pull = Pull(ipc_address(tmp_path / "watch-1"), MetricsInput)
    harness.ask(SubscribeMetricsReqInput(endpoint="watch-1", lease_s=60.0))
    metrics = harness.scheduler.snapshots.metrics()
    slowest, offered = 0.0, 0
    while not harness.watchers.dropped:
        offered += 1
        began = fair_time()
        harness.watchers.offer(metrics)
        slowest = max(slowest, fair_time() - began)
    assert slowest < 1.0
    assert offered < 1000, "they wait in memory"
    harness.watchers.close()
    pull.close()


@pytest.mark.parametrize(
    "endpoint",
    ["", "tokenizer.sock", "rpc.sock", "watch-/../x", "../watch-1", "/tmp/watch-1", "tcp://1.2.3.4:5", "watch-nobody"],
)
def test_an_endpoint_is_a_watchers_socket_in_the_directory_or_refused(tmp_path: Path, endpoint: str) -> None:
    directory = tmp_path / "instance"
    (directory / "watch-").mkdir(parents=True)
    for path in (directory / "tokenizer.sock", directory / "rpc.sock", directory / "x", tmp_path / "watch-1"):
        with socket.socket(socket.AF_UNIX) as one_of_others:
            one_of_others.bind(str(path))
    harness = Operated(directory)
    assert refusal(harness.ask(SubscribeMetricsReqInput(endpoint=endpoint)))[0] == "invalid"
    assert harness.forwarded == []


def test_leases_are_bounded_in_time_and_number(tmp_path: Path) -> None:
    harness = Operated(tmp_path)
    pulls = [Pull(ipc_address(tmp_path / f"watch-{i}"), MetricsInput) for i in range(MAX_WATCHERS + 1)]
    answers = [
        harness.ask(SubscribeMetricsReqInput(endpoint=f"watch-{i}", lease_s=1e9)) for i in range(MAX_WATCHERS + 1)
    ]
    assert answers[:-1] == [SubscribeMetricsReqOutput(lease_s=60.0)] * MAX_WATCHERS
    assert refusal(answers[-1])[0] == "invalid"
    for lease_s in (0.0, -1.0, math.nan):
        assert refusal(harness.ask(SubscribeMetricsReqInput(endpoint="watch-0", lease_s=lease_s)))[0] == "invalid"
    harness.watchers.close()
    for pull in pulls:
        pull.close()
