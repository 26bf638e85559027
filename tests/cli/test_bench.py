"""`llmserve bench`: the same prompts every time, and numbers that a server with known delays must give."""

import asyncio
import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_instance import run

from llmserve.cli.bench.client import Answer, Request
from llmserve.cli.bench.command import show
from llmserve.cli.bench.load import SUITE, Load, Quantiles, Result, count, put, quantiles, standard_loads
from llmserve.cli.console import Console

FIRST_S, GAP_S = 0.08, 0.02


class Server(ThreadingHTTPServer):
    """Answers with the first token after FIRST_S and one more every GAP_S; keeps the bodies, and the most at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.status = 200
        self.cut = False
        self.finish_reason: str | None = None
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.together = threading.Barrier(1)
        """Streams after those of the warm-up begin when so many have come."""
        self.interrupt_at = 0
        """The body at which the client gets a Ctrl-C, and no answer; counted from 1."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The bodies after those of the warm-up."""
        return self.bodies[2:]


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def parse_request(self) -> bool:
        complete = super().parse_request()
        if complete:
            self.server.paths.append(self.path)
            self.server.keys.append(self.headers["Authorization"])
        return complete

    def do_GET(self) -> None:
        found = {"data": [{"id": "tiny"}]} if self.server.status == 200 else {"error": {"message": "still loading"}}
        self.answer("application/json", json.dumps(found).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        usage = {"prompt_tokens": 10, "completion_tokens": body["max_tokens"]}
        usage |= {"prompt_tokens_details": {"cached_tokens": 4}}
        if self.server.status != 200:
            self.leaves()
            self.answer("application/json", b'{"error": {"message": "full"}}')
        elif not body.get("stream"):
            self.leaves()
            self.answer("application/json", json.dumps({"choices": [{"text": "all"}], "usage": usage}).encode())
        else:
            self.stream(body["max_tokens"], usage if "stream_options" in body else None)

    def leaves(self) -> None:
        """Counted before its client knows."""
        with self.server.lock:
            self.server.at_once -= 1

    def answer(self, kind: str, content: bytes) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, tokens: int, usage: dict[str, Any] | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if len(self.server.bodies) == self.server.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
            self.rfile.read(1)  # until it leaves
            return
        if self.server.measured:
            self.server.together.wait(60)
        for number in range(tokens):
            time.sleep(GAP_S if number else FIRST_S)
            reason = self.server.finish_reason if number == tokens - 1 else None
            self.chunk(json.dumps({"choices": [{"text": " é", "finish_reason": reason}]}, ensure_ascii=False))
        self.leaves()
        if not self.server.cut:
            if usage is not None:
                self.chunk(json.dumps({"choices": [], "usage": usage}))
            self.chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: str) -> None:
        content = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()


def bench(server: Server, *arguments: str) -> dict[str, Any]:
    done = run("bench", "--url", server.url, "--json", *arguments)
    assert done.code == 0, done.err
    (result,) = json.loads(done.out)
    return dict(result)


def test_latencies_and_throughput_are_those_of_the_server(server: Server) -> None:
    """Taken again where the client was held up, so that it saw several tokens at once."""
    server.together = threading.Barrier(4)
    for _ in range(10):
        server.bodies.clear()
        result = bench(server, "-n", "8", "-c", "4", "--output-tokens", "6")
        if result["itl"]["p50"] >= GAP_S and result["ttft"]["p50"] <= result["e2e"]["p50"] - 5 * GAP_S:
            break
    assert (result["ok"], result["output_tokens"], result["prompt_tokens"], result["cached_tokens"]) == (8, 48, 80, 32)
    assert FIRST_S <= result["ttft"]["p50"] <= result["e2e"]["p50"] - 5 * GAP_S
    assert GAP_S <= result["itl"]["p50"] <= (result["e2e"]["p99"] - FIRST_S) / 5
    assert result["output_tokens_per_s"] == pytest.approx(48 / result["seconds"])
    assert result["tokens_per_s"] == pytest.approx(128 / result["seconds"])
    assert server.most_at_once == 4


def test_requests_are_as_asked_for(server: Server) -> None:
    bench(server, "-n", "3", "--output-tokens", "2", "--extra", '{"top_k": 5, "ignore_eos": null}', "--model", "other")
    for body in server.measured:
        assert body.pop("prompt").count(" ") == 127
        assert body == {
            "model": "other",
            "max_tokens": 2,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_k": 5,
        }


def test_the_key_goes_with_every_request(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-the-file\n")
    for options, environ, sent in (
        (["--api-key-file", str(file)], {"LLMSERVE_API_KEY": "from-the-variable"}, "Bearer from-the-file"),
        ([], {"LLMSERVE_API_KEY": "from-the-variable"}, "Bearer from-the-variable"),
        ([], {}, None),
    ):
        server.keys.clear()
        assert run("bench", "--url", server.url, "-n", "1", "--no-stream", *options, **environ).code == 0
        assert server.keys == [sent] * 4  # the models, two of the warm-up


def test_a_terminal_shows_how_far_it_is(server: Server) -> None:
    done = run("bench", "--url", server.url, "-n", "3", "--output-tokens", "1", terminal=True)
    assert "3 of 3" in done.err
    assert "3 of 3" not in done.out


def test_events_are_counted_where_a_server_reports_no_usage(server: Server) -> None:
    result = bench(server, "-n", "2", "--output-tokens", "3", "--extra", '{"stream_options": null}')
    assert (result["output_tokens"], result["prompt_tokens"]) == (6, 0)


def test_the_seed_makes_the_prompts(server: Server) -> None:
    def prompts(*arguments: str) -> set[str]:
        server.bodies.clear()
        bench(server, "-n", "3", "--output-tokens", "1", *arguments)
        return {body["prompt"] for body in server.measured}

    assert prompts("--seed", "1") == prompts("--seed", "1")
    assert not prompts("--seed", "1") & prompts("--seed", "2")


def test_a_shared_prefix_is_the_same_words_in_all() -> None:
    prompts = [prompt.split() for prompt in Load(requests=5, input_words=40, shared=0.75).prompts()]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 5


def test_the_suite_is_what_the_figures_are_quoted_of() -> None:
    shapes = [(load.requests, load.concurrency, load.input_words, load.output_tokens) for load in SUITE]
    assert shapes == [(4, 1, 128, 128), (48, 16, 256, 128), (64, 64, 128, 64), (32, 8, 1056, 32), (8, 2, 2048, 8)]
    w4 = [prompt.split() for prompt in SUITE[3].prompts()]
    assert len({tuple(prompt[:1024]) for prompt in w4}) == 1
    assert len({prompt[1024] for prompt in w4}) > 1


def test_each_load_of_the_suite_has_prompts_of_its_own() -> None:
    """So that what is cached is a load's own: of all but the fourth, which shares a prefix, that is nothing."""
    beginnings = []
    for load in (*standard_loads(0, stream=True), *standard_loads(1, stream=True)):
        prompts = load.prompts()[:1] if load.shared else load.prompts()
        beginnings += [tuple(prompt.split()[:16]) for prompt in prompts + load.warm_up()]
    assert len(set(beginnings)) == len(beginnings)


def test_the_suite_takes_a_seed_and_the_kind_of_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(Load(name=name, requests=2, input_words=20, output_tokens=1) for name in "ab")
    monkeypatch.setattr("llmserve.cli.bench.load.SUITE", small)
    prompts = []
    for arguments in (["--seed", "0"], ["--seed", "1", "--no-stream"]):
        assert run("bench", "--url", server.url, "--suite", *arguments).code == 0
        prompts.append({body["prompt"] for body in server.bodies})
        assert {body.get("stream", False) for body in server.bodies} == {"--no-stream" not in arguments}
        server.bodies.clear()
    assert [len(both) for both in prompts] == [8, 8]  # two of warm-up for each load
    assert not prompts[0] & prompts[1]


def test_the_suite_takes_no_shape(server: Server) -> None:
    for arguments in (["-n", "3"], ["--rate", "2"], ["--output-tokens", "64"]):
        done = run("bench", "--url", server.url, "--suite", *arguments)
        assert done.code == 2
        assert "--suite has its own --" in done.err
    assert not server.bodies


def test_a_rate_starts_requests_whatever_is_under_way(server: Server) -> None:
    server.together = threading.Barrier(20)
    result = bench(server, "-n", "20", "--rate", "200", "--output-tokens", "2")
    assert (server.most_at_once, result["ok"]) == (20, 20)


def test_a_rate_is_an_average_of_random_times(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def send(request: Request, body: dict[str, Any]) -> Answer:
        return Answer()

    monkeypatch.setattr("llmserve.cli.bench.load.asyncio.sleep", sleep)
    monkeypatch.setattr(Request, "send", send)
    load = Load(requests=500, rate=50.0, input_words=1)
    for _ in range(2):
        asyncio.run(put(load, "http://nowhere", "m", {}, {}, timeout_s=1.0, on_answer=lambda: None))
    assert len(waits) == 2 * 499
    assert waits[:499] == waits[499:], "the same for the same seed"
    assert sum(waits) / len(waits) == pytest.approx(1 / 50, rel=0.1)
    assert sum(wait < 0.5 / 50 for wait in waits) / len(waits) == pytest.approx(0.39, abs=0.05), "1 - exp(-1/2)"


def test_without_streams_there_is_no_ttft(server: Server) -> None:
    result = bench(server, "-n", "2", "--no-stream", "--output-tokens", "5")
    assert result["output_tokens"] == 10
    assert result["ttft"]["p50"] is None
    assert result["e2e"]["p50"] > 0


def test_errors_are_counted_and_fail_the_command(server: Server) -> None:
    server.status = 503
    done = run("bench", "--url", server.url, "-n", "3", "--model", "m")
    assert done.code == 1
    assert "3 requests failed: HTTP 503" in done.err
    server.status, server.cut = 200, True
    done = run("bench", "--url", server.url, "-n", "1", "--output-tokens", "1")
    assert done.code == 1
    assert "the stream ended without a finish_reason and [DONE]" in done.err
    server.finish_reason = "length"
    assert run("bench", "--url", server.url, "-n", "1", "--output-tokens", "1").code == 0, "it is whole without [DONE]"


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (503, 69, "still loading (HTTP 503)"),
        (401, 77, "still loading (HTTP 401); give the key by --api-key-file or LLMSERVE_API_KEY"),
        (404, 1, "/v1/models answers HTTP 404; give --model"),
    ],
)
def test_why_a_server_names_no_model_is_said(server: Server, status: int, code: int, says: str) -> None:
    server.status = status
    done = run("bench", "--url", server.url, "-n", "1")
    assert (done.code, done.out) == (code, "")
    assert done.err.endswith(f"{says}\n")


def test_a_server_that_hangs_is_an_error_after_the_timeout(server: Server) -> None:
    """It takes half a second for the answers, which would all be good."""
    done = run("bench", "--url", server.url, "-n", "2", "--output-tokens", "20", "--timeout", "0.2")
    assert done.code == 1
    assert "2 requests failed: no whole answer came in 0.2 s" in done.err


def test_a_server_that_is_not_there() -> None:
    assert run("bench", "--url", "http://127.0.0.1:1", "-n", "1").code == 69
    done = run("bench", "--url", "http://127.0.0.1:1", "-n", "1", "--model", "m")
    assert done.code == 1
    assert "cannot connect to 127.0.0.1:1" in done.err


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://[", "http://x:99999", "http://a..b"]
)
def test_a_url_that_is_none_is_a_usage_error(url: str) -> None:
    done = run("bench", "--url", url, "-n", "1", "--model", "m")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"--url {url}: expected a server's URL" in done.err


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_the_url_may_be_that_of_the_api(server: Server, end: str) -> None:
    assert run("bench", "--url", f"{server.url}{end}", "-n", "1", "--output-tokens", "1").code == 0
    assert set(server.paths) == {"/v1/models", "/v1/completions"}


def test_extra_must_be_an_object(server: Server) -> None:
    assert run("bench", "--url", server.url, "--extra", "[1]").code == 2
    assert run("bench", "--url", server.url, "--extra", "{").code == 2


def tables(out: str) -> list[list[dict[str, str]]]:
    """The rows of each table by the names of its columns, of which equal ones are numbered."""
    found = []
    for table in out.split("\n\n"):
        header, *rows = (re.split(" {2,}", line.strip()) for line in table.splitlines())
        names = [f"{name} {header[:i].count(name)}" if name in header[:i] else name for i, name in enumerate(header)]
        found.append([dict(zip(names, row, strict=True)) for row in rows])
    return found


def test_the_tables_fit_into_80_columns_and_have_all_figures() -> None:
    slow = Quantiles(p50=0.123, p95=83.0, p99=0.2)
    result = Result(
        load=SUITE[2], ok=1021, errors={"HTTP 500": 3}, seconds=125.0, prompt_tokens=300_000, cached_tokens=120_000,
        output_tokens=90_000, requests_per_s=1234.5, output_tokens_per_s=12345.6, tokens_per_s=123456.7,
        ttft=slow, itl=Quantiles(p50=0.00411, p95=0.0052, p99=0.123), e2e=slow, cpu_share=0.61,
    )  # fmt: skip
    out, err = io.StringIO(), io.StringIO()
    show(Console(io.StringIO(), out, err, {}), [result])
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert tables(out.getvalue()) == [
        [
            {"LOAD": "W3 sixty-four clients", "REQS": "1021", "ERRORS": "3", "TIME": "2m05s", "REQ/S": "1234.50"}
            | {"OUT TOK/S": "12345.6", "TOK/S": "123456.7", "CACHED": "40%"}
        ],
        [
            {"LOAD": "W3", "TTFT p50": "123ms", "p95": "1m23s", "p99": "200ms"}
            | {"ITL p50": "4.1ms", "p95 1": "5.2ms", "p99 1": "123ms"}
            | {"E2E p50": "123ms", "p95 2": "1m23s", "p99 2": "200ms"}
        ],
    ]
    assert err.getvalue().splitlines() == [
        "llmserve: W3 sixty-four clients: 3 requests failed: HTTP 500",
        "W3 sixty-four clients: the load generator itself took 61% of a core",
    ]


@pytest.mark.parametrize(
    ("at", "shown"), [(1, []), (4, ["a"]), (7, ["a", "b"])], ids=["warm-up of a", "warm-up of b", "in b"]
)
def test_ctrl_c_gives_the_figures_so_far(
    server: Server, monkeypatch: pytest.MonkeyPatch, at: int, shown: list[str]
) -> None:
    """The bodies are two of the warm-up and one of a, two of the warm-up and two of b."""
    loads = (Load(name="a", requests=1, output_tokens=1), Load(name="b", requests=2, output_tokens=1, concurrency=1))
    monkeypatch.setattr("llmserve.cli.bench.load.SUITE", loads)
    server.interrupt_at = at
    done = run("bench", "--url", server.url, "--suite")
    assert done.code == 130
    rates = tables(done.out)[0] if shown else []
    assert [(row["LOAD"], row["REQS"]) for row in rates] == [(name, "1") for name in shown]
    assert ("b: interrupted after 1 of 2 requests\n" in done.err) == ("b" in shown)


def test_quantiles_are_values_that_occurred() -> None:
    found = quantiles([float(value) for value in range(1, 101)])
    assert (found.p50, found.p95, found.p99) == (50.0, 95.0, 99.0)
    assert quantiles([7.0]).p99 == 7.0
    assert quantiles([]).p50 is None


def test_a_request_that_failed_counts_in_nothing_else() -> None:
    good = Answer(ttft_s=1.0, last_s=2.0, e2e_s=2.0, output_tokens=11, prompt_tokens=5)
    result = count(Load(), [good, Answer(error="HTTP 500"), Answer(error="HTTP 500")], seconds=2.0, cpu_s=1.0)
    assert (result.ok, result.errors) == (1, {"HTTP 500": 2})
    assert (result.requests_per_s, result.output_tokens_per_s, result.cpu_share) == (0.5, 5.5, 0.5)
    assert result.itl.p50 == pytest.approx(0.1)
