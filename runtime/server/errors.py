"""Errors as clients see them: OpenAI's error object, for every route and within streams."""

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
    """The body of an error, at every status."""

    error: ErrorObject


def error_json(error: RequestError) -> bytes:
    told = ErrorObject(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorAnswer(error=told))


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The response for an error. 503 has a Retry-After header, which OpenAI's clients follow."""
    if error.status == 503:
        headers = {"Retry-After": "1", **(headers or {})}
    return Response(error_json(error), status_code=error.status, headers=headers, media_type="application/json")


def finish_error(finish: FinishReason) -> RequestError | None:
    """The error that a finish reason stands for; None where it ends an answer, as an operator's abort does."""
    if finish.status < 400:
        return None
    return RequestError(finish.status, finish.message or f"the request ended with {finish.type}")


def unexpected(error: BaseException) -> RequestError:
    """The error 500 for an unexpected exception: only its type, as the rest is for the log."""
    return RequestError(500, f"internal error ({type(error).__name__}); the server's log has the details")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of Starlette's router: an unknown path, or a method that a path does not allow."""
    assert isinstance(error, HTTPException)
    messages = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed on this path"}
    message = messages.get(error.status_code, str(error.detail))
    return error_response(RequestError(error.status_code, message), dict(error.headers or {}))


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)
