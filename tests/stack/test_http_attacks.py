"""HTTP attacks on a real instance. After each the process lives, memory is flat, and the next good request succeeds."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from instances import PATIENCE_S, RunningInstance, fair_time, wait_until
from llmserve.runtime.client import RpcClient
from llmserve.runtime.messages import ContinueGenerationReqInput, PauseGenerationReqInput

MB = 1 << 20
VOCABULARY = 1000
CONTEXT = 512
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(server: RunningInstance) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def survives(server: RunningInstance, http: httpx.Client) -> Iterator[None]:
    """What is true after every attack."""
    assert serves(http)
    processes = server.processes()
    before, log = memory(processes), len(server.log_text())
    yield
    assert serves(http)
    assert server.processes() == processes
    wait_until(lambda: memory(processes) - before < 64 * MB, 10, "the memory's return")  # malloc may take its time
    assert "Traceback" not in server.log_text()[log:]
    assert "\x1b" not in server.log_text()


def serves(http: httpx.Client) -> bool:
    answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    return answer.status_code == 200 and http.get("/health").status_code == 200


def memory(processes: list[psutil.Process]) -> int:
    return int(sum(process.memory_info().rss for process in processes))


def refused(http: httpx.Client, path: str, param: str, **body: Any) -> dict[str, Any]:
    """The error of a 400 that names `param`."""
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 10**6),
        ("n", 10**30),
        ("max_tokens", 10**9),
        ("logprobs", 10**6),
        ("logprobs", VOCABULARY + 1),
        ("logit_bias", {str(VOCABULARY): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"99999999999999999999": 1}),
        ("logit_bias", {"5": 101}),
        ("stop_token_ids", [VOCABULARY]),
        ("stop", [chr(97 + n) * 300 for n in range(3)]),
        ("stop", [str(n) for n in range(1000)]),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("min_tokens", 10**9),
        ("prompt", [VOCABULARY]),
        ("prompt", [2**40]),
        ("prompt", ["a"] * 5000),
    ],
)
def test_numbers_out_of_range(http: httpx.Client, param: str, value: object) -> None:
    refused(http, "/v1/completions", param, **{"prompt": "a", param: value})


def test_top_logprobs_above_the_vocabulary(http: httpx.Client) -> None:
    refused(http, "/v1/chat/completions", "top_logprobs", messages=HI, logprobs=True, top_logprobs=VOCABULARY + 1)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-7, 2.0])
def test_extreme_temperatures_are_served(http: httpx.Client, temperature: float) -> None:
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
    greedy, answer = (http.post("/v1/completions", json={**body, "temperature": t}).json() for t in (0, temperature))
    if temperature < 1:
        assert answer["choices"][0]["text"] == greedy["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings"])
def test_an_over_long_prompt_is_refused_and_never_cut(http: httpx.Client, path: str, stream: bool) -> None:
    text = "word " * CONTEXT
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/generate": {"text": text},
        "/v1/embeddings": {"input": text},
    }[path]
    if path != "/v1/embeddings":
        body["stream"] = stream
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert str(CONTEXT) in response.json()["error"]["message"]


def test_a_prompt_that_fits_but_leaves_no_room_is_refused_with_the_numbers(http: httpx.Client) -> None:
    tokens = [5] * (CONTEXT - 10)
    error = refused(http, "/v1/completions", "max_tokens", prompt=tokens, max_tokens=11)
    assert "10 tokens" in error["message"]
    answer = http.post("/v1/completions", json={"prompt": tokens, "max_tokens": 10, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize(
    ("path", "prompt"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HI})]
)
@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
        ("guided_regex", "(a+)+$"),
        ("guided_json", {"type": "object"}),
        ("regex", "((((a*)*)*)*)*b"),
    ],
)
def test_wrong_schemas_and_the_words_of_others_are_refused(
    http: httpx.Client, path: str, prompt: dict[str, Any], param: str, value: object
) -> None:
    refused(http, path, param, **prompt, **{param: value})


def test_a_catastrophic_stop_string_is_no_regex(http: httpx.Client) -> None:
    began = fair_time()
    body = {"prompt": "a" * 200, "stop": ["(a+)+$", "a" * 200 + "b"], "max_tokens": 16, "logit_bias": {"68": 50}}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert fair_time() - began < 5


def test_a_rid_in_use_is_refused_and_its_owner_is_not_disturbed(server: RunningInstance, http: httpx.Client) -> None:
    """The owner is held by a pause until the other one has been refused."""
    body = {"text": "a", "rid": "one", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    with RpcClient(server.record["rpc_addresses"][0], PATIENCE_S) as rpc, ThreadPoolExecutor() as pool:
        rpc.call(PauseGenerationReqInput(mode="retract"))
        try:
            first = pool.submit(http.post, "/generate", json=body)
            wait_until(lambda: server.requests() == 1, PATIENCE_S, "the owner's arrival")
            assert "in flight" in refused(http, "/generate", "rid", text="b", rid="one")["message"]
        finally:
            rpc.call(ContinueGenerationReqInput())
        meta = first.result(PATIENCE_S).json()["meta_info"]
    assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == ("length", 50)
    assert http.post("/generate", json={"text": "b", "rid": "one"}).status_code == 200, "it is free again"


@pytest.mark.parametrize("rid", ["\x1b[2J\x1b[1;1H", "\r\nInjected: yes", "a\x00b", "\x9b31m", "‮evil"])
def test_control_characters_in_a_rid(http: httpx.Client, rid: str) -> None:
    refused(http, "/generate", "rid", text="a", rid=rid)


def test_control_characters_in_paths_and_models_and_users(http: httpx.Client) -> None:
    assert http.get("/%1b%5b2J").status_code == 404
    response = http.post("/v1/completions", json={"prompt": "a", "model": "\x1b[2J\n"})
    assert response.status_code == 404
    assert "\x1b" not in response.text
    assert http.post("/v1/completions", json={"prompt": "\x1b[2J", "user": "\x1b[2J\nx"}).status_code == 200


def raw(server: RunningInstance, *pieces: bytes) -> bytes:
    """What the server says to these bytes. It may hang up before it has read them all."""
    with socket.create_connection(("127.0.0.1", server.record["port"]), timeout=PATIENCE_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            return connection.recv(65536)
        except ConnectionResetError:
            return b""


def test_a_10_mb_header(server: RunningInstance) -> None:
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: ", *[b"a" * MB] * 10, b"\r\n\r\n")
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_a_million_headers(server: RunningInstance) -> None:
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: x\r\n", *[b"X-A: b\r\n" * 100_000] * 10, b"\r\n")
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_a_10_mb_url(server: RunningInstance) -> None:
    answer = raw(server, b"GET /", *[b"a" * MB] * 10, b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400", b"HTTP/1.1 414"))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_100_mb_body(server: RunningInstance, chunked: bool) -> None:
    main = psutil.Process(server.process.pid)
    before = main.memory_info().rss
    if chunked:
        pieces = [b"100000\r\n" + b" " * MB + b"\r\n"] * 100
        answer = raw(server, JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *pieces, b"0\r\n\r\n")
    else:
        answer = raw(server, JSON_HEAD + b"Content-Length: %d\r\n\r\n" % (100 * MB), *[b" " * MB] * 100)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"error":{' in answer
    assert main.memory_info().rss - before < 80 * MB


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
    ],
)
def test_bytes_that_are_hardly_http(server: RunningInstance, data: bytes) -> None:
    answer = raw(server, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 "), answer


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 500_000 + b"1" + b"}" * 500_000 + b"}",
        b'{"messages": [{"role": "user", "content": [' + b'{"a":' * 300_000 + b"1" + b"}" * 300_000 + b"]}]}",
    ],
)
def test_bodies_that_are_hardly_json(http: httpx.Client, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text


def test_a_huge_prompt_is_refused_before_it_is_tokenized(http: httpx.Client) -> None:
    began = fair_time()
    refused(http, "/v1/completions", "prompt", prompt="a b " * 5_000_000)
    refused(http, "/tokenize", "prompt", prompt="a b " * 5_000_000)
    refused(http, "/v1/completions", "prompt", prompt="a b " * 5_000_000, echo=True)
    assert fair_time() - began < 6


def test_a_client_that_never_reads_stalls_nobody(server: RunningInstance, http: httpx.Client) -> None:
    body = json.dumps(
        {"prompt": ["a"] * 8, "max_tokens": 300, "stream": True, "ignore_eos": True, "logprobs": 20}
    ).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.record["port"]))
        connection.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.5)
        for _ in range(3):
            assert serves(http)


def test_connections_that_say_nothing(server: RunningInstance, http: httpx.Client) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.record["port"])) for _ in range(300)]
    for connection in connections[::2]:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert serves(http)
    for connection in connections:
        connection.close()
