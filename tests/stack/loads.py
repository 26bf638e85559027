"""Requests that last, held open by threads, for tests of what happens to them."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from instances import RunningInstance, wait_until


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
            with httpx.stream("POST", self._url, json=self._request, timeout=60) as response:
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
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"no answer within {seconds} s"

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


@contextmanager
def load(instance: RunningInstance, max_tokens: int, streams: int = 2, plain: int = 2) -> Iterator[list[OpenRequest]]:
    """Open requests, all of them admitted and the streams under way."""
    requests = [OpenRequest(instance, max_tokens, stream=True) for _ in range(streams)]
    requests += [OpenRequest(instance, max_tokens, stream=False) for _ in range(plain)]
    wait_until(lambda: all(request.events for request in requests[:streams]), 10, "the first event of each stream")
    wait_until(lambda: instance.requests() == streams + plain, 10, "all requests in the scheduler")
    yield requests


@contextmanager
def load_for(instance: RunningInstance, seconds: float) -> Iterator[list[OpenRequest]]:
    """A load that ends by itself, not before so many seconds: the speed of one request tells how long it must be."""
    for sample_tokens in (1, 256):  # the first request warms up, the second is the measure
        began = time.monotonic()
        OpenRequest(instance, sample_tokens, stream=False).wait(20)
    with load(instance, int(256 * seconds / (time.monotonic() - began))) as requests:
        yield requests
