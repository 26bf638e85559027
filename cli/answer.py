"""Asks the running instance for an answer over its OpenAI routes, as any other client would, and streams it.

Shared by `chat` and `generate`. Closing the stream (Ctrl-C included) disconnects, and that aborts the request.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmserve.cli.common import CommandError, ExitCode
from llmserve.cli.console import CONTROL_PICTURES, Console
from llmserve.cli.keys import checked_key, key_in
from llmserve.cli.patience import Patience
from llmserve.runtime.listener import url_of

if TYPE_CHECKING:
    import httpx

    from llmserve.runtime.instance import InstanceRecord

EXIT_OF_STATUS = {
    400: ExitCode.USAGE,
    401: ExitCode.DENIED,
    403: ExitCode.DENIED,
    404: ExitCode.NOT_FOUND,
    429: ExitCode.BUSY,
    503: ExitCode.UNAVAILABLE,
}
TERMINAL_SAFE = {code: shown for code, shown in CONTROL_PICTURES.items() if chr(code) not in "\n\t"}

MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=1, metavar="N", help="The most tokens to generate.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="T",
        min=0.0,
        max=2.0,
        help="The sampling temperature; 0 always takes the likeliest token.",
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", min=0.0, max=1.0, help="Sample from the likeliest tokens with this total probability."
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Make sampling repeatable.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop before this text; may be repeated.")
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="The file that holds the instance's API key, if it has one (or set LLMSERVE_API_KEY).",
    ),
]
GapOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait for the next token.")
]


class Answer:
    """One streamed answer: iterate over its pieces of text; the other attributes are right once that has ended.

    While none comes because the instance is paused, `console` is told so. Raises CommandError for what the server
    refuses, and when the connection fails.
    """

    def __init__(
        self,
        console: Console,
        record: "InstanceRecord",
        route: str,
        body: dict[str, Any],
        api_key: str | None,
        gap_s: float,
    ) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.ttft_s = 0.0
        self.seconds = 0.0
        self._console = console
        self._record = record
        self._url = f"{url_of(record.host, record.port)}{route}"
        told = {k: v for k, v in body.items() if v is not None}
        told |= {"model": record.served_model_names[0], "stream": True, "stream_options": {"include_usage": True}}
        try:
            self._content = json.dumps(told, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # Python reads such bytes of arguments and pipes as lone surrogates
            raise CommandError("the text is not valid UTF-8", ExitCode.USAGE) from None
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._gap_s = gap_s

    def __iter__(self) -> Iterator[str]:
        import httpx

        started = time.monotonic()
        timeout = httpx.Timeout(self._gap_s, connect=5.0)
        try:
            with (
                Patience(self._console, self._record) as patience,
                httpx.Client(timeout=timeout, trust_env=False) as client,
                client.stream("POST", self._url, content=self._content, headers=self._headers) as response,
            ):
                if response.status_code != 200:
                    raise refusal(response)
                for event in events(response):
                    patience.heard()
                    piece = self._take(event)
                    if piece:
                        self.ttft_s = self.ttft_s or time.monotonic() - started
                        self.text += piece
                        yield piece
        except httpx.ConnectError:
            message = f'cannot connect to instance "{self._record.name}" at {self._record.address}'
            raise CommandError(message, ExitCode.UNAVAILABLE) from None
        except httpx.TimeoutException:
            stopped = f" ({self._record.stopped})" if self._record.stopped else ""
            message = f"no token came for {self._gap_s:g} s; see --timeout{stopped}"
            raise CommandError(message, ExitCode.BUSY) from None
        except httpx.RemoteProtocolError:
            raise cut_off() from None
        except httpx.TransportError as error:
            raise CommandError(f"the connection broke: {error}", ExitCode.UNAVAILABLE) from None
        finally:
            self.seconds = time.monotonic() - started

    def _take(self, event: dict[str, Any]) -> str:
        """The new text of one server-sent event."""
        if "error" in event:
            raise CommandError(str(event["error"].get("message", "the server failed")))
        self.usage = event.get("usage") or self.usage
        piece = ""
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            piece += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        return piece

    def show(self) -> None:
        """Streams the answer to stdout; on a terminal control characters are shown instead of executed."""
        console = self._console
        terminal = console.stdout.isatty()
        try:
            for piece in self:
                console.print(piece.translate(TERMINAL_SAFE) if terminal else piece, end="")
        except (CommandError, KeyboardInterrupt):
            if terminal and self.text and not self.text.endswith("\n"):
                console.print()  # so that the message about it begins a line
            raise
        if not self.text.endswith("\n"):
            console.print()

    def summary(self) -> str:
        """One line about the finished answer: tokens, speed, time to the first token."""
        tokens = self.usage.get("completion_tokens", 0)
        prompt = self.usage.get("prompt_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        decode_s = self.seconds - self.ttft_s
        speed = f", {(tokens - 1) / decode_s:.1f} tokens/s" if tokens > 1 and decode_s > 0 else ""
        known = f" ({cached} cached)" if cached else ""
        first = f"first after {self.ttft_s * 1000:.0f} ms"
        return f"{tokens} tokens{speed}, {first}; prompt {prompt}{known}; {self.finish_reason}"

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "ttft_s": round(self.ttft_s, 6),
            "seconds": round(self.seconds, 6),
        }


def piped(console: Console) -> str:
    """What is piped in, without the newline that `echo` and editors end a text with."""
    text = console.stdin.read()
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def events(response: "httpx.Response") -> Iterator[dict[str, Any]]:
    """The JSON payloads of an event stream up to its `[DONE]`; one cut off before that raises CommandError."""
    rest = b""
    for part in response.iter_bytes():
        # Split at newlines only: httpx's iter_lines also splits at characters like U+2028, which JSON may contain.
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise cut_off()


def cut_off() -> CommandError:
    return CommandError("the server closed the connection before the answer ended", ExitCode.UNAVAILABLE)


def refusal(response: "httpx.Response") -> CommandError:
    """The error that an answer other than 200 stands for."""
    response.read()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200].strip() or response.reason_phrase
    code = EXIT_OF_STATUS.get(response.status_code, ExitCode.FAILED)
    hint = "; give the key by --api-key-file or LLMSERVE_API_KEY" if response.status_code == 401 else ""
    return CommandError(f"{message} (HTTP {response.status_code}){hint}", code)


def api_key(console: Console, file: Path | None) -> str | None:
    """The API key from `file`, else from the environment, where an empty one is none. Raises ConfigError."""
    if file is not None:
        return key_in(file)
    key = console.environ.get("LLMSERVE_API_KEY")
    return checked_key(key, "the variable LLMSERVE_API_KEY") if key else None
