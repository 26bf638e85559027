"""Applies the result of a step: tokens become known and computed, requests end, memory is released.

The only place where requests end and pages are released. It does not decide what runs; rows.py makes the rows.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from llmserve.runtime.cache.kv_cache import KVCache
from llmserve.runtime.cache.pages import IntegrityError
from llmserve.runtime.engine.batch import (
    RowResult,
    StepPlan,
    Worker,
    WorkerDied,
)
from llmserve.runtime.histogram import Recorder, buckets
from llmserve.runtime.messages import (
    EmbeddingRow,
    FinishReason,
    TokenIDRow,
    TokenizedEmbeddingReqInput,
    TokenizedReqInput,
)
from llmserve.runtime.scheduler.guides import GrammarError
from llmserve.runtime.scheduler.request import Request, Share, Step
from llmserve.runtime.scheduler.rows import (
    embedding_row,
    failure,
    refused_embedding_rows,
    refused_token_rows,
    token_row,
)
from llmserve.runtime.scheduler.table import RequestTable

log = logging.getLogger(__name__)


@dataclass
class Counters:
    """Counts since the start."""

    steps: int = 0
    requests: int = 0
    retractions: int = 0
    """For want of memory."""
    asked_retractions: int = 0
    """For a pause or a swap of the weights."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    step_s: float = 0.0
    """The duration of the last step."""
    itl: Recorder = field(default_factory=lambda: Recorder(buckets(-4, 1)))
    """Seconds between the tokens of a choice."""


class Results:
    """Applies results and ends requests. Rows for clients gather in `token_rows` and `embedding_rows`, which the loop
    sends.
    """

    def __init__(
        self,
        worker: Worker,
        kv: KVCache,
        table: RequestTable,
        stream_interval: int,
    ) -> None:
        self.counters = Counters()
        self.token_rows: list[TokenIDRow] = []
        self.embedding_rows: list[EmbeddingRow] = []
        self.congested = False
        """Set by the loop while the receiver is slow: only final rows are made then, so that each choice needs
        fewer.
        """
        self._worker = worker
        self._kv = kv
        self._table = table
        self._stream_interval = stream_interval

    # ---- a step's result -----------------------------------------------------------------------------------------

    def apply(self, step: Step, now: Callable[[], float], waiting: AbstractContextManager[None]) -> None:
        """Waits for a submitted step, within `waiting`, and applies its result.

        Raises WorkerDied, IntegrityError for inconsistent pages, and what `waiting` raises at its end. Any other error
        ends only the requests that it concerns.
        """
        with waiting:
            results = _rows_of(step)
        if isinstance(results, Exception):
            log.error("step failed rows=%d", len(step.shares), exc_info=results)
            results = self._one_at_a_time(step.shares, results)
        time = now()
        self.counters.steps += 1
        self.counters.step_s = time - step.began
        for share, result in zip(step.shares, results, strict=True):
            share.request.in_flight -= 1
            try:
                self._apply_row(share, result, time)
            except IntegrityError:
                raise
            except GrammarError as error:
                self.fail(share.request, str(error), status=400)
            except Exception as error:
                log.exception("request failed rid=%s index=%d", share.request.rid, share.request.index)
                self.fail(share.request, f"internal error ({type(error).__name__})")

    def _one_at_a_time(self, shares: list[Share], error: Exception) -> tuple[RowResult, ...]:
        """Runs the rows of a failed step again, one at a time. A row that fails alone gets an error as its result."""
        results = []
        for share in shares:
            try:
                # It was alone already, or a later step has read the KV that this one should have written.
                if len(shares) == 1 or share.request.in_flight > 1:
                    raise error
                row = share.request.row(share.start, share.length)
                results.append(self._worker.submit(StepPlan(rows=(row,))).result().rows[0])
            except WorkerDied:
                raise
            except Exception as cause:
                results.append(RowResult(error=f"the forward pass failed ({type(cause).__name__})"))
        return tuple(results)

    def _apply_row(self, share: Share, result: RowResult, time: float) -> None:
        request, end = share.request, share.start + share.length
        if request.ending is not None:
            return
        if result.error:
            self.fail(request, result.error)
            return
        assert request.lease is not None
        request.computed = end
        if result.prompt_logprobs is not None:
            request.prompt_logprobs.append(result.prompt_logprobs)
        if result.hidden:
            request.pooled.append(result.hidden)
        if share.length > 1 or end <= request.prompt_len:
            self.counters.prefill_tokens += share.length
            self._kv.commit(request.lease, request.tokens, end)
        if end >= request.prompt_len:
            request.want_prompt_logprobs = False
        if end < request.known:
            return
        if not request.draws:
            self.finish(request, FinishReason(type="stop" if request.pooling else "length"))
        else:
            self._draw(request, result, time)

    def _draw(self, request: Request, result: RowResult, time: float) -> None:
        """Appends a sampled token. Ends the request if it must, else makes a row for the client if one is due."""
        token = result.token_id
        if token is None:
            raise RuntimeError("the worker drew no token")
        request.append(token)
        self.counters.decode_tokens += 1
        if request.last_token is None:
            request.first_token = time
        else:
            self.counters.itl.observe(time - request.last_token)
        request.last_token = time
        if result.logprobs is not None:
            request.new_logprobs.append(result.logprobs)
        reason = self._stopped(request, token)
        if reason is None and request.guide is not None:
            request.guide.advance(token)
        if reason is not None:
            self.finish(request, reason)
        elif not self.congested and (
            not request.rows_sent or (request.stream and request.known - request.sent >= self._stream_interval)
        ):
            self.token_rows.append(token_row(request, None))

    def _stopped(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_ids:  # not sampled before min_tokens: see `forbidden`
            return FinishReason(type="stop", matched=token if token in request.params.stop_token_ids else None)
        if request.decoder is not None:
            request.decoder.add([token])
            if request.decoder.stopped is not None:
                return FinishReason(type="stop", matched=request.decoder.stopped)
        if request.known >= request.limit:
            return FinishReason(type="length")
        return None

    # ---- ends and setbacks -----------------------------------------------------------------------------------------

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a waiting or running choice: makes its last row, releases its pages, removes it. No step of it may be in
        flight.
        """
        if request.pooling:
            self.embedding_rows.append(embedding_row(request, reason))
        else:
            self.token_rows.append(token_row(request, reason))
        if request.lease is not None:
            self._kv.release(request.lease, request.tokens, request.computed)
        self._table.remove(request)
        log.debug(
            "request ended rid=%s index=%d reason=%s prompt=%d cached=%d output=%d user=%r",
            *(request.rid, request.index, reason.type),
            *(request.prompt_len, request.cached, request.output_len, request.group.message.user),
        )

    def fail(self, request: Request, message: str, status: int = 500) -> None:
        """Ends a choice with an error, once no step of it is in flight. `computed` is not advanced, so that nothing
        doubtful enters the prefix cache.
        """
        request.ending = failure(status, message)
        # The logprobs gathered may be the cause of the error.
        request.logprobs = None
        request.new_logprobs.clear()
        if not request.in_flight:
            self.finish(request, request.ending)

    def retract(self, request: Request, asked: bool = False) -> None:
        """Releases the pages of a running choice and puts it back into the queue, for lack of memory or because an
        operator `asked`. No step of it may be in flight.
        """
        assert request.lease is not None
        self._kv.release(request.lease, request.tokens, request.computed)
        self._table.put_back(request)
        request.forget_computed()
        request.retractions += 1
        if asked:
            self.counters.asked_retractions += 1
        else:
            self.counters.retractions += 1

    def refuse(self, message: TokenizedReqInput, reason: FinishReason) -> None:
        """Answers all choices of a request that was refused."""
        if isinstance(message, TokenizedEmbeddingReqInput):
            self.embedding_rows += refused_embedding_rows(message, reason)
        else:
            self.token_rows += refused_token_rows(message, reason)

    def reap(self) -> bool:
        """Ends all choices that are to end and have no step in flight. Whether there were any."""
        ending = [(request, request.ending) for request in self._table if request.ending and not request.in_flight]
        for request, reason in ending:
            self.finish(request, reason)
        return bool(ending)


def _rows_of(step: Step) -> tuple[RowResult, ...] | Exception:
    """The results of a step's rows, or why there are none. Raises WorkerDied."""
    try:
        rows = step.handle.result().rows
    except WorkerDied:
        raise
    except Exception as error:
        return error
    if len(rows) != len(step.shares):
        return RuntimeError(f"{len(rows)} results for a step of {len(step.shares)} rows")
    return rows
