"""The model of `top`, fed from a recording with known curves (top_samples.py)."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_instance import run
from top_samples import BOUNDS, SECONDS, START, front, record, samples, scheduler

from llmserve.cli.top.gpus import are_here, ask_nvidia_smi
from llmserve.cli.top.latencies import quantiles
from llmserve.cli.top.model import Model
from llmserve.cli.top.samples import Link, RecordingError, Sample, read
from llmserve.cli.top.snapshot import Snapshot
from llmserve.cli.top.source import Ended, Replay
from llmserve.runtime.messages import Histogram, ProcessInfo, SchedulerMetrics


def fed(found: list[Sample]) -> Model:
    model = Model()
    for sample in found:
        model.add(sample)
    return model


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("top") / "top.jsonl")


@pytest.fixture(scope="module")
def snapshot(recording: Path) -> Snapshot:
    return fed(list(read(recording))).snapshot(START + SECONDS + 0.5)


def test_a_recording_gives_back_every_sample(recording: Path) -> None:
    assert list(read(recording)) == samples()


def test_gauges_and_rates(snapshot: Snapshot) -> None:
    assert (snapshot.instance, snapshot.model, snapshot.state) == ("prod", "SmolLM2-135M", "ready")
    assert (snapshot.weight_version, snapshot.uptime_s, snapshot.data_age_s) == (3, 1120.5, 0.5)
    load = snapshot.load
    assert (load.running, load.waiting) == (3, 1)
    assert (load.decode_tokens_per_s, load.prefill_tokens_per_s) == (100.0, 50.0)
    assert (load.requests_per_s, load.steps_per_s) == (2.0, 20.0)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, "prefill busy"),
        ({"requests": ()}, ""),
        ({"running": 64}, "all 64 places taken"),
        ({"kv_tokens_used": 9_500}, "KV pool full"),
        ({"state": "paused", "running": 0}, "paused"),
        ({"running": 64, "waiting": 0}, ""),
    ],
)
def test_it_is_told_why_requests_wait(fields: dict[str, Any], obstacle: str) -> None:
    model = fed([msgspec.structs.replace(scheduler(1), **fields)])
    assert model.snapshot(START + 1).load.obstacle == obstacle


def test_hit_rate_of_the_last_minute_and_of_all_time(snapshot: Snapshot) -> None:
    """Cached: 40 of 50 tokens a second, in the second of two minutes only."""
    assert snapshot.cache.hit_rate == pytest.approx(0.8, abs=0.01)
    assert snapshot.cache.hit_rate_lifetime == pytest.approx(0.4)
    assert (snapshot.cache.total, snapshot.cache.used, snapshot.cache.cached, snapshot.cache.free) == (
        10_000,
        2_500,
        5_000,
        2_500,
    )
    assert (snapshot.cache.retractions, snapshot.cache.retractions_last_minute) == (4, 2)
    assert snapshot.cache.asked_retractions == 12


def test_quantiles_are_of_the_last_minute(snapshot: Snapshot) -> None:
    """In the first minute all took 0.01 to 0.1 s, in the second 0.1 to 1 s, evenly within the bucket."""
    assert snapshot.latency.window_s == 60.0
    ttft = snapshot.latency.ttft
    assert ttft.count == 120
    assert (ttft.p50, ttft.p95, ttft.p99) == pytest.approx((0.55, 0.955, 0.991))


@pytest.mark.parametrize("first", [50, 49])
def test_a_first_look_gives_quantiles_since_the_start(first: int) -> None:
    snapshot = fed(samples(50, first)).snapshot(START + 50)
    assert snapshot.latency.window_s == 0.0
    assert snapshot.latency.ttft.count == 100
    assert snapshot.latency.ttft.p50 == pytest.approx(0.055)


def test_a_short_look_at_a_busy_instance_gives_quantiles_of_now() -> None:
    """Two tokens a second: eight in four seconds are enough to say something of the present."""
    snapshot = fed(samples(50, first=46)).snapshot(START + 50)
    assert snapshot.latency.window_s == 4.0
    assert snapshot.latency.itl.count == 8


@pytest.mark.parametrize(
    ("counts", "p50", "p99"),
    [
        ((0, 0, 0, 0, 0), None, None),
        ((100, 0, 0, 0, 0), 0.005, 0.0099),
        ((50, 0, 50, 0, 0), 0.01, 0.982),
        ((0, 0, 0, 0, 7), 10.0, 10.0),
    ],
)
def test_quantiles_within_a_bucket(counts: tuple[int, ...], p50: float | None, p99: float | None) -> None:
    found = quantiles(Histogram(bounds=BOUNDS, counts=counts, sum=0.0))
    assert found.p50 == (None if p50 is None else pytest.approx(p50))
    assert found.p99 == (None if p99 is None else pytest.approx(p99))


def test_history_has_a_value_a_second(snapshot: Snapshot) -> None:
    assert len(snapshot.history["decode"]) == SECONDS
    assert set(snapshot.history["decode"]) == {100.0}
    assert set(snapshot.history["running"]) == {3.0}


def test_processes_and_their_heartbeats(snapshot: Snapshot) -> None:
    main, rank = snapshot.processes
    assert (main.role, main.pid, main.dropped_messages, main.heartbeat_age_s) == ("main", 100, 5, 0.5)
    assert (rank.role, rank.pid, rank.rss_bytes) == ("scheduler", 200, 2 << 30)
    assert snapshot.gpus[0].name == "H200"


def test_requests_age_with_the_clock(snapshot: Snapshot) -> None:
    assert snapshot.requests[0].rid == "cmpl-a"
    assert snapshot.requests[0].age_s == 120.5


# ---- states --------------------------------------------------------------------------------------------------------


def test_silence_is_stalled() -> None:
    model = fed(samples(10))
    assert model.snapshot(START + 13).state == "ready"
    stalled = model.snapshot(START + 15)
    assert stalled.state == "stalled"
    assert "said nothing for 5 s" in stalled.reason


def test_work_without_steps_is_stalled() -> None:
    model = fed(samples(10))
    for second in range(11, 17):
        model.add(msgspec.structs.replace(scheduler(10), time=START + second))
    found = model.snapshot(START + 16)
    assert found.state == "stalled"
    assert found.reason == "the scheduler made no step for 6 s while 3 run"


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_state_without_steps_that_is_meant_is_not_stalled(state: str) -> None:
    model = fed(samples(10))
    for second in range(11, 17):
        model.add(msgspec.structs.replace(scheduler(10), time=START + second, state=state, running=0))
        model.add(front(second))
    assert model.snapshot(START + 16).state == state


@pytest.mark.parametrize(
    ("status", "state"), [("dead", "dead"), ("lost", "lost"), ("starting", "starting"), ("draining", "draining")]
)
def test_the_link_tells_what_the_scheduler_cannot(status: str, state: str) -> None:
    model = fed(samples(10))
    model.add(Link(time=START + 11, status=status, name="prod"))
    assert model.snapshot(START + 11).state == state


def test_a_front_that_hangs_is_stalled_though_the_scheduler_goes_on() -> None:
    model = fed(samples(10))
    for second in range(11, 16):
        model.add(scheduler(second))
    found = model.snapshot(START + 15)
    assert (found.state, found.reason) == ("stalled", "the front has said nothing for 5 s")


def test_a_front_that_hangs_from_the_first_on_is_stalled_too() -> None:
    model = fed([Link(time=START, status="connected", name="prod"), *(scheduler(second) for second in range(6))])
    assert model.snapshot(START + 3).state == "ready"
    found = model.snapshot(START + 5)
    assert (found.state, found.reason) == ("stalled", "the front has said nothing for 5 s")


def test_a_detokenizer_that_hangs_is_stalled_though_all_others_go_on() -> None:
    """The front speaks of it, and says how long it has been silent."""
    model = fed(samples(10))
    silent = ProcessInfo(role="detokenizer", pid=300, silent_s=4.5)
    model.add(msgspec.structs.replace(front(10), processes=(silent,)))
    found = model.snapshot(START + 10.5)
    assert (found.state, found.reason) == ("stalled", "the detokenizer has said nothing for 5 s")
    assert [process.heartbeat_age_s for process in found.processes if process.role == "detokenizer"] == [5.0]


def test_a_process_that_is_stopped_is_named_at_once() -> None:
    model = fed(samples(10))
    model.add(Link(time=START + 10, status="connected", name="prod", detail="its main process 100 is stopped"))
    found = model.snapshot(START + 10)
    assert (found.state, found.reason) == ("stalled", "its main process 100 is stopped")
    silent = fed([Link(time=START, status="connecting", name="prod", detail="its scheduler process 1 is stopped")])
    assert silent.expects_data
    assert silent.snapshot(START).state == "stalled"
    loading = fed([Link(time=START, status="starting", name="prod", detail="its scheduler process 1 is stopped")])
    found = loading.snapshot(START)
    assert (found.state, found.reason) == ("starting", "its scheduler process 1 is stopped")


def test_of_several_replicas_one_that_is_stopped_degrades_the_instance() -> None:
    detail = "its scheduler-dp1-pp0-tp0 process 5 is stopped"
    model = fed([Link(time=START, status="connected", name="prod", replicas=2, detail=detail)])
    for second in range(8):
        model.add(scheduler(second))
        model.add(front(second))
        if second < 2:
            model.add(msgspec.structs.replace(scheduler(second), dp_rank=1))
    for second in (2, 7):
        found = model.snapshot(START + second)
        assert (found.state, found.reason) == ("degraded", detail)
    found = model.snapshot(START + 20)
    assert (found.state, found.reason) == ("stalled", detail)
    of_all = "its main process 1 is stopped"
    model.add(Link(time=START, status="connected", name="prod", replicas=2, detail=of_all))
    found = model.snapshot(START + 7)
    assert (found.state, found.reason) == ("stalled", of_all)


def test_an_instance_that_says_nothing_is_stalled_after_a_while() -> None:
    model = fed(samples(10))
    model.add(Link(time=START + 11, status="connecting", name="prod"))
    assert model.expects_data
    assert model.snapshot(START + 12).state == "connecting"
    found = model.snapshot(START + 15)
    assert (found.state, found.reason) == ("stalled", "the scheduler has said nothing for 4 s")
    assert found.processes == ()  # those of the life before
    model.add(scheduler(1))
    assert not model.expects_data


def test_a_restart_begins_anew() -> None:
    """The counters of the next life are lower; no rate may become negative, no old row stay."""
    model = fed(samples(100))
    model.add(msgspec.structs.replace(scheduler(1), time=START + 110))
    model.add(msgspec.structs.replace(front(1), time=START + 110))
    model.add(msgspec.structs.replace(scheduler(2), time=START + 111))
    found = model.snapshot(START + 111)
    assert found.load.decode_tokens_per_s == 100.0
    assert found.latency.ttft.count == 2
    assert len(found.history["decode"]) == 1


def test_a_replica_that_is_lost_is_named_and_has_nothing_any_more() -> None:
    """What it had counted still counts, so that no rate falls below zero; the others serve on."""
    model = fed([msgspec.structs.replace(scheduler(s), dp_rank=rank) for s in range(5) for rank in (0, 1)])
    model.add(Link(time=START + 4, status="connected", name="prod", lost_replicas=(1,)))
    last_words = msgspec.structs.replace(scheduler(5), dp_rank=1)
    for sample in (last_words, scheduler(5), scheduler(6)):
        model.add(sample)
    found = model.snapshot(START + 6)
    assert (found.state, found.reason) == ("degraded", "replica 1 is lost")
    assert [(each.state, each.running, each.kv_total) for each in found.replicas] == [
        ("ready", 3, 10_000),
        ("lost", 0, 0),
    ]
    assert (found.load.running, found.load.max_running, found.cache.total) == (3, 64, 10_000)
    assert {request.dp_rank for request in found.requests} == {0}
    assert [process.dp_rank for process in found.processes] == [0]
    assert 100.0 <= found.load.decode_tokens_per_s < 200.0  # of both, then of one
    later = fed([Link(time=START, status="connected", name="prod", lost_replicas=(1,)), scheduler(0), scheduler(1)])
    assert later.snapshot(START + 1).reason == "replica 1 is lost"  # though nobody has seen it live
    assert later.snapshot(START + 9).state == "stalled"  # the last one too


def test_a_replica_that_is_silent_is_named() -> None:
    model = fed([msgspec.structs.replace(scheduler(1), dp_rank=rank) for rank in (0, 1)])
    for second in range(2, 8):
        model.add(scheduler(second))
    found = model.snapshot(START + 7)
    assert (found.state, found.reason) == ("degraded", "replica 1 has said nothing for 6 s")
    assert [each.heartbeat_age_s for each in found.replicas] == [0.0, 6.0]


def test_a_replica_that_never_speaks_is_waited_for_and_then_named() -> None:
    """As one that hung before top was started: the registry has it, and nothing comes from it."""
    model = fed([Link(time=START, status="connected", name="prod", replicas=2), scheduler(0), scheduler(1), front(1)])
    assert not model.has_rates
    found = model.snapshot(START + 1)
    assert (found.state, found.reason) == ("connecting", "")
    assert [(each.dp_rank, each.state, each.running) for each in found.replicas] == [
        (0, "ready", 3),
        (1, "connecting", 0),
    ]
    for second in range(2, 6):
        model.add(scheduler(second))
        model.add(front(second))
    found = model.snapshot(START + 5)
    assert (found.state, found.reason) == ("degraded", "replica 1 has said nothing for 5 s")
    found = model.snapshot(START + 9)
    assert (found.state, found.reason) == ("stalled", "replica 0 has said nothing for 4 s")


def test_replicas_are_added_up() -> None:
    other = [msgspec.structs.replace(scheduler(second), dp_rank=1) for second in range(11)]
    ours = [scheduler(second) for second in range(11)]
    found = fed([sample for pair in zip(ours, other, strict=True) for sample in pair]).snapshot(START + 10)
    assert [(each.dp_rank, each.running, each.kv_total) for each in found.replicas] == [(0, 3, 10_000), (1, 3, 10_000)]
    assert (found.load.running, found.cache.total) == (6, 20_000)
    assert found.load.decode_tokens_per_s == pytest.approx(200.0)
    assert len(found.requests) == 8


def test_what_a_replica_counted_before_it_was_heard_of_is_no_rate() -> None:
    """It answers a little later than the other, an hour into its life; `--once` waits until both have spoken twice."""
    model = fed([Link(time=START, status="connected", name="prod", replicas=2)])
    rates = []
    for second, rank in ((99, 0), (100, 0), (100, 1), (101, 0), (101, 1)):
        model.add(msgspec.structs.replace(scheduler(second), dp_rank=rank, time=START + second + rank / 100))
        model.add(front(second))
        rates.append(model.has_rates)
    assert rates == [False, False, False, False, True]
    found = model.snapshot(START + 101.02)
    assert found.load.decode_tokens_per_s == pytest.approx(200.0)
    assert found.load.requests_per_s == pytest.approx(4.0)


# ---- recordings and what is printed without a screen ----------------------------------------------------------------


def test_once_json_is_one_object(recording: Path) -> None:
    data = json.loads(run("top", "--replay", str(recording), "--once", "--json").out)
    assert data["schema_version"] == 1
    assert data["load"]["decode_tokens_per_s"] == 100.0
    assert data["requests"][2]["rid"] == "evil\x1b[2J\x07"
    assert "history" not in data


def test_ascii_may_be_asked_for(recording: Path) -> None:
    shown = run("top", "--replay", str(recording), "--once").out
    plain = run("top", "--replay", str(recording), "--once", "--ascii").out
    assert shown.startswith("● ready")
    assert plain.startswith("* ready")
    assert not set("●▁█▒·─▼▸…") & set(plain)


def test_json_is_a_line_an_interval(recording: Path) -> None:
    """Half a second of replay, as often as it takes to find the machine quiet."""
    for _ in range(20):
        out = run("top", "--replay", str(recording), "--json", "--speed", "240", "--interval", "0.1").out
        times = [json.loads(line)["time"] for line in out.splitlines()]
        if 3 <= len(times) <= 7:
            break
    assert 3 <= len(times) <= 7
    assert times == sorted(times)
    assert times[-1] >= START + SECONDS


def test_off_a_terminal_it_is_plain_lines(recording: Path) -> None:
    out = run("top", "--replay", str(recording), "--speed", "240", "--interval", "0.2").out
    assert "\x1b" not in out
    last = dict(pair.split("=") for pair in out.splitlines()[-1].split()[1:])
    assert last["instance"] == "prod"
    assert (last["running"], last["decode_tokens_per_s"], last["kv_used"]) == ("3", "100.0", "25%")


def test_replay_keeps_the_pace(recording: Path) -> None:
    source = Replay(recording, speed=1000.0)
    source.start()
    taken = []
    while not any(isinstance(item, Ended) for item in taken):
        taken += source.take()
    assert len(taken) == len(samples()) + 1
    source.close()


@pytest.mark.parametrize("text", ["", "{}\n", '{"format": "llmserve-top", "version": 99}\n', "not json\n"])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(RecordingError, match="not a recording"):
        list(read(path))
    assert run("top", "--replay", str(path), "--once").code == 2


def test_a_broken_line_is_named(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(recording.read_text().splitlines()[0] + '\n{"type": "Nonsense"}\n')
    with pytest.raises(RecordingError, match=r"x:2 is not a sample"):
        list(read(path))


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device in parts has no utilization, one that shares its host's memory has none of its own."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "names = sys.argv[1].removeprefix('--query-gpu=').split(',')\n"
        "assert sys.argv[2:] == ['--format=csv,noheader,nounits'], sys.argv\n"
        "devices = [('0', '12345', '143771', '37', 'NVIDIA H200'), ('1', '9', '143771', '[N/A]', 'NVIDIA H200'),\n"
        "           ('2', '[N/A]', '[N/A]', '5', 'NVIDIA GB10')]\n"
        "for device in devices:\n"
        "    known = dict(zip(['index', 'memory.used', 'memory.total', 'utilization.gpu', 'name'], device))\n"
        "    print(', '.join(known[name] for name in names))\n"
    )
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert are_here()
    assert [(gpu.index, gpu.used_bytes, gpu.total_bytes, gpu.busy_percent, gpu.name) for gpu in ask_nvidia_smi()] == [
        (0, 12345 << 20, 143771 << 20, 37, "NVIDIA H200"),
        (1, 9 << 20, 143771 << 20, None, "NVIDIA H200"),
        (2, None, None, 5, "NVIDIA GB10"),
    ]
    smi.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert ask_nvidia_smi() == ()


def ranked(second: int, busy: tuple[float, float], active_s: float) -> SchedulerMetrics:
    ranks = tuple(
        ProcessInfo(
            role="scheduler", pid=200, pp_rank=stage, busy_s=busy_s, collectives={"send": {"calls": 1, "bytes": 1}}
        )
        for stage, busy_s in enumerate(busy)
    )
    return msgspec.structs.replace(scheduler(second), processes=ranks, active_s=active_s)


def test_a_stage_waits_for_what_it_is_not_busy_with() -> None:
    """Two stages with one pid, on two machines; the pipeline was active for 4 s of the last 10."""
    model = Model()
    model.add(ranked(0, (100.0, 50.0), 200.0))
    assert [process.bubble for process in model.snapshot(START).processes] == [None, None], (
        "there is nothing to compare"
    )
    model.add(ranked(5, (102.0, 50.5), 202.0))
    model.add(ranked(10, (103.0, 52.0), 204.0))
    assert [process.bubble for process in model.snapshot(START + 10).processes] == [0.25, 0.5]
    model.add(ranked(20, (103.0, 52.0), 204.0))
    assert [process.bubble for process in model.snapshot(START + 20).processes] == [None, None], "nothing ran lately"


def test_a_lone_rank_has_no_bubble() -> None:
    model = Model()
    for second in (0, 5):
        model.add(scheduler(second))
    assert [process.bubble for process in model.snapshot(START + 5).processes] == [None]
