"""What a client is told when something goes wrong: OpenAI's nested error object, for every route and in mid-stream."""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llmserve.runtime.messages import FinishReason
from llmserve.runtime.request_error import RequestError


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of OpenAI's errors, at every status."""

    error: ErrorObject


def error_json(error: RequestError) -> bytes:
    told = ErrorObject(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorAnswer(error=told))


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """503 says when to try again: clients that know how wait so long."""
    if error.status == 503:
        headers = {"Retry-After": "1", **(headers or {})}
    return Response(error_json(error), status_code=error.status, headers=headers, media_type="application/json")


def finish_error(finish: FinishReason) -> RequestError | None:
    """The error that a finish reason stands for, or None where it is an answer (an operator's abort is one)."""
    if finish.status < 400:
        return None
    return RequestError(finish.status, finish.message or f"the request ended with {finish.type}")


def unexpected(error: BaseException) -> RequestError:
    """What a client may know of a defect: that there was one. The log has the rest."""
    return RequestError(500, f"internal error ({type(error).__name__}); the server's log has the details")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Routing's own refusals: no such path, or not with that method."""
    assert isinstance(error, HTTPException)
    messages = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed on this path"}
    message = messages.get(error.status_code, str(error.detail))
    return error_response(RequestError(error.status_code, message), dict(error.headers or {}))


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)
