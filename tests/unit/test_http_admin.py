"""The operators' routes over an RPC client that answers as the test says."""

from typing import Any

import pytest
from http_app import App, ask, serving, wait_until

from llmserve.runtime.client import EXIT_CODES, RpcCallError
from llmserve.runtime.messages import (
    AbortReqInput,
    AbortReqOutput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetLoadReqInput,
    GetLoadReqOutput,
    Message,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    UpdateWeightReqInput,
    UpdateWeightReqOutput,
)
from llmserve.runtime.server.admin import STATUSES
from llmserve.runtime.tokenizer import Tokenizer

VERBS: list[tuple[str, dict[str, Any], Message, Message, dict[str, Any]]] = [
    (
        "/flush_cache",
        {"wait_s": 2},
        FlushCacheReqInput(wait_s=2.0),
        FlushCacheReqOutput(pages_freed=3, bytes_freed=4),
        {"pages_freed": 3, "bytes_freed": 4, "aborted": []},
    ),
    (
        "/flush_cache",
        {"abort": True},
        FlushCacheReqInput(abort=True),
        FlushCacheReqOutput(pages_freed=0, bytes_freed=0, aborted=("a",)),
        {"pages_freed": 0, "bytes_freed": 0, "aborted": ["a"]},
    ),
    (
        "/abort_request",
        {"rid": "a"},
        AbortReqInput(rids=("a",)),
        AbortReqOutput(aborted=("a",)),
        {"aborted": ["a"], "not_found": []},
    ),
    (
        "/abort_request",
        {"rid": ["a", "b"], "prefix": "job-", "older_than_s": 5},
        AbortReqInput(rids=("a", "b"), prefix="job-", older_than_s=5.0),
        AbortReqOutput(aborted=(), not_found=("a", "b")),
        {"aborted": [], "not_found": ["a", "b"]},
    ),
    (
        "/abort_request",
        {"abort_all": True},
        AbortReqInput(everything=True),
        AbortReqOutput(aborted=("x",)),
        {"aborted": ["x"], "not_found": []},
    ),
    (
        "/update_weights_from_disk",
        {"model_path": "/m", "load_format": "gguf", "mode": "drain", "dry_run": True},
        UpdateWeightReqInput(model_path="/m", load_format="gguf", mode="drain", dry_run=True),
        UpdateWeightReqOutput(old_version=1, new_version=1, model_path="/m", differences=("shape",)),
        {
            **{"old_version": 1, "new_version": 1, "model_path": "/m", "bytes": 0, "seconds": 0.0, "paused_s": 0.0},
            "differences": ["shape"],
        },
    ),
    (
        "/pause_generation",
        {"mode": "retract"},
        PauseGenerationReqInput(mode="retract"),
        PauseGenerationReqOutput(retracted=2),
        {"retracted": 2, "aborted": 0},
    ),
    (
        "/continue_generation",
        {},
        ContinueGenerationReqInput(),
        ContinueGenerationReqOutput(resumed=2),
        {"resumed": 2},
    ),
]


@pytest.mark.parametrize(("path", "body", "request_message", "answer", "shown"), VERBS)
async def test_a_verb_is_the_schedulers_own(
    app: App, path: str, body: dict[str, Any], request_message: Message, answer: Message, shown: dict[str, Any]
) -> None:
    app.rpc.answer = answer
    response = await app.post(path, body)
    assert (response.status_code, response.json()) == (200, shown)
    assert app.rpc.calls[-1][0] == request_message


async def test_several_replicas_are_told_apart(app: App) -> None:
    """By their own numbers: those of the replicas that live have gaps."""
    app.rpc.numbers = [0, 2]
    app.rpc.answer = ContinueGenerationReqOutput(resumed=3)
    answer = (await app.post("/continue_generation", {})).json()
    assert answer == {"replicas": [{"replica": 0, "resumed": 3}, {"replica": 2, "resumed": 3}]}


async def test_get_load(app: App) -> None:
    load = {"running": 1, "waiting": 2, "kv_tokens_used": 3, "kv_tokens_cached": 4, "kv_tokens_total": 5}
    app.rpc.answer = GetLoadReqOutput(state="ready", **load)
    assert (await app.http.get("/get_load")).json() == {"state": "ready", **load}
    assert app.rpc.calls[-1][0] == GetLoadReqInput()


async def test_a_call_waits_as_long_as_the_verb_may_take(app: App) -> None:
    await app.post("/flush_cache", {"wait_s": 100})
    assert app.rpc.calls[-1][1] > 100
    await app.post("/update_weights_from_disk", {"model_path": "/m"})
    assert app.rpc.calls[-1][1] >= 3600


async def test_an_abort_that_names_nothing_aborts_nothing(app: App) -> None:
    app.rpc.answer = AbortReqOutput(aborted=())
    await app.post("/abort_request", {})
    assert app.rpc.calls[-1][0] == AbortReqInput()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        *(("busy", 409), ("not_found", 404), ("invalid", 400), ("denied", 403)),
        *(("timeout", 504), ("protocol", 502), ("failed", 500), ("unavailable", 503)),
    ],
)
async def test_a_refusal_has_its_status_and_its_words(app: App, code: Any, status: int) -> None:
    app.rpc.answer = RpcCallError(code, "3 requests run and 1 waits")
    response = await app.post("/flush_cache", {})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "3 requests run and 1 waits"
    assert response.json()["error"]["code"] == code


async def test_a_checkpoint_that_fails_is_the_callers_mistake(app: App) -> None:
    app.rpc.answer = RpcCallError("failed", "cannot read /m")
    assert (await app.post("/update_weights_from_disk", {"model_path": "/m"})).status_code == 400


async def test_no_body_is_an_empty_one_unless_a_web_page_sends_it(app: App) -> None:
    app.rpc.answer = FlushCacheReqOutput(pages_freed=1, bytes_freed=2)
    assert (await app.http.post("/flush_cache")).status_code == 200
    assert app.rpc.calls[-1][0] == FlushCacheReqInput()
    assert (await app.http.post("/flush_cache", headers={"Origin": "http://elsewhere"})).status_code == 415
    assert len(app.rpc.calls) == 1


def test_every_error_code_has_a_status() -> None:
    assert STATUSES.keys() == EXIT_CODES.keys()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/flush_cache", {"wait": 1}, "wait"),
        ("/abort_request", {"rids": ["a"]}, "rids"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/m", "mode": "now"}, "mode"),
        ("/pause_generation", {"mode": ""}, "mode"),
        ("/continue_generation", {"a": 1}, "a"),
    ],
)
async def test_a_wrong_body_is_refused_by_name(app: App, path: str, body: dict[str, Any], param: str) -> None:
    await app.refused(path, body, param)
    assert app.rpc.calls == []


async def test_a_caller_who_leaves_leaves_the_call(tokenizer: Tokenizer) -> None:
    app = App(tokenizer)
    app.rpc.delay_s = 60
    async with serving(app) as address:
        writer = await ask(address, "/update_weights_from_disk", {"model_path": "/m"})
        await wait_until(lambda: bool(app.rpc.calls))
        writer.close()
        await wait_until(lambda: app.rpc.cancelled)
