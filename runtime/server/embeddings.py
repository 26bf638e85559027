"""POST /v1/embeddings. https://platform.openai.com/docs/api-reference/embeddings"""

import base64
from typing import Literal

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from llmserve.runtime.messages import EmbeddingReqInput, EmbeddingRow
from llmserve.runtime.server.body import Prompts, invalid, json_response, read_json, split_prompts
from llmserve.runtime.server.context import Context
from llmserve.runtime.server.fields import given
from llmserve.runtime.server.generation import request_id
from llmserve.runtime.server.openapi import operation


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: Prompts
    """One text, several texts, the token ids of one input, or of several."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    """The hidden state of the last token (default), or the mean over all tokens."""
    normalize: bool | None = None
    """Whether the vector has length 1 (default true)."""
    user: str | None = None
    rid: str | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def add_routes(app: FastAPI, context: Context) -> None:
    @app.post("/v1/embeddings", openapi_extra=operation(EmbeddingRequest, EmbeddingList))
    async def create_embedding(request: Request) -> Response:
        body = await read_json(request, EmbeddingRequest)
        model = context.check_model(body.model)
        if body.dimensions is not None:
            raise invalid("dimensions is not supported: vectors have the model's size", "dimensions")
        texts, ids = split_prompts(body.input, "input")
        rows = await context.manager.embed(
            EmbeddingReqInput(
                rid=request_id(body.rid, "embd-"),
                texts=texts,
                input_ids=ids,
                pooling=given(body.pooling, "last"),
                normalize=given(body.normalize, True),
                user=given(body.user, ""),
            )
        )
        tokens = sum(row.prompt_tokens for row in rows)
        return json_response(
            EmbeddingList(
                data=[_embedding(row, base64_wanted=body.encoding_format == "base64") for row in rows],
                model=model,
                usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
            )
        )


def _embedding(row: EmbeddingRow, base64_wanted: bool) -> Embedding:
    if base64_wanted:
        return Embedding(index=row.index, embedding=base64.b64encode(row.embedding).decode())
    return Embedding(index=row.index, embedding=np.frombuffer(row.embedding, dtype="<f4").tolist())
