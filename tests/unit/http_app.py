"""What the HTTP tests share: the app over a FakeTokenizerManager, in process or behind a real uvicorn."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import small_tokenizers
import uvicorn

from fake_tokenizer_manager import FakeTokenizerManager, Script
from instances import PATIENCE_S
from llmserve.runtime.client import RpcCallError
from llmserve.runtime.config import Secrets, ServerArgs
from llmserve.runtime.messages import Message
from llmserve.runtime.models.configs import ModelConfig
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.models.sampling_defaults import SamplingDefaults
from llmserve.runtime.server.app import build_app
from llmserve.runtime.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
MODEL = "tiny"
NO_KEYS = Secrets()


def make_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), directory))


class FakeRpc:
    """Replicas, numbered, that all give the test's answer, or raise it, after `delay_s`."""

    def __init__(self) -> None:
        self.numbers = [0]
        self.answer: Message | RpcCallError = RpcCallError("unavailable", "the instance is dead")
        self.calls: list[tuple[Message, float]] = []
        self.cancelled = False
        self.delay_s = 0.0

    async def each(self, request: Message, timeout_s: float) -> dict[int, Message]:
        self.calls.append((request, timeout_s))
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.answer, RpcCallError):
            raise self.answer
        return dict.fromkeys(self.numbers, self.answer)


class App:
    """`http` talks to the app; `manager` is the fake behind it."""

    def __init__(
        self, tokenizer: Tokenizer, script: Script | None = None, secrets: Secrets = NO_KEYS, **options: object
    ) -> None:
        self.manager = FakeTokenizerManager(tokenizer, script)
        self.rpc = FakeRpc()
        config = ModelConfig(
            **{"architecture": "LlamaForCausalLM", "model_type": "llama", "implementation": "decoder"},
            **{"vocab_size": tokenizer.vocab_size, "hidden_size": 8, "num_layers": 1, "num_heads": 1},
            **{"num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 512, "dtype": "float32"},
            **{"tie_word_embeddings": True, "eos_token_ids": (1,)},
        )
        checkpoint = Checkpoint(
            path="/m/tiny", format="safetensors", name=MODEL, tokenizer_dir="/m/tiny", config=config
        )
        sampling_defaults = options.pop("sampling", SamplingDefaults())
        args = ServerArgs(model="/m/tiny", **options)  # type: ignore[arg-type]
        self.asgi = build_app(
            tokenizer_manager=self.manager,  # type: ignore[arg-type]
            args=args,
            options=msgspec.to_builtins(args) | {"dtype": "float32"},
            secrets=secrets,
            checkpoint=checkpoint,
            sampling_defaults=sampling_defaults,  # type: ignore[arg-type]
            rpc=self.rpc,  # type: ignore[arg-type]
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.asgi), base_url="http://llmserve")

    async def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def refused(self, path: str, body: object, param: str | None, status: int = 400) -> str:
        """The message of the error that `body` gets, which must name `param`."""
        response = await self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert error["message"]
        return str(error["message"])

    async def events(self, path: str, body: dict[str, object]) -> list[Any]:
        """The events of a stream: JSON, and "[DONE]"."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[tuple[str, int]]:
    """The app behind uvicorn, set up as the server sets it up; gives host and port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app.asgi, ws="none", lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            await task


async def ask(address: tuple[str, int], path: str, body: dict[str, object]) -> asyncio.StreamWriter:
    """Sends a request over a connection of its own, which the caller closes."""
    request = httpx.Request("POST", f"http://{address[0]}{path}", json=body)
    reader, writer = await asyncio.open_connection(*address)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + request.content)
    await writer.drain()
    if body.get("stream"):
        await reader.readuntil(b"Hello")
    return writer


async def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Polls; raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
