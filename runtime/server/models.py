"""GET /v1/models: the names that the model is served under."""

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from llmserve.runtime.server.body import json_response
from llmserve.runtime.server.context import Context
from llmserve.runtime.server.openapi import operation


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "llmserve"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


def add_routes(app: FastAPI, context: Context) -> None:

    def model(name: str) -> Model:
        return Model(id=name, created=context.created, max_model_len=context.manager.limits.max_model_len)

    @app.get("/v1/models", openapi_extra=operation(answer=ModelList))
    async def list_models() -> Response:
        return json_response(ModelList(data=[model(name) for name in context.model_names]))

    @app.get("/v1/models/{name:path}", openapi_extra=operation(answer=Model))
    async def retrieve_model(name: str) -> Response:
        return json_response(model(context.check_model(name)))
