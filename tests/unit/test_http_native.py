"""The native routes and those that tell of the server, over scripted rows."""

import json

import pytest
from http_app import MODEL, App

from instances import fair_time
from llmserve.runtime.messages import FinishReason, SchedulerMetrics
from llmserve.runtime.models.sampling_defaults import SamplingDefaults
from llmserve.runtime.server.native import DetokenizeRequest, GenerateRequest, TokenizeRequest
from llmserve.runtime.tokenizer import Tokenizer

METRICS = SchedulerMetrics(
    **{"time": 5.0, "dp_rank": 0, "state": "paused", "weight_version": 3, "uptime_s": 9.0, "steps_total": 1},
    **{"running": 2, "waiting": 1, "kv_tokens_total": 512, "kv_tokens_used": 48, "kv_tokens_cached": 16},
    **{"prefill_tokens_total": 1, "decode_tokens_total": 1, "cached_tokens_total": 1, "prompt_tokens_total": 1},
    **{"requests_total": 1, "evicted_tokens_total": 0, "retractions_total": 0},
)


# ---- /generate -------------------------------------------------------------------------------------------------------


async def test_generate_answers_one_choice_with_an_object(app: App, tokenizer: Tokenizer) -> None:
    body = {"text": "hi hi", "rid": "mine", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "seed": 3}}
    answer = (await app.post("/generate", body)).json()
    ids = tokenizer.encode("Hello", False) + tokenizer.encode(" world", False)
    assert answer == {
        "text": "Hello world",
        "output_ids": ids,
        "meta_info": {
            "id": "mine",
            "index": 0,
            "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": len(tokenizer.encode("hi hi")),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        },
    }
    params = app.manager.last.sampling_params
    assert (params.max_new_tokens, params.temperature, params.seed) == (4, 0.0, 3)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"text": ["a"]}, 1),
        ({"input_ids": [[1, 2], [3]]}, 2),
        ({"text": "a", "sampling_params": {"n": 3}}, 3),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, 4),
    ],
)
async def test_generate_answers_several_choices_with_a_list(app: App, body: dict[str, object], count: int) -> None:
    answers = (await app.post("/generate", body)).json()
    assert [answer["meta_info"]["index"] for answer in answers] == [*range(count)]


async def test_generate_takes_one_prompt_of_token_ids(app: App) -> None:
    assert (await app.post("/generate", {"input_ids": [5, 6]})).json()["text"] == "Hello world"
    assert app.manager.last.input_ids == ((5, 6),)


async def test_a_generate_stream_sends_what_is_new(app: App) -> None:
    first, last, done = await app.events("/generate", {"text": "hi"})
    assert (first["text"], last["text"], done) == ("Hello", " world", "[DONE]")
    assert first["meta_info"]["finish_reason"] is None
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert first["meta_info"]["completion_tokens"] < last["meta_info"]["completion_tokens"]


async def test_generate_says_what_stopped_it(app: App) -> None:
    app.manager.script.finish = FinishReason(type="stop", matched="\n")
    assert (await app.post("/generate", {"text": "a"})).json()["meta_info"]["finish_reason"] == {
        "type": "stop",
        "matched": "\n",
    }
    app.manager.script.finish = FinishReason(type="abort", message="by hand")
    assert (await app.post("/generate", {"text": "a"})).json()["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "by hand",
    }


async def test_generate_gives_logprobs_of_output_and_prompt(app: App, tokenizer: Tokenizer) -> None:
    meta = (await app.post("/generate", {"text": "lazy dog", "return_logprob": True})).json()["meta_info"]
    assert meta["output_token_logprobs"][0][0] == -0.5
    assert "input_token_logprobs" not in meta
    assert "output_top_logprobs" not in meta
    body = {"text": "lazy dog", "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}
    meta = (await app.post("/generate", body)).json()["meta_info"]
    ids = tokenizer.encode("lazy dog")
    assert meta["input_token_logprobs"][0] == [None, ids[0], tokenizer.token_text(ids[0])]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    assert meta["output_top_logprobs"][0] == [[-0.25, 0, tokenizer.token_text(0)]]


async def test_no_tokens_may_be_asked_for_with_the_prompts_logprobs(app: App) -> None:
    nothing = {"text": "lazy dog", "sampling_params": {"max_new_tokens": 0}}
    body = {**nothing, "return_logprob": True, "logprob_start_len": 0}
    assert (await app.post("/generate", body)).status_code == 200
    assert app.manager.last.sampling_params.max_new_tokens == 0
    await app.refused("/generate", {**nothing, "return_logprob": True}, "max_new_tokens")


@pytest.mark.parametrize("path", ["/generate", "/tokenize", "/detokenize"])
async def test_null_is_absent(app: App, path: str) -> None:
    kind = {"/generate": GenerateRequest, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}[path]
    given = {"/generate": {"text": "a"}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}[path]
    answer = await app.post(path, dict.fromkeys(kind.__struct_fields__) | given)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "regex"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"ebnf": "root ::= ("}}, "ebnf"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "ebnf"),
        ({"text": "a", "sampling_params": {"structural_tag": "x"}}, "sampling_params.structural_tag"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
        ({"text": "a", "rid": "\n"}, "rid"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
async def test_generate_refuses_by_name(app: App, body: dict[str, object], param: str) -> None:
    await app.refused("/generate", body, param)


@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        ("json_schema", '{"type":"null"}', "json_schema", '{"type":"null"}'),
        ("json_schema", {"type": "null"}, "json_schema", '{"type":"null"}'),
        ("regex", "a+", "regex", "a+"),
        ("ebnf", 'root ::= "a"', "grammar", 'root ::= "a"'),
    ],
)
async def test_structured_outputs_by_their_names_in_sglang(
    app: App, field: str, value: object, kind: str, text: str
) -> None:
    assert (await app.post("/generate", {"text": "a", "sampling_params": {field: value}})).status_code == 200
    constraint = app.manager.last.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (kind, text)


# ---- /tokenize, /detokenize ------------------------------------------------------------------------------------------


async def test_tokenize_and_back(app: App, tokenizer: Tokenizer) -> None:
    text = "The quick brown fox 日本 <|im_end|>"
    one = (await app.post("/tokenize", {"prompt": text})).json()
    assert one == {"tokens": tokenizer.encode(text), "count": len(tokenizer.encode(text)), "max_model_len": 512}
    several = (await app.post("/tokenize", {"prompt": [text, "a"]})).json()
    assert (several["tokens"][0], several["count"][1]) == (one["tokens"], 1)
    back = {"tokens": one["tokens"], "skip_special_tokens": False}
    assert (await app.post("/detokenize", back)).json() == {"text": text}
    assert (await app.post("/detokenize", {"tokens": [one["tokens"]]})).json() == {
        "text": [text.removesuffix("<|im_end|>")]
    }


async def test_tokenize_takes_the_models_name(app: App) -> None:
    """As vLLM and SGLang do."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert (await app.post(path, {**body, "model": MODEL})).status_code == 200
        await app.refused(path, {**body, "model": "gpt-4"}, "model", status=404)


async def test_no_text_is_no_tokens_and_back(app: App) -> None:
    nothing = (await app.post("/tokenize", {"prompt": ""})).json()["tokens"]
    assert nothing == []
    assert (await app.post("/detokenize", {"tokens": nothing})).json() == {"text": ""}


async def test_tokenize_takes_so_many_prompts(app: App) -> None:
    assert "1024" in await app.refused("/tokenize", {"prompt": ["a"] * 1025}, "prompt")


@pytest.mark.parametrize("tokens", [[-1], [10**6], [[0], 1], ["a"], 5])
async def test_detokenize_refuses_what_is_no_token(app: App, tokens: object) -> None:
    assert (await app.post("/detokenize", {"tokens": tokens})).status_code == 400


# ---- health, metrics, server info ------------------------------------------------------------------------------------


async def test_health_is_200_or_says_why_not(app: App) -> None:
    response = await app.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    app.manager.health = (False, "draining")
    response = await app.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "draining"})


async def test_health_without_a_body(app: App) -> None:
    app.manager.health = (False, "draining")
    assert (await app.http.head("/health")).status_code == 503


async def test_health_answers_at_once(app: App) -> None:
    app.manager.script.delay_s = 30
    began = fair_time()
    assert (await app.http.get("/health")).status_code == 200
    assert fair_time() - began < 5


async def test_metrics_are_prometheus_text(app: App) -> None:
    assert "llmserve_num_requests_running" not in (await app.http.get("/metrics")).text
    app.manager.scheduler_metrics = METRICS
    response = await app.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        "num_requests_running 2.0",
        "num_requests_waiting 1.0",
        "kv_tokens_used 48.0",
        "kv_tokens_total 512.0",
    ):
        assert f"llmserve_{line}" in lines
    assert 'llmserve_requests_finished_total{reason="stop"} 0.0' in lines


async def test_server_info_tells_the_options(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, max_running_requests=7, sampling=SamplingDefaults(top_k=20))
    app.manager.scheduler_metrics = METRICS
    info = (await app.http.get("/server_info")).json()
    assert (info["model"], info["state"], info["served_model_names"]) == (MODEL, "paused", [MODEL])
    assert info["options"]["max_running_requests"] == 7
    assert info["options"]["dtype"] == "float32"  # in effect: "auto" was given
    assert info["sampling_defaults"]["top_k"] == 20
    assert (info["scheduler"]["running"], info["scheduler"]["weight_version"]) == (2, 3)


async def test_the_openapi_document_describes_every_body(app: App) -> None:
    document = (await app.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    posts = [operation["post"] for operation in document["paths"].values() if "post" in operation]
    assert len(posts) >= 6
    for post in posts:
        name = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert schemas[name]["type"] == "object"
    assert set(schemas["CompletionRequest"]["required"]) == {"prompt"}
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= schemas.keys()
