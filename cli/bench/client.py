"""A timed, streamed HTTP request, with as little overhead as possible: only asyncio and a parser in C."""

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec


class Answer(msgspec.Struct, kw_only=True):
    """The outcome of one request. Times are in seconds since it was sent; `error` is empty on success."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    last_s: float = 0.0
    """Time of the last text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """By the usage that the server reports, else the number of events with text."""
    error: str = ""

    @property
    def itl_s(self) -> float | None:
        """The mean time between tokens; None with fewer than two."""
        return (self.last_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct):
    """The fields of an event, or of a whole answer, that are counted."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Request:
    """Sends requests to one server, which has `timeout_s` seconds for each whole answer."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        lines = [f"POST {parts.path}/v1/completions HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        lines += ["Content-Type: application/json", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = "\r\n".join(lines)

    async def send(self, body: dict[str, Any]) -> Answer:
        """Sends a body and reads the whole answer. Never raises: errors are in the Answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._send(body)
        except TimeoutError:
            return Answer(error=f"no whole answer came in {self._timeout_s:g} s; see --timeout")

    async def _send(self, body: dict[str, Any]) -> Answer:
        payload = json.dumps(body).encode()
        reading = Reading()
        parser = httptools.HttpResponseParser(reading)
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
        except OSError as error:
            reading.answer.error = f"cannot connect to {self._host}:{self._port}: {error.strerror or error}"
            return reading.answer
        try:
            writer.write(f"{self._head}\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload)
            while not reading.complete and (data := await reader.read(65536)):
                parser.feed_data(data)
            return reading.end(parser.get_status_code() if reading.headed else 0)
        except (OSError, httptools.HttpParserError) as error:
            reading.answer.error = f"the connection broke: {error}"
            return reading.answer
        finally:
            writer.close()


class Reading:
    """The parser's callbacks, which split the body into events as it comes."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.headed = self.complete = False
        self._began = time.perf_counter()
        self._rest = b""
        self._streamed = self._done = self._counted = False

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streamed = value.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        self._rest += data
        if self._streamed:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        self.complete = True

    def end(self, status: int) -> Answer:
        """The answer, after the end of the response."""
        answer = self.answer
        answer.e2e_s = time.perf_counter() - self._began
        if status != 200:
            answer.error = f"HTTP {status}: {self._rest.decode(errors='replace')[:200]}" if status else "no answer came"
        elif not self._streamed:
            self._take(self._rest)
        elif not self._done and not answer.error:
            answer.error = "the stream ended without a finish_reason and [DONE]"
        return answer

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = msgspec.json.decode(data, type=Event)
        except msgspec.DecodeError as error:
            self.answer.error = f"the answer cannot be read: {error}"
            return
        if event.error is not None:
            self.answer.error = str(event.error)
        if any(choice.text for choice in event.choices):
            self.answer.last_s = time.perf_counter() - self._began
            self.answer.output_tokens += not self._counted
            self.answer.ttft_s = self.answer.ttft_s or self.answer.last_s
        if any(choice.finish_reason for choice in event.choices):
            self._done = True  # some servers send no [DONE]
        if event.usage is not None:
            self._counted = True
            details = event.usage.prompt_tokens_details
            self.answer.prompt_tokens = event.usage.prompt_tokens
            self.answer.output_tokens = event.usage.completion_tokens
            self.answer.cached_tokens = details.cached_tokens if details else 0
