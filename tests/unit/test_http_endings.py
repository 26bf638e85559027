"""How a request to OpenAI's routes ends: refusals, errors before and in mid-stream, aborts."""

import pytest
from http_app import CHAT, COMPLETIONS, HI, App

from fake_tokenizer_manager import Script
from llmserve.runtime.messages import FinishReason
from llmserve.runtime.request_error import RequestError


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})])
async def test_a_refusal_before_the_first_row_keeps_its_status(
    app: App, path: str, prompt: dict[str, object], stream: bool
) -> None:
    app.manager.script.before_rows = RequestError(503, "the queue is full", code="queue_full")
    response = await app.post(path, {**prompt, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json() == {
        "error": {"message": "the queue is full", "type": "server_error", "param": None, "code": "queue_full"}
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_row_first_keeps_its_status(app: App, stream: bool) -> None:
    app.manager.script = Script(
        pieces=("",), finish=FinishReason(type="error", status=503, message="the queue is full")
    )
    response = await app.post(COMPLETIONS, {"prompt": "hi", "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the queue is full"


async def test_an_error_in_mid_stream_is_an_event(app: App) -> None:
    app.manager.script.after_rows = RequestError(503, "the scheduler has died")
    first, error = await app.events(COMPLETIONS, {"prompt": "hi"})
    assert first["choices"][0]["text"] == "Hello"
    assert error["error"]["message"] == "the scheduler has died"
    app.manager.script = Script(finish=FinishReason(type="error", status=500, message="not a number"))
    _, error = await app.events(COMPLETIONS, {"prompt": "hi"})
    assert error["error"]["message"] == "not a number"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_inside_is_a_500_without_its_details(app: App, stream: bool) -> None:
    app.manager.script.before_rows = ZeroDivisionError("secret detail")
    response = await app.post(COMPLETIONS, {"prompt": "hi", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret detail" not in response.text


async def test_a_failure_inside_in_mid_stream_is_an_event(app: App) -> None:
    app.manager.script.after_rows = ZeroDivisionError("secret detail")
    _, error = await app.events(CHAT, {"messages": HI})
    assert error["error"]["type"] == "server_error"
    assert "secret detail" not in str(error)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_aborted_request_is_an_answer_that_says_so(app: App, path: str) -> None:
    app.manager.script.finish = FinishReason(type="abort", message="aborted by an operator")
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HI}
    (choice,) = (await app.post(path, prompt)).json()["choices"]
    assert choice["finish_reason"] == "abort"
    *_, last, done = await app.events(path, prompt)
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
