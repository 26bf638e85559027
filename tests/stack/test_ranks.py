"""Real instances of several ranks and replicas: what operators see and do, and what happens when a rank dies."""

import contextlib
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from loads import OpenRequest, load

from checkpoints import make_tiny
from instances import (
    FOREVER,
    PATIENCE_S,
    PATIENT,
    RunningInstance,
    assert_gone,
    free_port,
    launched,
    run_cli,
    start,
    wait_until,
)
from llmserve.runtime.client import RpcCallError, RpcClient
from llmserve.runtime.messages import (
    AbortReqInput,
    GetLoadReqInput,
    GetStatusReqInput,
    ListRequestsReqInput,
    PingReqInput,
    RpcProgress,
)

RANKS = ("--threads", "1", "--dtype", "float32")


def cli_json(instance: RunningInstance, *arguments: str, code: int = 0) -> Any:
    done = run_cli(instance.root, *arguments, "--instance", instance.name, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def ranks_of(instance: RunningInstance) -> list[dict[str, Any]]:
    replicas = cli_json(instance, "status")["replicas"]
    return [process for replica in replicas for process in replica["processes"] if process["role"] == "scheduler"]


def answer(instance: RunningInstance, prompt: str, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **options}
    response = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return dict(response.json())


def text(instance: RunningInstance, prompt: str) -> str:
    return str(answer(instance, prompt)["choices"][0]["text"])


@pytest.fixture(scope="module")
def split(runtime_root: Path, long_model: Path) -> Iterator[RunningInstance]:
    """Two stages of two ranks each."""
    with launched(runtime_root, "split", str(long_model), "--tp-size", "2", "--pp-size", "2", *RANKS) as instance:
        yield instance


@pytest.fixture(scope="module")
def replicated(runtime_root: Path, long_model: Path) -> Iterator[RunningInstance]:
    with launched(runtime_root, "twins", str(long_model), "--dp-size", "2", *RANKS) as instance:
        yield instance


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "other"
    return make_tiny(directory, seed=5, max_position_embeddings=1 << 16)


# ---- one replica of four ranks -------------------------------------------------------------------------------------


def test_a_grammar_is_followed_on_all_ranks(split: RunningInstance, replicated: RunningInstance) -> None:
    pattern = "([a-z]{3}, ){3}[0-9]{4}"
    for prompt in ("Once upon", "the sea " * 12):
        for instance in (split, replicated):
            written = answer(instance, prompt, max_tokens=30, structured_outputs={"regex": pattern})
            assert re.fullmatch(pattern, written["choices"][0]["text"])


def test_each_stage_has_a_batch_under_way(split: RunningInstance) -> None:
    """Two batches that take turns, each with half of the choices: a token of all takes two steps, not one."""
    with RpcClient(f"ipc://{split.directory}/rpc.sock", timeout_s=PATIENCE_S) as rpc:
        before = rpc.call(PingReqInput()).step
        answer(split, "Once", n=8, max_tokens=200, temperature=1)
        assert 360 <= rpc.call(PingReqInput()).step - before <= 440


def test_every_rank_is_shown_with_its_share(split: RunningInstance, long_model: Path) -> None:
    text(split, "Once upon a time")
    wait_until(lambda: len(ranks_of(split)) == 4, PATIENCE_S, "the report of each rank")
    ranks = ranks_of(split)
    assert [(rank["pp_rank"], rank["tp_rank"]) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    children = {child.pid for child in psutil.Process(split.process.pid).children()}
    assert {rank["pid"] for rank in ranks} < children
    assert all(rank["rss_bytes"] > 50 << 20 for rank in ranks)
    whole = sum(path.stat().st_size for path in long_model.glob("*.safetensors"))
    assert whole * 0.98 < sum(rank["weight_bytes"] for rank in ranks) < whole * 1.02, "nothing is there twice"
    assert ranks[0]["weight_bytes"] == ranks[1]["weight_bytes"], "each of them has half of the first stage"
    shown = json.loads(run_cli(split.root, "ps", "--json", *PATIENT).stdout)
    (line,) = (line for line in shown if line["name"] == split.name)
    assert [rank["pid"] for rank in line["ranks"]] == [rank["pid"] for rank in ranks]
    assert all(rank["collectives"]["broadcast"]["bytes"] > whole * 0.98 for rank in line["ranks"]), "all receive all"


def test_what_ranks_say_to_each_other_is_counted(split: RunningInstance) -> None:
    """The tiny llama has three layers of width 64: a token is reduced twice a layer and once embedded."""
    answer(split, "Once upon a time", max_tokens=1)
    before = ranks_of_one_step(split)
    usage = answer(split, "Another beginning", max_tokens=9)["usage"]
    after = ranks_of_one_step(split)
    steps, tokens = 9, usage["prompt_tokens"] + 8

    def grown(rank: int, operation: str, what: str) -> int:
        return int(after[rank]["collectives"][operation][what] - before[rank]["collectives"][operation][what])

    first, last = (1, 2) if grown(0, "all_reduce", "calls") == 3 * steps else (2, 1)  # layers of the two stages
    assert grown(0, "all_reduce", "calls") == (1 + 2 * first) * steps
    assert grown(2, "all_reduce", "calls") == 2 * last * steps
    assert grown(0, "all_reduce", "bytes") == (1 + 2 * first) * tokens * 64 * 4
    for rank in (0, 1):
        assert grown(rank, "send", "calls") == steps
        assert grown(rank, "send", "bytes") == tokens * 32 * 4, "each rank sends its half of the columns"
    for rank in (2, 3):
        assert grown(rank, "recv", "bytes") == tokens * 32 * 4
        assert grown(rank, "all_gather", "calls") == 2 * steps, "hidden states, and logits"
        assert grown(rank, "all_gather", "bytes") == tokens * 64 * 4 + steps * 1000 * 4
    for rank in range(4):  # plans of the steps, and a question a second
        assert grown(rank, "plan", "calls") >= steps
        assert grown(rank, "plan", "bytes") == grown(rank, "plan", "calls") * 4096
    for rank in (0, 2):
        assert grown(rank, "results", "bytes") == steps * 4096, "from the rank that draws to the one that schedules"
    assert all("results" not in after[rank]["collectives"] for rank in (1, 3))
    metrics = httpx.get(f"{split.url}/metrics").text
    assert 'llmserve_collective_bytes_total{dp_rank="0",operation="send",pp_rank="0",tp_rank="1"}' in metrics


def ranks_of_one_step(instance: RunningInstance) -> list[dict[str, Any]]:
    """Waits until the ranks, whose reports may be a second old, speak of the same step."""
    ranks: list[dict[str, Any]] = []

    def are_of_one_step() -> bool:
        ranks[:] = ranks_of(instance)
        counts = [Counter({name: count["calls"] for name, count in rank["collectives"].items()}) for rank in ranks]
        a, b, c, d = (count["all_reduce"] for count in counts)
        return (
            (0 < a == b and c == d and any(a * 2 * (3 - first) == c * (1 + 2 * first) for first in (1, 2)))
            and all(counts[rank]["send"] == counts[rank + 2]["recv"] for rank in (0, 1))
            and counts[2]["all_gather"] == counts[3]["all_gather"]
            and counts[0]["results"] == counts[2]["results"]
        )

    wait_until(are_of_one_step, PATIENCE_S, "the reports")
    return ranks


def test_operators_do_on_four_ranks_what_they_do_on_one(
    split: RunningInstance, other_weights: Path, long_model: Path
) -> None:
    before = text(split, "Tell me")
    with load(split, FOREVER, streams=1, plain=1) as requests:
        listed = cli_json(split, "requests")
        assert len(listed) == 2
        assert cli_json(split, "abort", listed[0]["rid"])["aborted"] == [listed[0]["rid"]]
        cli_json(split, "pause")
        with RpcClient(split.record["rpc_addresses"][0], PATIENCE_S) as rpc:
            step = rpc.call(PingReqInput()).step
            time.sleep(0.3)
            assert rpc.call(PingReqInput()).step == step, "it is paused"
        cli_json(split, "resume")
        sent = broadcast_bytes(split)
        (updated,) = cli_json(split, "update-weights", str(other_weights))["replicas"]
        assert updated["new_version"] == updated["old_version"] + 1
        assert broadcast_bytes(split) - sent >= updated["bytes"] > 0, "all comes from the first rank"
        cli_json(split, "abort", "--all", "--yes")
        for request in requests:
            request.wait(PATIENCE_S)
    assert text(split, "Tell me") != before
    assert cli_json(split, "flush-cache")["pages_freed"] > 0
    cli_json(split, "update-weights", str(long_model))
    assert text(split, "Tell me") == before


def broadcast_bytes(instance: RunningInstance) -> int:
    """Of weights, by the first rank."""
    return int(ranks_of(instance)[0]["collectives"]["broadcast"]["bytes"])


def took(action: Callable[[], object]) -> float:
    """Seconds."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def silences(rpc: RpcClient) -> dict[int, float]:
    """Since when each process has not been heard of, in seconds, by pid."""
    return {process.pid: process.silent_s for process in rpc.call(GetStatusReqInput()).processes}


def test_operators_see_and_steer_while_a_rank_hangs(split: RunningInstance) -> None:
    """The first rank waits for it in a step, and an abort takes effect when that ends."""
    hangs, progress = split.child("scheduler-dp0-pp0-tp1"), list[RpcProgress]()
    with load(split, FOREVER, streams=1, plain=1) as requests, RpcClient(f"ipc://{split.directory}/rpc.sock") as rpc:
        hangs.suspend()
        try:
            wait_until(lambda: rpc.call(PingReqInput()).in_step_s > 1, 15, "a step that takes long")
            wait_until(lambda: silences(rpc)[hangs.pid] > 1, 15, "its silence")
            assert min(took(lambda: rpc.call(PingReqInput())) for _ in range(5)) < 1
            asked = (PingReqInput(), GetStatusReqInput(), GetLoadReqInput(), ListRequestsReqInput())
            ping, status, open_now, listed = (rpc.call(request) for request in asked)
            assert (status.steps, open_now.running + open_now.waiting, len(listed.requests)) == (ping.step, 2, 2)
            assert silences(rpc)[split.child("scheduler-dp0-pp0-tp0").pid] == 0
            shown = run_cli(split.root, "ping", "--instance", split.name).stdout
            assert re.search(rf"ready, step {ping.step}, the next one takes [0-9.]+s already", shown)
            first = listed.requests[0].rid
            with ThreadPoolExecutor() as threads, RpcClient(rpc.address) as other:
                try:
                    aborting = threads.submit(other.call, AbortReqInput(rids=(first,)), progress.append, 30.0)
                    wait_until(lambda: progress and progress[-1].total == 1, 15, "that it is to end")
                    assert not aborting.done()
                finally:
                    hangs.resume()
                assert aborting.result().aborted == (first,)
        finally:
            hangs.resume()
        assert first not in rpc.call(AbortReqInput(everything=True)).aborted
        for request in requests:
            request.wait(PATIENCE_S)


@pytest.mark.parametrize("kind", ["split", "replicated"])
def test_a_corrupt_checkpoint_leaves_the_old_weights_on_all_ranks(
    kind: str, request: pytest.FixtureRequest, other_weights: Path, long_model: Path, tmp_path: Path
) -> None:
    instance: RunningInstance = request.getfixturevalue(kind)
    before = text(instance, "Tell me more")
    corrupt = tmp_path / "corrupt"
    corrupt.mkdir()
    for path in other_weights.iterdir():
        (corrupt / path.name).write_bytes(path.read_bytes())
    weights = corrupt / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-400:] = b"\xff" * 400  # NaNs, in the last tensor
    weights.write_bytes(data)
    assert "not finite" in cli_json(instance, "update-weights", str(corrupt), code=1)
    assert text(instance, "Tell me more") == before
    good = cli_json(instance, "update-weights", str(other_weights))["replicas"]
    assert all(each["bytes"] > 0 for each in good), "ranks that have given up once take the next ones"
    assert text(instance, "Tell me more") != before
    cli_json(instance, "update-weights", str(long_model))
    assert text(instance, "Tell me more") == before


# ---- replicas ------------------------------------------------------------------------------------------------------


def routed(instance: RunningInstance) -> dict[str, int]:
    """Requests by why they went to their replica."""
    found = re.findall(r'requests_routed_total{reason="(\w+)"} (\d+)', httpx.get(f"{instance.url}/metrics").text)
    return {reason: int(count) for reason, count in found}


def test_replicas_share_the_requests_by_prefix_and_load(replicated: RunningInstance) -> None:
    prompts = ["a long beginning that many share " * 4, "something else that comes again and again " * 4]
    before = routed(replicated)
    steps = [-replica["steps"] for replica in cli_json(replicated, "status")["replicas"]]
    for _ in range(3):
        for prompt in prompts:
            answer(replicated, prompt)
    status = cli_json(replicated, "status")["replicas"]
    assert min(replica["steps"] + count for replica, count in zip(status, steps, strict=True)) >= 36, "each has one"
    assert answer(replicated, prompts[0])["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    after = routed(replicated)
    assert {reason: after[reason] - before[reason] for reason in after} == {
        "only": 0,
        "prefix": 5,
        "load": 2,
        "full": 0,
    }


def test_an_update_reaches_all_replicas_or_none(
    replicated: RunningInstance, other_weights: Path, long_model: Path, tmp_path: Path
) -> None:
    """Line 11: also where only one of them cannot take it."""
    both = ["One", "Two"]
    before = [text(replicated, prompt) for prompt in both]
    answers = cli_json(replicated, "update-weights", str(other_weights))["replicas"]
    version = answers[0]["new_version"]
    assert [each["new_version"] for each in answers] == [version, version]
    updated = [text(replicated, prompt) for prompt in both]
    assert updated != before
    second = psutil.Process(ranks_of(replicated)[1]["pid"])
    second.suspend()  # it hears of nothing
    try:
        refused = run_cli(
            replicated.root, "update-weights", str(long_model), "--instance", "twins", "--timeout", "2", "--json"
        )
        assert refused.returncode != 0
    finally:
        second.resume()
    wait_until(
        lambda: [r["state"] for r in cli_json(replicated, "status")["replicas"]] == ["ready"] * 2, PATIENCE_S, "ready"
    )
    assert [r["weight_version"] for r in cli_json(replicated, "status")["replicas"]] == [version, version]
    assert [text(replicated, prompt) for prompt in both] == updated
    over_http = httpx.post(
        f"{replicated.url}/update_weights_from_disk", json={"model_path": str(long_model)}, timeout=PATIENCE_S
    )
    assert over_http.status_code == 200, over_http.text
    numbered = [(each["replica"], each["new_version"]) for each in over_http.json()["replicas"]]
    assert numbered == [(0, version + 1), (1, version + 1)]
    assert [text(replicated, prompt) for prompt in both] == before


def test_operators_reach_all_replicas(replicated: RunningInstance) -> None:
    with load(replicated, FOREVER, streams=2, plain=2) as requests:
        listed = cli_json(replicated, "requests")
        assert sorted(each["replica"] for each in listed) == [0, 0, 1, 1]
        header, *lines = run_cli(replicated.root, "requests", "--instance", replicated.name).stdout.splitlines()
        column = header.split().index("REPLICA")
        assert {line.split()[0]: int(line.split()[column]) for line in lines} == {
            each["rid"]: each["replica"] for each in listed
        }
        loads = [(r["running"], r["waiting"]) for r in cli_json(replicated, "status")["replicas"]]
        assert loads == [(2, 0), (2, 0)]
        (line,) = (
            line for line in run_cli(replicated.root, "ps", *PATIENT).stdout.splitlines() if line.startswith("twins ")
        )
        assert line.split()[-2:] == ["2+2", "0+0"]
        aborted = cli_json(replicated, "abort", "--all", "--yes")
        assert sorted(aborted["replicas"]) == aborted["aborted"]
        assert aborted["replicas"] == {each["rid"]: each["replica"] for each in listed}
        for request in requests:
            request.wait(PATIENCE_S)
    assert run_cli(replicated.root, "abort", "nobody", "--instance", replicated.name).returncode == 3
    flushed = cli_json(replicated, "flush-cache")
    assert [each["replica"] for each in flushed["replicas"]] == [0, 1]
    assert flushed["pages_freed"] == sum(each["pages_freed"] for each in flushed["replicas"]) > 0
    again = run_cli(replicated.root, "flush-cache", "--instance", replicated.name)
    assert again.stdout.splitlines() == [f"replica {n}: flushed 0 pages (0 B)" for n in (0, 1)]


def test_what_a_replica_refuses_is_told_of_it_alone(replicated: RunningInstance) -> None:
    """Both refuse in other words; or one does, and the other one has done it."""
    with load(replicated, FOREVER, streams=2, plain=1):
        loads = [r["running"] for r in cli_json(replicated, "status")["replicas"]]
        assert sorted(loads) == [1, 2]
        refused = cli_json(replicated, "flush-cache", code=75)
        assert all(f"replica {number}: {count} running" in refused for number, count in enumerate(loads))
        busy, idle = (loads.index(count) for count in (2, 1))
        (alone,) = (each["rid"] for each in cli_json(replicated, "requests") if each["replica"] == idle)
        cli_json(replicated, "abort", alone)
        over_http = httpx.post(f"{replicated.url}/flush_cache", timeout=PATIENCE_S)
        assert over_http.status_code == 409
        message = over_http.json()["error"]["message"]
        assert message.startswith(f"replica {busy}: 2 running")
        assert message.endswith("; the others have done it")
        assert cli_json(replicated, "abort", "--all", "--yes")["not_found"] == []


# ---- ranks that die ------------------------------------------------------------------------------------------------


def rank_process(instance: RunningInstance, name: str) -> psutil.Process:
    return instance.child(name)


@pytest.mark.parametrize(("name", "busy"), [("scheduler-dp0-pp0-tp1", False), ("scheduler-dp0-pp1-tp0", True)])
def test_a_killed_rank_ends_the_instance(own_root: Path, long_model: Path, name: str, busy: bool) -> None:
    options = ("--tp-size", "2") if "pp0" in name else ("--pp-size", "2")
    with launched(own_root, "one", str(long_model), *options, *RANKS) as instance:
        processes = instance.processes()
        requests = [OpenRequest(instance, FOREVER, stream=True)] if busy else []
        for request in requests:
            wait_until(lambda request=request: len(request.events) > 3, PATIENCE_S, "some events")  # type: ignore[misc]
        rank_process(instance, name).kill()
        for request in requests:
            request.wait(2)
            assert request.error is not None
            assert name in request.error["message"]
        assert instance.wait_ended(5) == 1
        assert_gone(processes)
        assert name in instance.log_text().splitlines()[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_loading_ends_the_launch(own_root: Path, long_model: Path, rank: int) -> None:
    """Line 16."""
    instance = start(own_root, "one", str(long_model), "--tp-size", "2", *RANKS)
    wait_until(lambda: len(psutil.Process(instance.process.pid).children()) == 3, PATIENCE_S, "the children's start")
    processes = instance.processes()
    rank_process(instance, f"scheduler-dp0-pp0-tp{1 - rank}").suspend()  # so that they are still loading
    rank_process(instance, f"scheduler-dp0-pp0-tp{rank}").send_signal(signal.SIGKILL)
    assert instance.wait_ended(5) == 1
    assert f"scheduler-dp0-pp0-tp{rank}" in instance.log_text().splitlines()[-1]
    assert_gone(processes)


def test_a_dead_replica_takes_only_its_own_requests(own_root: Path, long_model: Path) -> None:
    options = (str(long_model), "--dp-size", "2", *RANKS)
    with launched(own_root, "twins", *options) as instance, load(instance, FOREVER) as requests:
        processes = instance.processes()
        rank_process(instance, "scheduler-dp1-pp0-tp0").kill()
        wait_until(lambda: sum(not request.going for request in requests) == 2, 5, "the end of its requests")
        lost = [request for request in requests if not request.going]
        assert all("scheduler-dp1" in request.error["message"] for request in lost if request.error)
        assert all(request.error is not None for request in lost)
        assert all(request.status in (200, 503) for request in lost)
        assert text(instance, "Still here")
        assert len(cli_json(instance, "status")["replicas"]) == 1
        (shown,) = json.loads(run_cli(own_root, "ps", "--json", *PATIENT).stdout)
        assert (shown["state"], shown["running"], shown["lost_replicas"]) == ("degraded", 2, [1])
        seen = cli_json(instance, "top", "--once")
        assert (seen["state"], seen["reason"]) == ("degraded", "replica 1 is lost")
        health = httpx.get(f"{instance.url}/health")
        assert (health.status_code, health.json()) == (200, {"status": "degraded: replica 1 is lost"})
        rank_process(instance, "scheduler-dp0-pp0-tp0").kill()
        assert instance.wait_ended(5) == 1
        assert_gone(processes)


def test_a_rank_killed_during_an_update_leaves_the_old_weights_on_the_others(
    own_root: Path, long_model: Path, other_weights: Path
) -> None:
    options = (str(long_model), "--dp-size", "2", "--tp-size", "2", *RANKS)
    with launched(own_root, "twins", *options) as instance:
        before = text(instance, "Tell me")
        rank = rank_process(instance, "scheduler-dp1-pp0-tp1")
        rank.suspend()  # so that its replica is still reading when the other one waits for the word
        with ThreadPoolExecutor() as threads:
            arguments = ("update-weights", str(other_weights), "--instance", "twins", "--timeout", str(PATIENCE_S))
            updating = threads.submit(run_cli, own_root, *arguments)
            wait_until(lambda: "paused" in states(instance), PATIENCE_S, "that one replica has prepared itself")
            rank.kill()
            assert updating.result(PATIENCE_S).returncode != 0
        wait_until(lambda: states(instance) == ["ready"], PATIENCE_S, "the replica that is left")
        (left,) = cli_json(instance, "status")["replicas"]
        assert left["weight_version"] == 1
        assert text(instance, "Tell me") == before


def states(instance: RunningInstance) -> list[str]:
    """Of the replicas that answer."""
    found = []
    for address in instance.record["rpc_addresses"]:
        with contextlib.suppress(RpcCallError), RpcClient(address, timeout_s=2) as client:
            found.append(client.call(GetLoadReqInput()).state)
    return found


def test_two_launches_at_once_never_meet(own_root: Path, long_model: Path) -> None:
    """Each has its own place where its ranks meet; where two are told the same port, one is refused."""
    options = (str(long_model), "--tp-size", "2", *RANKS)
    port = str(free_port())
    instances = [start(own_root, "one", *options), start(own_root, "two", *options, "--nccl-port", port)]
    try:
        for instance in instances:
            instance.wait_ready()
        assert text(instances[0], "Tell me") == text(instances[1], "Tell me")
        assert not {rank["pid"] for rank in ranks_of(instances[0])} & {rank["pid"] for rank in ranks_of(instances[1])}
        refused = start(own_root, "three", *options, "--nccl-port", port)
        assert refused.wait_ended(PATIENCE_S) == 78
        assert re.search(
            f"[ :]{port}: Address already in use; choose another port", refused.log_text().splitlines()[-1]
        )
        assert text(instances[1], "Tell me")
    finally:
        for instance in instances:
            instance.stop()


def test_a_rank_that_stands_still_ends_its_replica_alone(own_root: Path, long_model: Path) -> None:
    options = ("--dp-size", "2", "--tp-size", "2", "--watchdog-timeout", "4", *RANKS)
    with launched(own_root, "twins", str(long_model), *options) as instance, load(instance, FOREVER) as requests:
        stopped = time.monotonic()
        rank_process(instance, "scheduler-dp1-pp0-tp1").suspend()
        wait_until(lambda: sum(not request.going for request in requests) == 2, 15, "the end of its requests")
        assert time.monotonic() - stopped > 2, "the time may count from a step that began before"
        lost = [request.error for request in requests if not request.going]
        for error in lost:
            assert error is not None
            assert re.search(
                r"the scheduler-dp1-pp0-tp0 \(pid \d+\) made no step for 4 s "
                r"\(the scheduler-dp1-pp0-tp1 \(pid \d+\) is stopped\)",
                error["message"],
            )
        assert text(instance, "Still here")


# ---- what cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--tp-size", "3"), "what works is 1, 2, 4"),
        (("--pp-size", "4"), "at most 3 stages"),
        (("--tp-size", "2", "--nnodes", "3", "--dist-init-addr", "127.0.0.1:1"), "what works is 1, 2"),
        (
            ("--dp-size", "2", "--nnodes", "2", "--dist-init-addr", "127.0.0.1:1"),
            "replicas lie on the node of the front",
        ),
        (("--tp-size", "2", "--device", "cuda"), "CUDA"),
    ],
)
def test_impossible_sizes_are_refused_at_once(
    own_root: Path, long_model: Path, options: tuple[str, ...], complaint: str
) -> None:
    done = run_cli(own_root, "launch", str(long_model), "--port", "0", *options)
    assert done.returncode == 78
    assert complaint in done.stderr
    assert "started child" not in done.stderr
