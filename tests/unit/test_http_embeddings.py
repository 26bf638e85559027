"""/v1/embeddings and /v1/models over scripted vectors."""

import base64
import struct

import pytest
from http_app import COMPLETIONS, MODEL, App

from llmserve.runtime.messages import EmbeddingReqInput
from llmserve.runtime.tokenizer import Tokenizer


async def test_embeddings_as_numbers_and_as_base64(app: App) -> None:
    answer = (await app.post("/v1/embeddings", {"model": MODEL, "input": ["a", "b c"]})).json()
    tokens = sum(len(app.manager.tokenizer.encode(text)) for text in ("a", "b c"))
    assert answer == {
        "object": "list",
        "data": [{"index": i, "object": "embedding", "embedding": [1.0, -0.5, 0.25]} for i in range(2)],
        "model": MODEL,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    answer = (await app.post("/v1/embeddings", {"input": [[1, 2]], "encoding_format": "base64"})).json()
    assert struct.unpack("<3f", base64.b64decode(answer["data"][0]["embedding"])) == (1.0, -0.5, 0.25)


async def test_pooling_and_normalize_reach_the_engine(app: App) -> None:
    await app.post("/v1/embeddings", {"input": "a", "pooling": "mean", "normalize": False, "user": "ann"})
    request = app.manager.requests[-1]
    assert isinstance(request, EmbeddingReqInput)
    assert (request.pooling, request.normalize, request.user) == ("mean", False, "ann")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": "a", "pooling": "max"}, "pooling"),
    ],
)
async def test_embeddings_refuse_what_they_cannot_do(app: App, body: dict[str, object], param: str) -> None:
    await app.refused("/v1/embeddings", body, param)


async def test_the_served_names_are_listed(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, served_model_names=("org/big", "small"))
    listed = (await app.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["org/big", "small"]
    assert (await app.http.get("/v1/models/org/big")).json()["max_model_len"] == 512
    assert (await app.post(COMPLETIONS, {"model": "small", "prompt": "a"})).json()["model"] == "small"
    await app.refused(COMPLETIONS, {"model": MODEL, "prompt": "a"}, "model", status=404)
