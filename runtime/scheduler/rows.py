"""The rows that the scheduler sends for its requests: new tokens, embeddings, refusals."""

import numpy as np

from llmserve.runtime.cache.radix import ELEMENT_BYTES
from llmserve.runtime.messages import (
    EmbeddingRow,
    FinishReason,
    Logprobs,
    TokenIDRow,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from llmserve.runtime.scheduler.request import Request


def token_row(request: Request, finish: FinishReason | None) -> TokenIDRow:
    """A row with everything that the client has not been sent; counts it as sent. `finish`: in the last row."""
    first = request.rows_sent == 0
    row = TokenIDRow(
        rid=request.rid,
        index=request.index,
        output_ids=bytes(request.tokens[request.sent * ELEMENT_BYTES :]),
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached,
        completion_tokens=request.output_len,
        finish=finish,
        logprobs=Logprobs.joined(request.new_logprobs) if request.new_logprobs else None,
        prompt_logprobs=_prompt_logprobs(request) if first else None,
        stop=request.params.stop if first else (),
        min_new_tokens=request.params.min_new_tokens if first else 0,
        skip_special_tokens=request.skip_special_tokens,
        queue_s=request.queue_s,
    )
    request.new_logprobs.clear()
    request.sent = request.known
    request.rows_sent += 1
    return row


def embedding_row(request: Request, finish: FinishReason) -> EmbeddingRow:
    """The row of a prompt that has ended: its vector, float32 [hidden_size]; if it was not computed, `finish`."""
    vector = b""
    if finish.type == "stop":
        parts = [np.frombuffer(part, dtype="<f4") for part in request.pooled]
        pooled = np.sum(parts, axis=0) / request.prompt_len if request.pooling == "mean" else parts[-1]
        if request.normalize:
            pooled = pooled / max(float(np.linalg.norm(pooled)), 1e-12)
        vector = pooled.astype("<f4").tobytes()
    return EmbeddingRow(
        rid=request.rid,
        index=request.index,
        embedding=vector,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached,
        finish=None if vector else finish,
        queue_s=request.queue_s,
    )


def refused_token_rows(message: TokenizedGenerateReqInput, reason: FinishReason) -> list[TokenIDRow]:
    """The only row of each choice of a request that is refused."""
    return [
        TokenIDRow(
            rid=message.rid,
            index=i,
            output_ids=b"",
            prompt_tokens=len(message.prompts[i // message.n]) // ELEMENT_BYTES,
            cached_tokens=0,
            completion_tokens=0,
            finish=reason,
        )
        for i in range(len(message.prompts) * message.n)
    ]


def refused_embedding_rows(message: TokenizedEmbeddingReqInput, reason: FinishReason) -> list[EmbeddingRow]:
    return [
        EmbeddingRow(rid=message.rid, index=i, embedding=b"", prompt_tokens=len(prompt) // ELEMENT_BYTES, finish=reason)
        for i, prompt in enumerate(message.prompts)
    ]


def failure(status: int, message: str) -> FinishReason:
    """The finish reason of a request that cannot be served; `status` is the HTTP status."""
    return FinishReason(type="error", status=status, message=message)


def _prompt_logprobs(request: Request) -> Logprobs | None:
    """The prompt logprobs, [prompt_len], NaN for the first token. None if they are not wanted or not all computed."""
    options = request.logprobs
    if options is None or not options.prompt or request.want_prompt_logprobs:
        return None
    nan, top = np.full(1 + options.top, np.nan, dtype="<f4").tobytes(), options.top
    missing = Logprobs(
        token_logprobs=nan[:4], top=top, top_ids=np.zeros(top, dtype="<i4").tobytes(), top_logprobs=nan[4:]
    )
    return Logprobs.joined([missing, *request.prompt_logprobs])
