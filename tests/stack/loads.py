"""Requests that last, held open by threads, for tests of what happens to them; and requests that come all at once."""

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from instances import PATIENCE_S, RunningInstance, wait_until
from llmserve import Engine
from llmserve.runtime.client import AsyncRpcClient
from llmserve.runtime.messages import ContinueGenerationReqInput, GetLoadReqInput, PauseGenerationReqInput

T = TypeVar("T")


class OpenRequest:
    """A completion that generates `max_tokens` tokens in a thread. After `wait`, what its client saw.

    `events` are the SSE data of a stream, parsed ("[DONE]" as it is); `status` and `body` are those of a plain answer;
    `broken` is set when the connection was cut.
    """

    def __init__(self, instance: RunningInstance, max_tokens: int, stream: bool) -> None:
        self.events: list[Any] = []
        self.status = 0
        self.body: dict[str, Any] = {}
        self.broken = ""
        self._url = f"{instance.url}/v1/completions"
        self._request = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._request, timeout=3 * PATIENCE_S) as response:
                self.status = response.status_code
                if self._request["stream"] and self.status == 200:
                    for line in lines_of(response):
                        if line.startswith("data: "):
                            data = line.removeprefix("data: ")
                            self.events.append(data if data == "[DONE]" else json.loads(data))
                else:
                    self.body = json.loads(response.read())
        except httpx.HTTPError as error:
            self.broken = repr(error)

    def wait(self, seconds: float) -> None:
        """Waits until the client has its whole answer, at most so many seconds."""
        wait_until(lambda: not self.going, seconds, "the whole answer")

    @property
    def going(self) -> bool:
        return self._thread.is_alive()

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that the client was told, in the stream or as the answer."""
        last = self.events[-1] if self.events else self.body
        return last.get("error") if isinstance(last, dict) else None


def lines_of(response: httpx.Response) -> Iterator[str]:
    """By newlines alone: what a model with random weights says has every other kind of line end too."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode() for line in lines)


SOME = 4000
"""Tokens that take more than a second, four at once: for what happens meanwhile, and is over soon after."""


@contextmanager
def load(instance: RunningInstance, max_tokens: int, streams: int = 2, plain: int = 2) -> Iterator[list[OpenRequest]]:
    """Open requests, all of them admitted and the streams under way."""
    requests = admitted(instance, max_tokens, streams, plain)
    wait_until(lambda: all(request.events for request in requests[:streams]), PATIENCE_S, "the first event of each")
    yield requests


def admitted(instance: RunningInstance, max_tokens: int, streams: int, plain: int) -> list[OpenRequest]:
    """Open requests, all of them in the scheduler: the streams, then the others."""
    requests = [OpenRequest(instance, max_tokens, stream=True) for _ in range(streams)]
    requests += [OpenRequest(instance, max_tokens, stream=False) for _ in range(plain)]
    wait_until(lambda: instance.requests() == streams + plain, PATIENCE_S, "all requests in the scheduler")
    return requests


async def all_at_once(engine: Engine, requests: Iterable[Coroutine[Any, Any, T]], choices: int) -> list[T]:
    """What requests to an engine give: they begin when so many choices wait in its schedulers, however slowly they come
    there.
    """
    clients = [AsyncRpcClient(address, PATIENCE_S) for address in engine._running().instance.record.rpc_addresses]
    for client in clients:
        await client.call(PauseGenerationReqInput(mode="retract"))
    answers = asyncio.gather(*requests)
    while sum([(await client.call(GetLoadReqInput())).waiting for client in clients]) < choices:
        await asyncio.sleep(0.02)
    for client in clients:
        await client.call(ContinueGenerationReqInput())
        client.close()
    return await answers
