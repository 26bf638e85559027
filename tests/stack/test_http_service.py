"""How an instance with keys and a small queue serves: who may ask what, who waits, and what /health says meanwhile.

Where each behaviour is tested:
  a client that leaves, whole or streaming ............ test_disconnect.py
  an abort of a queued request ........................ here
  a death in the stack, drains, the watchdog .......... test_faults.py
  over-long prompts, ranges, schemas, duplicate rids .. test_http_attacks.py
  errors before and in mid-stream, their shape ........ unit/test_http_endings.py, here
  SSE framing ......................................... unit/http_app.py (parse_events, used everywhere), here
  stop strings, UTF-8, penalties, seeds ............... test_sampling_params.py
  usage under chunked prefill, a full queue, /health .. here
  keys ................................................ here and unit/test_http_frontdoor.py
"""

import concurrent.futures
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from instances import FOREVER, PATIENCE_S, RunningInstance, fair_time, launched, wait_until
from llmserve.runtime.client import RpcClient
from llmserve.runtime.messages import (
    AbortReqInput,
    ContinueGenerationReqInput,
    GetLoadReqInput,
    GetStatusReqInput,
    PauseGenerationReqInput,
    PingReqInput,
)

API_KEY, ADMIN_KEY = "user-key-1f3a", "admin-key-9c2d"
QUEUE_TIMEOUT_S = 2.0
OPTIONS = (
    *("--max-running-requests", "1", "--max-queued-requests", "1", "--queue-timeout", str(QUEUE_TIMEOUT_S)),
    *("--chunked-prefill-size", "16", "--max-total-tokens", "65536"),
)


@pytest.fixture(scope="module")
def instance(runtime_root: Path, long_model: Path) -> Iterator[RunningInstance]:
    keys = {"LLMSERVE_API_KEY": API_KEY, "LLMSERVE_ADMIN_API_KEY": ADMIN_KEY}
    with launched(runtime_root, "service", str(long_model), *OPTIONS, **keys) as instance:
        yield instance


@pytest.fixture(scope="module")
def http(instance: RunningInstance) -> Iterator[httpx.Client]:
    with instance.client(headers={"Authorization": f"Bearer {API_KEY}"}, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def rpc(instance: RunningInstance) -> Iterator[RpcClient]:
    with RpcClient(f"ipc://{instance.directory}/rpc.sock", timeout_s=PATIENCE_S) as client:
        yield client


@contextmanager
def running(http: httpx.Client, rpc: RpcClient, rid: str = "") -> Iterator[None]:
    """A stream that goes on until the block ends."""
    body = {"prompt": "a", "max_tokens": FOREVER, "ignore_eos": True, "stream": True}
    if rid:
        body["rid"] = rid
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()  # a name of its own: dropped, it would close the response
        next(lines)
        yield
    wait_until(lambda: rpc.call(GetLoadReqInput()).running == 0, PATIENCE_S, "the stream's end")


def complete(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "temperature": 0, **body})


# ---- keys ------------------------------------------------------------------------------------------------------------

ROUTES = [
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("GET", "/get_load"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_without_the_key(instance: RunningInstance, method: str, path: str) -> None:
    with instance.client() as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {API_KEY}x"}):
            response = stranger.request(method, path, json={}, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


def test_health_is_open_and_the_admin_routes_have_a_key_of_their_own(instance: RunningInstance) -> None:
    with instance.client() as stranger:
        assert stranger.get("/health").status_code == 200
        assert stranger.post("/flush_cache", headers={"Authorization": f"Bearer {API_KEY}"}).status_code == 401
        assert stranger.get("/v1/models", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200


def test_keys_show_up_nowhere(instance: RunningInstance, http: httpx.Client, rpc: RpcClient) -> None:
    with instance.client() as stranger:
        stranger.get("/v1/models", headers={"Authorization": "Bearer leaked-guess"})
    shown = [instance.log_text(), json.dumps(instance.record), str(rpc.call(GetStatusReqInput()))]
    shown += [http.get(path).text for path in ("/server_info", "/metrics", "/openapi.json")]
    shown += [" ".join([process.name(), *process.cmdline()]) for process in instance.processes()]
    for child in instance.processes()[1:]:
        assert not [name for name in child.environ() if name.endswith("_API_KEY")]
    for key in (API_KEY, ADMIN_KEY, "leaked-guess"):
        assert not any(key in text for text in shown)


# ---- the queue -------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_whole_or_streaming(http: httpx.Client, rpc: RpcClient) -> None:
    with running(http, rpc), concurrent.futures.ThreadPoolExecutor() as pool:
        for stream in (False, True):
            waiting = pool.submit(complete, http, rid=f"waits-{stream}")
            wait_until(lambda: rpc.call(GetLoadReqInput()).waiting == 1, PATIENCE_S, "one in the queue")
            began = fair_time()
            refused = complete(http, stream=stream)
            assert fair_time() - began < QUEUE_TIMEOUT_S / 2
            assert refused.status_code == 503
            assert "queue" in refused.json()["error"]["message"]
            rpc.call(AbortReqInput(rids=(f"waits-{stream}",)))
            waiting.result()


def test_the_wait_in_the_queue_has_a_deadline(http: httpx.Client, rpc: RpcClient) -> None:
    with running(http, rpc):
        began, fair_began = time.monotonic(), fair_time()
        response = complete(http, stream=True)
        waited, fair_waited = time.monotonic() - began, fair_time() - fair_began
    assert response.status_code == 503
    assert "waited in the queue" in response.json()["error"]["message"]
    assert waited >= QUEUE_TIMEOUT_S
    assert fair_waited < QUEUE_TIMEOUT_S + 1.5


def test_an_aborted_request_in_the_queue_answers_without_being_computed(http: httpx.Client, rpc: RpcClient) -> None:
    with running(http, rpc), concurrent.futures.ThreadPoolExecutor() as pool:
        queued = pool.submit(complete, http, prompt=[7] * 500, rid="queued")
        wait_until(lambda: rpc.call(GetLoadReqInput()).waiting == 1, PATIENCE_S, "one in the queue")
        assert rpc.call(AbortReqInput(rids=("queued",))).aborted == ("queued",)
        answer = queued.result(PATIENCE_S).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == 0
    cached = complete(http, prompt=[7] * 500).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 0, "nothing of it was computed"


# ---- usage, streams, health ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_right_under_chunked_prefill(http: httpx.Client, stream: bool) -> None:
    """Chunks of 16 tokens."""
    prompt = [200 + stream + n % 7 for n in range(150)]
    options = {"stream": stream, "stream_options": {"include_usage": True} if stream else None, "ignore_eos": True}
    response = complete(http, prompt=prompt, **options)
    answer = json.loads(response.text.split("\n\n")[-3].removeprefix("data: ")) if stream else response.json()
    assert answer["usage"] == {
        "prompt_tokens": 150,
        "completion_tokens": 2,
        "total_tokens": 152,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_events_are_framed_and_come_every_two_tokens(http: httpx.Client) -> None:
    """The first token at once, then an event every --stream-interval tokens."""
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    response = http.post("/generate", json=body)
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-1])
    counts = [json.loads(frame[6:])["meta_info"]["completion_tokens"] for frame in frames[:-2]]
    assert counts == [1, 3, 5, 7, 9]


def test_health_answers_fast_idle_and_busy(http: httpx.Client, rpc: RpcClient) -> None:
    def times() -> list[float]:
        seen = []
        for _ in range(20):
            began = fair_time()
            assert http.get("/health").status_code == 200
            seen.append(fair_time() - began)
        return seen

    idle = times()
    with running(http, rpc):
        busy = times()
    assert statistics.median(idle) < 0.05
    assert statistics.median(busy) < 0.05
    assert max(idle + busy) < 2.0


def test_the_server_info_has_the_options_in_effect(http: httpx.Client, rpc: RpcClient) -> None:
    options = http.get("/server_info").json()["options"]
    assert options == rpc.call(GetStatusReqInput()).options
    assert {"auto", None}.isdisjoint(options[name] for name in ("dtype", "device", "max_model_len", "max_total_tokens"))


def test_health_is_200_while_paused(http: httpx.Client, rpc: RpcClient) -> None:
    rpc.call(PauseGenerationReqInput(mode="retract"))
    try:
        assert http.get("/health").status_code == 200
        wait_until(lambda: http.get("/server_info").json()["state"] == "paused", 5, "the news of the pause")
    finally:
        rpc.call(ContinueGenerationReqInput())
    assert complete(http).status_code == 200


def test_gauges_reach_zero_promptly(http: httpx.Client, rpc: RpcClient) -> None:
    def gauge(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"llmserve_{name} "))

    with running(http, rpc):
        wait_until(lambda: gauge("num_requests_running") == 1, 5, "the gauge's rise")
        assert gauge("kv_tokens_used") > 0
    wait_until(lambda: gauge("num_requests_running") == 0 and gauge("kv_tokens_used") == 0, 2, "zero")
    assert gauge("num_requests_waiting") == 0


# ---- the operators' routes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def admin(instance: RunningInstance) -> Iterator[httpx.Client]:
    with instance.client(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as client:
        yield client


def test_a_flush_empties_the_cache_and_refuses_while_requests_run(
    http: httpx.Client, rpc: RpcClient, admin: httpx.Client
) -> None:
    def cached() -> int:
        usage = complete(http, prompt=[300 + n % 5 for n in range(100)]).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    with running(http, rpc):
        busy = admin.post("/flush_cache", json={})
        assert busy.status_code == 409
        assert "1" in busy.json()["error"]["message"]
    assert admin.post("/flush_cache", json={}).json()["pages_freed"] > 0
    assert cached() == 0


def test_an_abort_over_http_says_what_it_found(http: httpx.Client, rpc: RpcClient, admin: httpx.Client) -> None:
    with running(http, rpc, rid="runaway"):
        answer = admin.post("/abort_request", json={"rid": ["runaway", "runawa"]}).json()
        assert answer == {"aborted": ["runaway"], "not_found": ["runawa"]}
        assert admin.get("/get_load").json()["running"] == 0


def test_a_pause_over_http_holds_requests_until_it_ends(
    http: httpx.Client, rpc: RpcClient, admin: httpx.Client
) -> None:
    with running(http, rpc):
        assert admin.post("/pause_generation", json={"mode": "retract"}).json() == {"retracted": 1, "aborted": 0}
        step = rpc.call(PingReqInput()).step
        time.sleep(0.2)
        assert rpc.call(PingReqInput()).step == step
        assert admin.post("/continue_generation", json={}).status_code == 200
        wait_until(lambda: rpc.call(PingReqInput()).step > step + 3, PATIENCE_S, "steps")


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(http: httpx.Client, admin: httpx.Client) -> None:
    before = complete(http, temperature=0).json()["choices"][0]["text"]
    missing = admin.post("/update_weights_from_disk", json={"model_path": "/nowhere/at/all"})
    assert missing.status_code == 400
    assert "/nowhere/at/all" in missing.json()["error"]["message"]
    assert complete(http, temperature=0).json()["choices"][0]["text"] == before
