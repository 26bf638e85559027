"""Engine: the serving stack for Python code, without HTTP, for offline batches, benchmarks and other programs.

    with Engine() as engine:
        print(engine.generate("Hello", max_new_tokens=16).text)

The stack lives in an event loop of its own, in a thread. A method and its `async_` twin submit the same coroutine to
that loop; one blocks until it is done, the other awaits it. So both work from any thread and within any running loop.
"""

import asyncio
import atexit
import concurrent.futures
import itertools
import logging
import os
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar, overload

import numpy as np

from llmserve.runtime.config import ServerArgs
from llmserve.runtime.inputs import Pooling, Prompt, Prompts, embedding_request, generate_request, is_one
from llmserve.runtime.launch import Stack
from llmserve.runtime.messages import GenerateReqInput, SamplingParams, StrRow
from llmserve.runtime.models import hub
from llmserve.runtime.outputs import Chunk, Embedding, Generation, checked, chunk_of
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.tokenizer import Tokenizer

__all__ = ["Chunk", "Embedding", "Engine", "Generation", "RequestError", "SamplingParams"]

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

_numbers = itertools.count()


class Engine:
    """A running model. The constructor returns when it is ready; `shutdown`, or leaving `with`, ends it.

    Requests raise RequestError: status 400 for one that can never be served, 503 when the engine cannot serve it now.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """`model`: a directory, a .gguf file or a hub id; None is the default model. `options`: see config.ServerArgs.

        Raises ConfigError, InstanceError or LaunchError when it cannot start.
        """
        defaults = {"name": f"engine-{os.getpid()}-{next(_numbers)}", "port": 0, "log_level": "warning"}
        self._args = ServerArgs.validated(model=model or hub.default_model(), **{**defaults, **options})
        self._stack: Stack | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmserve-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._wait(self._start())
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    async def create(cls, model: str | None = None, **options: Any) -> Self:
        """The constructor for use within a running event loop, which it does not block."""
        return await asyncio.to_thread(cls, model, **options)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._running().tokenizer_manager.tokenizer

    # ---- generate --------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Prompts, params: SamplingParams | None = None, **options: Any) -> list[Generation]: ...
    def generate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """Continues a prompt, or each of a list of prompts, as many at once as the queue takes.

        `options` are n, rid, user, logprobs (how many of the likeliest tokens to return with each token; None: no
        logprobs), add_special_tokens, skip_special_tokens, at most one constraint on the whole text (json_schema, a
        dict or JSON; regex; choice, a list of texts; grammar, in Lark or GBNF), and the fields of SamplingParams, which
        override those of `params`.
        """
        return self._wait(self._generate(prompt, params, options))

    @overload
    async def async_generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generation: ...
    @overload
    async def async_generate(
        self, prompt: Prompts, params: SamplingParams | None = None, **options: Any
    ) -> list[Generation]: ...
    async def async_generate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """`generate`, awaited. Cancelling it aborts the requests."""
        return await self._await(self._generate(prompt, params, options))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Chunk]:
        """Continues one prompt and yields chunks as they come. Closing the iterator before its end aborts the
        request.
        """
        chunks = self._stream(generate_request(prompt, params, options, stream=True))
        try:
            while (chunk := self._wait(_next(chunks))) is not None:
                yield chunk
        finally:
            self._wait(chunks.aclose())

    async def async_stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Chunk]:
        """`stream` as an async iterator."""
        chunks = self._stream(generate_request(prompt, params, options, stream=True))
        try:
            while (chunk := await self._await(_next(chunks))) is not None:
                yield chunk
        finally:
            await self._await(chunks.aclose())

    async def _generate(self, prompt: Any, params: SamplingParams | None, options: dict[str, Any]) -> Any:
        if is_one(prompt):
            return await self._collect(generate_request(prompt, params, options))
        name = options.get("rid") or uuid.uuid4().hex
        requests = [
            generate_request(each, params, {**options, "rid": f"{name}-{number}"}) for number, each in enumerate(prompt)
        ]
        return await self._each(self._collect, requests, choices=options.get("n", 1))

    async def _collect(self, request: GenerateReqInput) -> Generation:
        rows: dict[int, list[StrRow]] = {}
        async with aclosing(self._running().tokenizer_manager.generate(request)) as stream:
            async for row in stream:
                rows.setdefault(row.index, []).append(checked(row))
        return Generation(rid=request.rid, choices=[chunk_of(rows[index]) for index in sorted(rows)])

    async def _stream(self, request: GenerateReqInput) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._running().tokenizer_manager.generate(request)) as stream:
            async for row in stream:
                yield chunk_of([checked(row)])

    # ---- embed, abort ----------------------------------------------------------------------------------------------

    @overload
    def embed(self, prompt: Prompt, pooling: Pooling = "last", normalize: bool = True) -> Embedding: ...
    @overload
    def embed(self, prompt: Prompts, pooling: Pooling = "last", normalize: bool = True) -> list[Embedding]: ...
    def embed(self, prompt: Any, pooling: Pooling = "last", normalize: bool = True) -> Any:
        """The embedding of a prompt, or of each of a list: the final hidden state of its last token, or the mean over
        all tokens.
        """
        return self._wait(self._embed(prompt, pooling, normalize))

    @overload
    async def async_embed(self, prompt: Prompt, pooling: Pooling = "last", normalize: bool = True) -> Embedding: ...
    @overload
    async def async_embed(
        self, prompt: Prompts, pooling: Pooling = "last", normalize: bool = True
    ) -> list[Embedding]: ...
    async def async_embed(self, prompt: Any, pooling: Pooling = "last", normalize: bool = True) -> Any:
        """`embed`, awaited."""
        return await self._await(self._embed(prompt, pooling, normalize))

    async def _embed(self, prompt: Any, pooling: Pooling, normalize: bool) -> Any:
        if is_one(prompt):
            return await self._embed_one(prompt, pooling, normalize)

        async def embed(each: Prompt) -> Embedding:
            return await self._embed_one(each, pooling, normalize)

        return await self._each(embed, prompt, choices=1)

    async def _embed_one(self, prompt: Prompt, pooling: Pooling, normalize: bool) -> Embedding:
        request = embedding_request(prompt, pooling, normalize)
        (row,) = await self._running().tokenizer_manager.embed(request)
        return Embedding(vector=np.frombuffer(row.embedding, dtype="<f4"), prompt_tokens=row.prompt_tokens)

    def abort(self, rid: str) -> bool:
        """Ends a request, which returns what it has generated with finish_reason "abort". False: no request has this
        rid.
        """
        return self._wait(self._abort(rid))

    async def async_abort(self, rid: str) -> bool:
        """`abort`, awaited."""
        return await self._await(self._abort(rid))

    async def _abort(self, rid: str) -> bool:
        return self._running().tokenizer_manager.abort(rid)

    # ---- life ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the processes at once, and all requests in flight with them. Safe to repeat; called at exit."""
        with self._closing:
            if self._loop.is_closed():
                return
            atexit.unregister(self.shutdown)
            self._wait(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def async_shutdown(self) -> None:
        """`shutdown`, awaited."""
        await asyncio.to_thread(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.async_shutdown()

    async def _start(self) -> None:
        self._stack = Stack(self._args)
        await self._stack.start()
        self._stack.announce_ready()
        self._supervision = asyncio.create_task(self._supervise(self._stack))

    async def _supervise(self, stack: Stack) -> None:
        log.error("the engine has failed: %s", await stack.wait_failed())
        await stack.stop()

    async def _stop(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
        if self._stack is not None:
            await self._stack.stop()
        await self._loop.shutdown_asyncgens()

    def _running(self) -> Stack:
        assert self._stack is not None, "the constructor has started it"
        return self._stack

    # ---- between the caller and the engine's loop ------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RequestError(503, "the engine has been shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:  # such as KeyboardInterrupt: nobody waits for it any more
            future.cancel()
            raise

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._submit(work))

    async def _each(self, function: Callable[[A], Coroutine[Any, Any, T]], items: Sequence[A], choices: int) -> list[T]:
        """The results of `function` for all items, in order, running no more at once than the queue takes.

        `choices` is the number of choices per item. The first failure cancels the others.
        """
        room = asyncio.Semaphore(max(1, self._args.max_queued_requests // max(1, choices)))

        async def run(item: A) -> T:
            async with room:
                return await function(item)

        tasks = [asyncio.create_task(run(item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)
