"""What happens when processes die, are killed or told to end: a fast error for every client, and nothing left over."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from loads import SOME, admitted, load

from instances import (
    FOREVER,
    PATIENCE_S,
    RunningInstance,
    assert_gone,
    command_line,
    launched,
    run_cli,
    start,
    wait_until,
)
from llmserve.runtime.client import RpcClient
from llmserve.runtime.messages import PauseGenerationReqInput


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_killed_child_ends_all(own_root: Path, long_model: Path, role: str) -> None:
    """In-flight requests get 503 or an SSE error within 2 s, and everything exits, non-zero."""
    with launched(own_root, "one", str(long_model)) as instance, load(instance, FOREVER) as requests:
        processes = instance.processes()
        victim = instance.child(role)
        victim.kill()
        wait_until(lambda: not any(request.going for request in requests), 2, "the error of each")
        for request in requests[:2]:
            assert request.status == 200
            assert request.error is not None, request.events[-1:]
            assert role in request.error["message"]
        for request in requests[2:]:
            assert (request.status, request.broken) == (503, "")
            assert request.error is not None
            assert role in request.error["message"]
        assert instance.wait_ended(5) == 1
        assert_gone(processes)
        assert not instance.directory.exists()
        last_line = instance.log_text().splitlines()[-1]
        assert last_line.startswith(f"llmserve: the {role} (pid {victim.pid}) was killed by SIGKILL")


def test_a_killed_main_process_leaves_no_child_and_no_lasting_claim(own_root: Path, long_model: Path) -> None:
    """Children end within 5 s; what the dead instance left is swept by the next launch under its name."""
    first = start(own_root, "same", str(long_model))
    first.wait_ready()
    with load(first, FOREVER):
        processes = first.processes()
        assert len(processes) == 3
        first.process.kill()
        assert_gone(processes, 5)
    assert (first.directory / "rpc.sock").exists()
    with launched(own_root, "same", str(long_model)) as second:
        assert second.record["pid"] == second.process.pid


@pytest.mark.parametrize("seconds", [0.1, 0.25, 0.5, 0.8, 1.1])
def test_a_main_process_killed_while_loading_leaves_no_child(own_root: Path, tiny_model: Path, seconds: float) -> None:
    instance = start(own_root, "early", str(tiny_model))
    time.sleep(seconds)
    processes = instance.processes()
    instance.process.kill()
    instance.process.wait()
    assert_gone(processes, 5)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_what_fills_an_empty_cache_ends_with_the_launch(
    own_root: Path, tmp_path: Path, tiny_model: Path, end: signal.Signals
) -> None:
    """A conversion that a child of the main process makes, of a tokenizer without tokenizer.json, takes seconds."""
    older = tmp_path / "older"
    shutil.copytree(tiny_model, older)
    tokenizer = json.loads((older / "tokenizer.json").read_text())["model"]
    (older / "tokenizer.json").unlink()
    (older / "vocab.json").write_text(json.dumps(tokenizer["vocab"]))
    (older / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, tokenizer["merges"])]))
    instance = start(own_root, "fresh", str(older), XDG_CACHE_HOME=str(tmp_path / "cache"))
    converts = "llmserve.runtime.models.convert"
    wait_until(lambda: converts in str(list(map(command_line, instance.processes()))), PATIENCE_S, "the conversion")
    processes = instance.processes()
    instance.process.send_signal(end)
    instance.wait_ended(5)
    assert_gone(processes)


def test_sigterm_refuses_new_work_and_finishes_the_old(own_root: Path, long_model: Path) -> None:
    """Also when the whole group gets the signal, as systemd does it: if children obeyed, the requests would be lost.

    The scheduler stands still meanwhile, so that the old work does not end before we have looked.
    """
    options = (str(long_model), "--drain-timeout", "170")
    with launched(own_root, "drained", *options) as instance, load(instance, SOME) as requests:
        scheduler = instance.child("scheduler")
        scheduler.suspend()
        processes, url = instance.processes(), instance.url
        for process in reversed(processes):
            process.terminate()
        wait_until(lambda: instance.record.get("state") == "draining", 2, "draining")
        health = httpx.get(f"{url}/health", timeout=PATIENCE_S)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 1}, timeout=PATIENCE_S)
        assert all(request.going for request in requests), "they ended too soon to show anything"
        stop = run_cli(own_root, "stop", "--timeout", "0.1")  # waits as well, and ends nothing
        scheduler.resume()
        assert (stop.returncode, "is still draining" in stop.stderr) == (75, True)
        assert health.status_code == 503
        assert refused.status_code == 503
        assert "draining" in refused.json()["error"]["message"]
        for request in requests:
            request.wait(2 * PATIENCE_S)
            assert request.status == 200
            assert request.error is None
        for request in requests[:2]:
            assert request.events[-1] == "[DONE]"
            assert [event["choices"][0]["finish_reason"] for event in request.events[:-1]][-1] == "length"
        for request in requests[2:]:
            assert request.body["choices"][0]["finish_reason"] == "length"
        assert instance.wait_ended(5) == 0
        assert_gone(processes)
        assert not instance.directory.exists()


def test_a_paused_instance_goes_on_when_it_is_to_end(own_root: Path, long_model: Path) -> None:
    """What it holds ends well, long before the drain timeout, though nobody resumes it."""
    with launched(own_root, "held", str(long_model), "--drain-timeout", "170") as instance:
        with RpcClient(instance.record["rpc_addresses"][0], PATIENCE_S) as client:
            client.call(PauseGenerationReqInput(mode="retract"))
        requests = admitted(instance, 100, streams=2, plain=2)
        instance.process.terminate()
        for request in requests:
            request.wait(2 * PATIENCE_S)
            assert (request.status, request.error) == (200, None)
        assert instance.wait_ended(5) == 0


def test_a_drain_has_a_deadline(own_root: Path, long_model: Path) -> None:
    options = (str(long_model), "--drain-timeout", "0.5")
    with launched(own_root, "deadline", *options) as instance, load(instance, FOREVER) as requests:
        told = time.monotonic()
        instance.process.send_signal(signal.SIGTERM)
        for request in requests:
            request.wait(5)
            assert request.error is not None
        assert requests[2].status == 503
        assert time.monotonic() - told >= 0.5
        assert instance.wait_ended(5) == 0


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(own_root: Path, long_model: Path, second: signal.Signals) -> None:
    """And those who wait are told."""
    with launched(own_root, "twice", str(long_model)) as instance, load(instance, FOREVER) as requests:
        processes = instance.processes()
        instance.process.send_signal(signal.SIGINT)
        wait_until(lambda: instance.record.get("state") == "draining", 2, "draining")
        instance.process.send_signal(second)
        assert instance.wait_ended(5) == 128 + second
        for request in requests:
            request.wait(2)
            assert request.error is not None
            assert "the server was ended at once" in request.error["message"]
        assert_gone(processes)
        assert not instance.directory.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_is_enough_while_loading(own_root: Path, tiny_model: Path, number: signal.Signals) -> None:
    instance, _ = paused_while_loading(own_root, tiny_model)
    processes = instance.processes()
    instance.process.send_signal(number)
    assert instance.wait_ended(5) == 128 + number
    assert_gone(processes)
    assert not instance.directory.exists()


def paused_while_loading(root: Path, model: Path) -> tuple[RunningInstance, psutil.Process]:
    """An instance that cannot get ready because its scheduler is stopped."""
    instance = start(root, "loading", str(model))
    wait_until(lambda: len(psutil.Process(instance.process.pid).children()) == 2, PATIENCE_S, "two children")
    scheduler = instance.child("scheduler")
    scheduler.suspend()
    wait_until(lambda: instance.record.get("children"), PATIENCE_S, "the children's names")
    return instance, scheduler


def test_a_child_that_dies_while_loading_ends_the_launch(own_root: Path, tiny_model: Path) -> None:
    instance, scheduler = paused_while_loading(own_root, tiny_model)
    answer = httpx.get(f"{instance.url}/health", timeout=PATIENCE_S)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the model is still loading"
    assert instance.record["state"] == "starting"
    processes = instance.processes()
    scheduler.kill()
    assert instance.wait_ended(5) == 1
    assert f"the scheduler (pid {scheduler.pid}) was killed by SIGKILL" in instance.log_text().splitlines()[-1]
    assert_gone(processes)
    assert not instance.directory.exists()


def test_a_broken_checkpoint_ends_the_launch_with_its_message(own_root: Path, tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = next(broken.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    instance = start(own_root, "broken", str(broken))
    assert instance.wait_ended(PATIENCE_S) != 0
    assert weights.name in instance.log_text().splitlines()[-1]
    assert not instance.directory.exists()


@pytest.mark.parametrize(("role", "fault"), [("scheduler", "made no step"), ("detokenizer", "has not been heard of")])
def test_the_watchdog_ends_what_is_stuck(own_root: Path, long_model: Path, role: str, fault: str) -> None:
    """And leaves alone what has nothing to do. The scheduler goes on with what the detokenizer holds up."""
    with launched(own_root, "stuck", str(long_model), "--watchdog-timeout", "3") as instance:
        if role == "scheduler":  # once is enough
            time.sleep(4)
        assert httpx.get(f"{instance.url}/health", timeout=PATIENCE_S).status_code == 200
        processes = instance.processes()
        with load(instance, FOREVER) as requests:
            stopped = time.monotonic()
            instance.child(role).suspend()
            for request in requests:
                request.wait(PATIENCE_S)
                assert request.error is not None
                assert f"{fault} for 3 s" in request.error["message"]
            assert time.monotonic() - stopped >= 3
        assert instance.wait_ended(5) == 1
        assert_gone(processes)


def test_health_tells_soon_of_a_process_that_is_stuck(own_root: Path, long_model: Path) -> None:
    """Long before the watchdog does something about it; and that it goes on."""
    with launched(own_root, "stuck", str(long_model)) as instance, load(instance, FOREVER):

        def health() -> httpx.Response:
            return httpx.get(f"{instance.url}/health", timeout=PATIENCE_S)

        def says(text: str) -> bool:
            return health().status_code == 503 and text in health().json()["status"]

        assert health().status_code == 200
        scheduler, detokenizer = instance.child("scheduler"), instance.child("detokenizer")
        scheduler.suspend()
        detokenizer.suspend()
        wait_until(lambda: says("the scheduler has not been heard of for"), 15, "word of the scheduler")
        scheduler.resume()
        wait_until(lambda: says("the detokenizer has not been heard of for"), 15, "word of the detokenizer")
        detokenizer.resume()
        wait_until(lambda: health().status_code == 200, 15, "their going on")
