"""Intake: puts all choices of an arriving request into the queue, or refuses the request with a reason."""

from collections.abc import Callable

from llmserve.runtime.cache.radix import ELEMENT_BYTES
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.engine.batch import WorkerInfo
from llmserve.runtime.messages import (
    FinishReason,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenizedReqInput,
)
from llmserve.runtime.scheduler.guides import Guides
from llmserve.runtime.scheduler.request import Group, Request, StopDecoder
from llmserve.runtime.scheduler.rows import failure
from llmserve.runtime.scheduler.table import RequestTable

MakeStopDecoder = Callable[[bool, tuple[str, ...], int], StopDecoder]
"""Called with (skip_special_tokens, stop, min_tokens)."""


class Intake:
    """Admits requests to the queue. The front has checked them against the model; here, room in queue and KV pool
    counts.
    """

    def __init__(
        self, args: ServerArgs, info: WorkerInfo, table: RequestTable, make_decoder: MakeStopDecoder, guides: Guides
    ) -> None:
        self.draining = False
        self._max_running = args.max_running_requests
        self._max_queued = args.max_queued_requests
        self._longest = min(info.max_model_len, info.num_pages * info.page_size)
        self._eos = frozenset(info.eos_token_ids)
        self._table = table
        self._make_decoder = make_decoder
        self._guides = guides

    def accept(self, message: TokenizedReqInput, now: float) -> FinishReason | None:
        """Puts all choices of a request into the queue and returns None, or refuses all and returns the reason."""
        reason = self._refusal(message)
        if reason is None:
            group = Group(message, now)
            if isinstance(message, TokenizedEmbeddingReqInput):
                self._add_embeddings(group, message)
            else:
                self._add_choices(group, message)
            self._table.add(group)
        return reason

    def _refusal(self, message: TokenizedReqInput) -> FinishReason | None:
        if self.draining:
            return failure(503, "the server is draining: it takes no new requests")
        table = self._table
        choices, draws = len(message.prompts), False
        if isinstance(message, TokenizedGenerateReqInput):
            choices, draws = choices * message.n, message.sampling_params.max_new_tokens > 0
        most = self._max_running + self._max_queued
        if choices > most:  # it would not fit at any time
            return failure(400, f"the request has {choices} choices; at most {most} may run and wait")
        # Choices that can start at once do not count as queued.
        room = self._max_queued + max(0, self._max_running - len(table.running)) - len(table.waiting)
        if choices > room:
            return failure(
                503,
                f"the queue is full: {len(table.waiting)} of {self._max_queued} wait, {choices} more were asked for",
            )
        for prompt in message.prompts:
            length = len(prompt) // ELEMENT_BYTES
            if length == 0:
                return failure(400, "the prompt is empty")
            if length + draws > self._longest:
                more = " and one more" if draws else ""
                return failure(
                    400, f"the prompt has {length} tokens; for these{more} there is room for {self._longest}"
                )
        return None

    def _add_embeddings(self, group: Group, message: TokenizedEmbeddingReqInput) -> None:
        for index, prompt in enumerate(message.prompts):
            request = Request(group, index, self._table.next_seq(), prompt)
            request.pooling = message.pooling
            request.normalize = message.normalize
            group.requests.append(request)

    def _add_choices(self, group: Group, message: TokenizedGenerateReqInput) -> None:
        params = message.sampling_params
        # With a grammar, EOS is how the model ends the text, where it may or must end.
        ends = bool(message.grammar) or not params.ignore_eos
        stop_ids = frozenset(params.stop_token_ids) | (self._eos if ends else frozenset())
        program = self._guides.program(message.grammar) if message.grammar else None
        for index in range(len(message.prompts) * message.n):
            request = Request(group, index, self._table.next_seq(), message.prompts[index // message.n])
            request.params = params
            request.seed = params.seed + index % message.n
            request.stop_ids = stop_ids
            request.program = program
            request.limit = min(request.prompt_len + params.max_new_tokens, self._longest)
            request.logprobs = message.logprobs
            request.want_prompt_logprobs = message.logprobs is not None and message.logprobs.prompt
            request.stream = message.stream
            request.skip_special_tokens = message.skip_special_tokens
            if params.stop:
                request.decoder = self._make_decoder(message.skip_special_tokens, params.stop, params.min_new_tokens)
            group.requests.append(request)
