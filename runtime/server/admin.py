"""The operators' routes: the control requests of the schedulers, over their RPC sockets, as on the command line.

They require the admin key (auth.py). A client that disconnects cancels its call.
"""

from typing import Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from llmserve.runtime.client import RpcCallError
from llmserve.runtime.fanout import Replicas
from llmserve.runtime.messages import (
    DEFAULT_PAUSE_MODE,
    AbortReqInput,
    ContinueGenerationReqInput,
    ControlRequest,
    ErrorCode,
    FlushCacheReqInput,
    GetLoadReqInput,
    Message,
    PauseGenerationReqInput,
    PauseMode,
    UpdateWeightReqInput,
)
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.server.body import json_response, read_json
from llmserve.runtime.server.openapi import operation

AnswerT = TypeVar("AnswerT", bound=Message)

TIMEOUT_S = 10.0
LONG_TIMEOUT_S = 3600.0
"""For calls that wait for requests or read a checkpoint: practically unlimited, as a client that leaves cancels the
call.
"""

STATUSES: dict[ErrorCode, int] = {
    "busy": 409,
    "not_found": 404,
    "invalid": 400,
    "denied": 403,
    "timeout": 504,
    "protocol": 502,
    "failed": 500,
    "unavailable": 503,
}


class FlushCacheBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wait_s: float = 0.0
    abort: bool = False


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rid` names one request or several; the other fields select requests in bulk."""

    rid: str | list[str] = []
    prefix: str = ""
    older_than_s: float | None = None
    abort_all: bool = False


class UpdateWeightsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_path: str
    load_format: Literal["auto", "safetensors", "gguf"] = "auto"
    mode: PauseMode = DEFAULT_PAUSE_MODE
    dry_run: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: PauseMode = DEFAULT_PAUSE_MODE


class ContinueBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def add_routes(app: FastAPI, rpc: Replicas) -> None:
    async def call(request: ControlRequest[AnswerT], timeout_s: float = TIMEOUT_S, failed: int = 500) -> Response:
        """The scheduler's answer as JSON; with several replicas {"replicas": [...]}, each entry with its replica's
        number.

        `failed` is the HTTP status for the error code "failed".
        """
        try:
            answers = await rpc.each(request, timeout_s)
        except RpcCallError as error:
            status = failed if error.code == "failed" else STATUSES[error.code]
            raise RequestError(status, error.message, code=error.code) from None
        found = {number: msgspec.structs.asdict(answer) for number, answer in answers.items()}
        if len(found) == 1:
            return json_response(next(iter(found.values())))
        return json_response({"replicas": [{"replica": number, **answer} for number, answer in found.items()]})

    @app.post("/flush_cache", openapi_extra=operation(FlushCacheBody))
    async def flush_cache(request: Request) -> Response:
        """Empties the prefix cache. 409 with the counts while requests run, unless told to wait for them or to abort
        them.
        """
        body = await read_json(request, FlushCacheBody)
        return await call(FlushCacheReqInput(wait_s=body.wait_s, abort=body.abort), body.wait_s + TIMEOUT_S)

    @app.post("/abort_request", openapi_extra=operation(AbortBody))
    async def abort_request(request: Request) -> Response:
        """Aborts requests; answers once their memory is free, with the rids that were found and those that were not."""
        body = await read_json(request, AbortBody)
        return await call(
            AbortReqInput(
                rids=(body.rid,) if isinstance(body.rid, str) else tuple(body.rid),
                prefix=body.prefix,
                older_than_s=body.older_than_s,
                everything=body.abort_all,
            )
        )

    @app.post("/update_weights_from_disk", openapi_extra=operation(UpdateWeightsBody))
    async def update_weights_from_disk(request: Request) -> Response:
        """Swaps the weights for those of another checkpoint of the same model. On any failure the old ones go on
        serving.
        """
        body = await read_json(request, UpdateWeightsBody)
        # It fails because of the checkpoint: missing, damaged, or of another model.
        return await call(UpdateWeightReqInput(**msgspec.structs.asdict(body)), LONG_TIMEOUT_S, failed=400)

    @app.post("/pause_generation", openapi_extra=operation(PauseBody))
    async def pause_generation(request: Request) -> Response:
        """Stops the model's steps until /continue_generation."""
        body = await read_json(request, PauseBody)
        return await call(PauseGenerationReqInput(mode=body.mode), LONG_TIMEOUT_S)

    @app.post("/continue_generation", openapi_extra=operation(ContinueBody))
    async def continue_generation(request: Request) -> Response:
        """Ends a pause or a drain."""
        await read_json(request, ContinueBody)
        return await call(ContinueGenerationReqInput())

    @app.get("/get_load")
    async def get_load() -> Response:
        """The numbers of running and waiting requests, and the use of the KV pool."""
        return await call(GetLoadReqInput())
