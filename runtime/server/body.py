"""JSON bodies: strict decoding into types, with errors 400 that name the parameter, and responses."""

import re
from typing import TypeVar

import msgspec
import msgspec.inspect
from starlette.requests import Request
from starlette.responses import Response

from llmserve.runtime.request_error import RequestError

T = TypeVar("T")

Prompts = str | list[str | int | list[int]]
"""One text, several texts, the token ids of one prompt, or of several. See `split_prompts`."""

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\[[^]]*\]|[^.\[]+")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL)


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """An error 400: the request can never be served as it is."""
    return RequestError(400, message, param=param, code=code)


async def read_json(request: Request, kind: type[T]) -> T:
    """The body as `kind`. Raises RequestError 415 for another content type, and 400 for a body that does not fit.

    The content type is a protection: a browser sends JSON to another site only after a CORS preflight, but text and
    forms without one. A request without body, content type and Origin header, so not from a browser, counts as {}.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type and "origin" not in request.headers and not await request.body():
        return _decoded(b"{}", kind)
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            415,
            "the body must be JSON: send it with the header `Content-Type: application/json`",
            code="unsupported_content_type",
        )
    return _decoded(await request.body(), kind)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise invalid("the body is not JSON that can be read: it is nested too deep") from None


def json_response(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status_code=status, media_type="application/json")


def split_prompts(prompts: Prompts, param: str) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The texts of the prompts, or else their token ids. Raises RequestError 400 for an empty or a mixed list."""
    if isinstance(prompts, str):
        return (prompts,), ()
    if not prompts:
        raise invalid(f"{param} must not be empty", param)
    texts = tuple(item for item in prompts if isinstance(item, str))
    ids = tuple(item for item in prompts if isinstance(item, int))
    lists = tuple(tuple(item) for item in prompts if isinstance(item, list))
    if len(prompts) not in (len(texts), len(ids), len(lists)):
        raise invalid(f"{param} must be a string, or a list of strings, of token ids, or of lists of token ids", param)
    return texts, (ids,) if ids else lists


def _explained(text: str, kind: type) -> RequestError:
    """The error for a message of msgspec, such as "Expected `int`, got `str` - at `$.messages[0].role`"."""
    found = _PATH.search(text)
    path = found["path"] if found else ""
    message = text[: found.start()] if found else text
    if field := _FIELD.match(message):
        param = f"{path}.{field['field']}" if path else field["field"]
        if "unknown" in message:
            return invalid(f"unknown parameter: {param}", param, "unknown_parameter")
        return invalid(f"missing required parameter: {param}", param, "missing_required_parameter")
    where = f"{path}: " if path else ""
    message = message[0].lower() + message[1:]
    if message.startswith("invalid enum value"):
        message += f"; expected one of {', '.join(_choices(kind, path))}"
    return invalid(where + message, path or None, "invalid_type")


def _choices(kind: type, path: str) -> list[str]:
    """What may be said at a path of a `kind`, such as messages[0].role, where a Literal says it."""
    found = _parts_of(msgspec.inspect.type_info(kind))
    for name in _STEP.findall(path):
        if name.startswith("["):
            inner = [each.item_type for each in found if isinstance(each, msgspec.inspect.ListType)]
        else:
            fields = [f for each in found if isinstance(each, msgspec.inspect.StructType) for f in each.fields]
            inner = [field.type for field in fields if field.encode_name == name]
        found = [part for each in inner for part in _parts_of(each)]
    return [str(value) for each in found if isinstance(each, msgspec.inspect.LiteralType) for value in each.values]


def _parts_of(type_: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    return [*type_.types] if isinstance(type_, msgspec.inspect.UnionType) else [type_]
