"""The OpenAPI document. FastAPI does not know msgspec types, so the schemas of bodies are added here."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from llmserve.runtime.server.errors import ErrorAnswer

REFS = "#/components/schemas/{name}"


def operation(request: type | None = None, answer: type | None = None) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body and answer are JSON of these types."""
    failed = {"description": "Refused or failed", "content": _json(ErrorAnswer)}
    extra: dict[str, Any] = {"responses": {"default": failed}}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": _json(request)}
    if answer is not None:
        extra["responses"]["200"] = {"content": _json(answer)}
    return extra


def describe(app: FastAPI, types: Sequence[type]) -> None:
    """Makes `app.openapi()` (/openapi.json) include the schemas of `types`, which operations refer to."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            for path in schema["paths"].values():
                for each in path.values():
                    each["responses"].pop("422", None)  # FastAPI's own validation error, which is not used here
            schema["components"] = {"schemas": _components(types)}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's documentation does


def _components(types: Sequence[type]) -> dict[str, Any]:
    def any_json(kind: type) -> dict[str, Any]:  # the meaning of `object` in a body
        return {"description": "Any JSON."}

    return msgspec.json.schema_components(types, ref_template=REFS, schema_hook=any_json)[1]


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFS.format(name=kind.__name__)}}}
