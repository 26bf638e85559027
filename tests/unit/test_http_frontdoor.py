"""Keys, sizes, bad bodies, unknown paths, and clients that leave."""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from http_app import App, ask, serving, wait_until

from fake_tokenizer_manager import Script
from llmserve.runtime.config import Secrets
from llmserve.runtime.server.auth import ADMIN_PATHS
from llmserve.runtime.server.frontdoor import MAX_BODY_BYTES
from llmserve.runtime.tokenizer import Tokenizer

BOTH = Secrets(api_key="user-key", admin_api_key="admin-key")
JSON = {"content-type": "application/json"}
WORK = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/generate", {"text": "hi"}),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_of(app: App, path: str, key: str | None) -> int:
    return (await app.http.get(path, headers=bearer(key) if key else {})).status_code


# ---- keys ------------------------------------------------------------------------------------------------------------


async def test_every_route_asks_for_the_key_but_health(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, secrets=Secrets(api_key="user-key"))
    paths = {route.path for route in app.asgi.routes} | {"/", "/nothing", "/docs", "/v1/models/x", *ADMIN_PATHS}  # type: ignore[attr-defined]
    for path in paths - {"/health"}:
        for method in ("GET", "POST", "OPTIONS"):
            response = await app.http.request(method, path)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
    assert await status_of(app, "/health", None) == 200
    assert await status_of(app, "/v1/models", "user-key") == 200
    assert await status_of(app, "/nothing", "user-key") == 404


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong", "Bearer user-key2", "Bearer user-ke", "Bearer ", "Basic user-key", "user-key", "Bearer üser"],
)
async def test_a_wrong_key_is_refused_and_not_repeated(tokenizer: Tokenizer, header: str) -> None:
    app = App(tokenizer, secrets=Secrets(api_key="user-key"))
    response = await app.http.get("/v1/models", headers={"Authorization": header.encode("utf-8")})  # type: ignore[dict-item]
    assert response.status_code == 401
    assert "user-key" not in response.text
    assert "wrong" not in response.text


async def test_metrics_are_open_only_when_configured_so(tokenizer: Tokenizer) -> None:
    closed = App(tokenizer, secrets=Secrets(api_key="user-key"))
    opened = App(tokenizer, secrets=Secrets(api_key="user-key"), metrics_auth=False)
    assert (await status_of(closed, "/metrics", None), await status_of(closed, "/metrics", "user-key")) == (401, 200)
    assert await status_of(opened, "/metrics", None) == 200
    assert await status_of(opened, "/server_info", None) == 401


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
async def test_admin_routes_have_a_key_of_their_own(tokenizer: Tokenizer, path: str) -> None:
    app = App(tokenizer, secrets=BOTH)
    assert await status_of(app, path, "user-key") == 401
    assert await status_of(app, path, None) == 401
    assert await status_of(app, path, "admin-key") != 401
    assert await status_of(app, "/v1/models", "admin-key") == 200
    assert await status_of(app, "/v1/models", "user-key") == 200


async def test_without_an_admin_key_the_api_key_opens_admin_routes(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, secrets=Secrets(api_key="user-key"))
    assert await status_of(app, "/get_load", "user-key") != 401
    alone = App(tokenizer, secrets=Secrets(admin_api_key="admin-key"))
    assert await status_of(alone, "/v1/models", None) == 200
    assert await status_of(alone, "/get_load", None) == 401


async def test_keys_show_up_nowhere(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    app = App(tokenizer, secrets=BOTH)
    with caplog.at_level(logging.DEBUG):
        seen = [
            await app.http.get(path, headers=bearer("admin-key"))
            for path in ("/server_info", "/metrics", "/openapi.json")
        ]
        await app.http.get("/v1/models", headers=bearer("wrong-key"))
    assert all(response.status_code == 200 for response in seen)
    shown = caplog.text + "".join(response.text for response in seen) + repr(BOTH)
    assert not any(key in shown for key in ("user-key", "admin-key", "wrong-key"))


# ---- bodies ----------------------------------------------------------------------------------------------------------

BAD_BODIES = {
    "empty": b"",
    "cut off": b'{"prompt": "hi"',
    "text": b"hello",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "beyond floats": b'{"prompt": "a", "temperature": 1e999}',
    "a list": b"[]",
    "null": b"null",
    "deep lists": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects in metadata": b'{"prompt": "a", "metadata": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
    "deep unknown": b'{"prompt": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_is_a_400_and_the_next_request_is_served(app: App, name: str) -> None:
    response = await app.http.post("/v1/completions", content=BAD_BODIES[name], headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await app.post("/v1/completions", {"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
async def test_a_body_that_does_not_say_it_is_json_is_refused(app: App, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = await app.http.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_type")


async def test_a_content_type_may_have_parameters(app: App) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await app.http.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)).status_code == 200


async def test_a_body_that_announces_too_much_is_refused_unread(tokenizer: Tokenizer) -> None:
    app = App(tokenizer)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-length", str(MAX_BODY_BYTES + 1).encode())]
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers, "query_string": b""}
    await app.asgi(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 413


async def test_a_body_without_a_length_is_refused_once_it_is_too_long(app: App) -> None:
    taken = 0

    async def endless() -> Any:
        nonlocal taken
        while True:
            taken += 1 << 20
            yield b" " * (1 << 20)

    response = await app.http.post("/v1/completions", content=endless(), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert taken <= MAX_BODY_BYTES + (1 << 21)


# ---- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completions/", "/docs", "/%1b[31m", "/v1/%2e%2e/admin"])
async def test_an_unknown_path_is_a_404_in_openais_shape(app: App, path: str) -> None:
    response = await app.http.get(path)
    assert response.status_code == 404
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert "\x1b" not in response.text


async def test_a_wrong_method_is_a_405_in_openais_shape(app: App) -> None:
    response = await app.http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "GET" in response.json()["error"]["message"]


# ---- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), WORK)
async def test_a_client_that_leaves_has_its_request_aborted(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, object], stream: bool
) -> None:
    app = App(tokenizer, Script(pieces=("Hello",) * 1000, delay_s=0.01))
    with caplog.at_level(logging.INFO):
        async with serving(app) as address:
            writer = await ask(address, path, {**body, "stream": stream, "rid": "leaver"})
            await wait_until(lambda: "leaver" in app.manager.in_flight)
            writer.close()
            await wait_until(lambda: app.manager.aborted == ["leaver"])
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"http://127.0.0.1:{address[1]}/health")).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or "llmserve" in record.name]


async def test_a_client_that_leaves_before_the_first_row_is_aborted_too(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, Script(delay_s=60))
    async with serving(app) as address:
        for path, body in (*WORK, ("/v1/embeddings", {"input": "hi"})):
            writer = await ask(address, path, {**body, "rid": path})
            await wait_until(lambda path=path: path in app.manager.in_flight)  # type: ignore[misc]
            writer.close()
            await wait_until(lambda path=path: path in app.manager.aborted)  # type: ignore[misc]


async def test_a_client_that_stays_is_not_aborted(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, Script(pieces=("Hello",) * 20, delay_s=0.002))
    async with serving(app) as (_, port), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for _ in range(3):
            response = await http.post("/v1/completions", json={"prompt": "hi", "stream": True})
            assert response.text.endswith("data: [DONE]\n\n")
            assert (await http.post("/v1/completions", json={"prompt": "hi"})).json()["choices"][0][
                "text"
            ] == "Hello" * 20
    assert (len(app.manager.ended), app.manager.aborted) == (6, [])


async def test_a_client_that_stops_reading_stalls_nobody_else(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, Script(pieces=("Hello" * 2000,) * 2000))
    async with serving(app) as address:
        writer = await ask(address, "/generate", {"text": "hi", "stream": True, "rid": "stuck"})
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.3)
        assert "stuck" in app.manager.in_flight
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{address[1]}/health")).status_code == 200
        writer.transport.abort()
        await wait_until(lambda: app.manager.aborted == ["stuck"])


async def test_sse_headers_keep_proxies_from_holding_events_back(app: App) -> None:
    response = await app.post("/v1/completions", {"prompt": "hi", "stream": True})
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
