"""An instance of which only the RPC socket is real, and a way to run a command in this process."""

import io
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from llmserve.cli.console import Console
from llmserve.cli.main import app
from llmserve.runtime.instance import acquire
from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    ControlReqInput,
    GetLoadReqInput,
    GetLoadReqOutput,
    ListRequestsReqInput,
    ListRequestsReqOutput,
    Message,
    PingReqInput,
    PingReqOutput,
    RequestInfo,
    RpcEnvelope,
    RpcError,
)
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.wire import Poller, Router, decode, encode

Handler = Callable[[Any], Message | list[Message]]


class FakeInstance:
    """Answers RPCs from `handlers` (request type -> answer, or progress and answer) and keeps what it was asked."""

    def __init__(self, name: str = "fake", protocol: int = PROTOCOL_VERSION) -> None:
        self.requests: list[Message] = []
        self.running: list[RequestInfo] = []
        self.handlers: dict[type, Handler] = {
            PingReqInput: lambda _: PingReqOutput(step=7, state="ready"),
            ListRequestsReqInput: lambda _: ListRequestsReqOutput(requests=tuple(self.running)),
            GetLoadReqInput: lambda _: GetLoadReqOutput(
                state="ready", running=2, waiting=1, kv_tokens_used=30, kv_tokens_cached=20, kv_tokens_total=100
            ),
        }
        self._protocol = protocol
        self.instance = acquire(name)
        address = PortArgs.init_new(self.instance.directory).rpc_ipc_name
        self.instance.update(
            state="ready",
            host="127.0.0.1",
            port=31700,
            model="some/model",
            served_model_names=("model",),
            rpc_addresses=(address,),
        )
        self._router = Router(address)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poller = Poller(self._router)
        while not self._ends.is_set():
            poller.wait(0.02)
            while (received := self._router.recv()) is not None:
                client, envelope = received
                request = decode(envelope.body, ControlReqInput)
                self.requests.append(request)
                answers = self.handlers.get(type(request), refuse)(request)
                for answer in answers if isinstance(answers, list) else [answers]:
                    self._router.send(
                        client,
                        RpcEnvelope(
                            protocol=self._protocol, call_id=envelope.call_id, timeout_s=0.0, body=encode(answer)
                        ),
                    )
        self._router.close()

    def __enter__(self) -> "FakeInstance":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()
        self.instance.release()


def refuse(_: Message) -> Message:
    return RpcError(code="invalid", message="not answered here")


def request_info(rid: str, **fields: Any) -> RequestInfo:
    """A running request, a minute old, but for `fields`."""
    values: dict[str, Any] = {
        "index": 0,
        "state": "decode",
        "age_s": 60.0,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 50,
        "max_new_tokens": 200,
        "tokens_per_s": 12.5,
        "ttft_s": 0.25,
        "retractions": 0,
    }
    return RequestInfo(rid=rid, **(values | fields))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Ended:
    """How a command ended, and what it wrote."""

    def __init__(self, code: int, console: Console) -> None:
        assert isinstance(console.stdout, io.StringIO)
        assert isinstance(console.stderr, io.StringIO)
        self.code = code
        self.out = console.stdout.getvalue()
        self.err = console.stderr.getvalue()


def run(*arguments: str, stdin: str = "", terminal: bool = False, **environ: str) -> Ended:
    """Runs `llmserve ARGUMENTS` in this process, off (or on) a terminal."""
    stream = Terminal if terminal else io.StringIO
    console = Console(stream(stdin), stream(), stream(), environ)
    with pytest.raises(SystemExit) as ended:
        app(list(arguments), prog_name="llmserve", obj=console)
    return Ended(int(ended.value.code or 0), console)


def fresh_registry(monkeypatch: pytest.MonkeyPatch, path: os.PathLike[str]) -> None:
    """Makes `path` the place of the instance directories."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(path))
    for name in [name for name in os.environ if name.startswith("LLMSERVE_")]:
        monkeypatch.delenv(name)
