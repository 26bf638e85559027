"""`chat` and `generate` against a front that speaks the OpenAI protocol and records what it is asked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_instance import FakeInstance, fresh_registry, run

from instances import wait_until
from llmserve.cli import chat, common, generate, patience
from llmserve.cli.console import Console
from llmserve.runtime.instance import InstanceRecord
from llmserve.runtime.messages import GetLoadReqInput, GetLoadReqOutput


class Front(ThreadingHTTPServer):
    """Answers each POST with `events` (or `status` and `error`), and keeps the bodies and headers it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pieces = ["Hello", ", wor", "ld"]
        self.status = 200
        self.last: list[Any] = []
        self.chunked = False
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.before: Callable[[], object] = lambda: None
        """Called before the first piece."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left, as some are to do."""


class Handler(BaseHTTPRequestHandler):
    server: Front

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        if self.server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.server.status != 200:
            self.wfile.write(json.dumps({"error": {"message": "the prompt is too long"}}).encode())
            return
        self.server.before()
        for piece in self.server.pieces:
            choice = {"delta": {"content": piece}} if self.path == "/v1/chat/completions" else {"text": piece}
            self.event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        for event in self.server.last or [
            {"choices": [{"index": 0, "finish_reason": "stop", "text": "", "delta": {}}]},
            {"choices": [], "usage": usage},
            "[DONE]",
        ]:
            self.event(event)

    def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        content = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content) if self.server.chunked else content)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    server = Front()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    record = InstanceRecord(
        name="t",
        host="0.0.0.0",
        port=server.server_port,
        served_model_names=("tiny",),
        rpc_addresses=("ipc:///nowhere/t/rpc.sock",),
    )
    for module in (chat, generate):
        monkeypatch.setattr(module, "find_server", lambda name: record)
    yield server
    server.shutdown()
    server.server_close()


def test_generate_prints_the_text_alone(front: Front) -> None:
    result = run("generate", "Say it", "--max-tokens", "3", "-t", "0", "--top-p", "0.5", "--seed", "9", "--stop", "x")
    assert (result.code, result.out, result.err) == (0, "Hello, world\n", "")
    (body,) = front.bodies
    assert body == {
        "model": "tiny",
        "prompt": "Say it",
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 9,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert front.keys == [None]


def test_generate_sends_the_schema_of_a_file(front: Front, tmp_path: Path) -> None:
    file = tmp_path / "person.json"
    file.write_text('{"type": "object"}')
    assert run("generate", "Ann", "--json-schema", str(file)).code == 0
    assert front.bodies[0]["structured_outputs"] == {"json": '{"type": "object"}'}
    assert run("generate", "Ann", "--json-schema", str(tmp_path / "none")).code == 2


def test_a_line_separator_in_the_text_ends_no_event(front: Front) -> None:
    front.pieces = ["one\u2028two", "\u0085three"]
    result = run("generate", "Say it")
    assert (result.code, result.out) == (0, "one\u2028two\u0085three\n")


def test_chat_sends_its_options(front: Front) -> None:
    options = ("--max-tokens", "3", "-t", "0", "--top-p", "0.5", "--seed", "9", "--stop", "x", "--stop", "y")
    assert run("chat", "Say it", "--system", "Be brief", *options).code == 0
    (body,) = front.bodies
    assert body == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Say it"}],
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 9,
        "stop": ["x", "y"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_generate_reads_the_prompt_from_a_pipe(front: Front) -> None:
    """Less the newline that ends a text, and no more than that."""
    for text, prompt in (("a", "a"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a ", "a ")):
        assert run("generate", "-", stdin=text).code == 0
        assert front.bodies[-1]["prompt"] == prompt


def test_generate_json_is_one_object(front: Front) -> None:
    result = json.loads(run("generate", "x", "--json").out)
    assert result["text"] == "Hello, world"
    assert result["finish_reason"] == "stop"
    assert result["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_the_key_is_sent(front: Front, tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    run("generate", "x", "--api-key-file", str(file))
    run("generate", "x", LLMSERVE_API_KEY="other")
    assert front.keys == ["Bearer s3cret", "Bearer other"]


@pytest.mark.parametrize("content", [b"\xff", b"two words", b"a\nb", b""])
def test_a_file_without_a_key_is_said_to_have_none(front: Front, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    result = run("chat", "x", "--api-key-file", str(file))
    assert (result.code, front.bodies) == (78, [])
    assert f"the key file {file}" in result.err


def test_text_that_is_none_is_a_usage_error(front: Front, tmp_path: Path) -> None:
    """Python gives bytes of arguments and pipes that are not UTF-8 as lone surrogates."""
    for result in (run("generate", "caf\udce9"), run("chat", "-", stdin="caf\udce9"), run("chat", "x", "-s", "\udce9")):
        assert (result.code, front.bodies) == (2, [])
        assert "not valid UTF-8" in result.err
    file = tmp_path / "schema.json"
    file.write_bytes(b'{"title": "\xe9"}')
    result = run("generate", "x", "--json-schema", str(file))
    assert (result.code, front.bodies) == (2, [])
    assert f"cannot read the schema {file}: it is not text" in result.err


@pytest.mark.parametrize(
    ("status", "code"), [(400, 2), (401, 77), (404, 3), (429, 75), (500, 1), (503, common.ExitCode.UNAVAILABLE)]
)
def test_a_refusal_is_an_exit_code_and_the_servers_words(front: Front, status: int, code: int) -> None:
    front.status = status
    result = run("generate", "x")
    assert (result.code, result.out) == (code, "")
    assert f"llmserve: the prompt is too long (HTTP {status})" in result.err


def test_an_error_in_mid_stream_ends_the_command(front: Front) -> None:
    front.last = [{"error": {"message": "the scheduler died"}}, "[DONE]"]
    result = run("generate", "x")
    assert (result.code, result.out) == (1, "Hello, world")
    assert "the scheduler died" in result.err
    assert run("generate", "x", terminal=True).out == "Hello, world\n"  # on a terminal the error has a line of its own


def test_a_stream_without_its_end_is_an_error(front: Front) -> None:
    front.last = [{"choices": []}]
    assert run("generate", "x").code == 69


def test_a_server_that_dies_in_mid_answer_is_said_to_have_closed_the_connection(front: Front) -> None:
    front.chunked, front.last = True, [{"choices": []}]
    result = run("generate", "x")
    assert (result.code, result.out) == (69, "Hello, world")
    assert result.err == "llmserve: the server closed the connection before the answer ended\n"


def test_nothing_listening(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    record = InstanceRecord(
        name="gone", host="127.0.0.1", port=1, served_model_names=("tiny",), rpc_addresses=("ipc:///x",)
    )
    monkeypatch.setattr(generate, "find_server", lambda name: record)
    result = run("generate", "x")
    assert result.code == 69
    assert 'cannot connect to instance "gone" at 127.0.0.1:1' in result.err


def test_escape_codes_reach_a_pipe_and_never_a_terminal(front: Front) -> None:
    front.pieces = ["a\x1b[2J", "b\n\tc"]
    assert run("generate", "x").out == "a\x1b[2Jb\n\tc\n"
    assert "a␛[2Jb\n\tc\n" in run("generate", "x", terminal=True).out


def test_chat_takes_a_message_and_what_is_piped_in(front: Front) -> None:
    result = run("chat", "Summarize:", "--system", "Be brief.", stdin="a long text\n")
    assert result.out == "Hello, world\n"
    assert front.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Summarize:\n\na long text"},
    ]


def test_chat_reads_its_message_where_a_dash_stands(front: Front) -> None:
    assert run("chat", "-", stdin="Hello\n").code == 0
    assert run("chat", "-", stdin="Hi\n", terminal=True).code == 0
    assert [body["messages"][-1]["content"] for body in front.bodies] == ["Hello", "Hi"]
    assert run("chat", "-", stdin="\n").code == 2


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_token_that_does_not_come_is_waited_for_so_long(
    front: Front, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    let_it_go = threading.Event()
    front.before = lambda: let_it_go.wait(60)
    results = [run(command, "Hello", "--timeout", "0.2")]
    monkeypatch.setattr(InstanceRecord, "stopped", "its main process 1 is stopped")
    results.append(run(command, "Hello", "--timeout", "0.2"))
    let_it_go.set()
    assert [(result.code, result.out) for result in results] == [(75, "")] * 2
    waited = "llmserve: no token came for 0.2 s; see --timeout"
    assert [result.err for result in results] == [f"{waited}\n", f"{waited} (its main process 1 is stopped)\n"]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("state", ["paused", "ready"])
def test_a_pause_is_told_once_while_one_waits(
    front: Front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, state: str
) -> None:
    fresh_registry(monkeypatch, tmp_path)
    monkeypatch.setattr(patience, "SILENCE_S", 0.05)
    with FakeInstance("held") as fake:
        load = GetLoadReqOutput(
            state=state, running=0, waiting=1, kv_tokens_used=0, kv_tokens_cached=0, kv_tokens_total=1
        )
        fake.handlers[GetLoadReqInput] = lambda _: load
        record = msgspec.structs.replace(fake.instance.record, port=front.server_port)
        for module in (chat, generate):
            monkeypatch.setattr(module, "find_server", lambda name: record)
        asked = 1 if state == "paused" else 3
        front.before = lambda: (wait_until(lambda: len(fake.requests) >= asked, 60, "the question"), time.sleep(0.2))
        done = run(command, "x")
    told = '"held" is paused; waiting until `llmserve resume -i held` lets it go on\n'
    assert (done.code, done.out) == (0, "Hello, world\n")
    assert done.err == (told if state == "paused" else "")


def test_chat_without_a_message_off_a_terminal_is_a_usage_error(front: Front) -> None:
    assert run("chat").code == 2


def test_chat_keeps_the_conversation(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "/system Rhyme.", "two", "/nonsense", "three"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    result = run("chat", terminal=True, NO_COLOR="1")
    assert result.code == 0
    first, second, third = (body["messages"] for body in front.bodies)
    assert [m["content"] for m in first] == ["one"]
    assert [m["content"] for m in second] == ["Rhyme.", "two"]
    assert [m["content"] for m in third] == ["Rhyme.", "two", "Hello, world", "three"]
    assert "there is no /nonsense" in result.err
    assert "\x1b" not in result.out + result.err


def test_ctrl_c_ends_the_answer_and_not_the_chat(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError()))
    original = Console.print

    def interrupted(self: Console, text: str = "", end: str = "\n") -> None:
        original(self, text, end)
        if text == ", wor" and len(front.bodies) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, "print", interrupted)
    result = run("chat", terminal=True)
    assert result.code == 0
    assert "(ended)" in result.err
    assert [m["content"] for m in front.bodies[1]["messages"]] == ["one", "Hello, wor", "two"]
