"""Structured outputs over a real instance whose model writes noise: the grammar alone makes it what is asked for."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import psutil
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam

from instances import PATIENCE_S, RunningInstance
from llmserve import Engine, RequestError

MODEL = "tiny-llama"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Who?"}]
PHONE = r"\+[0-9]{2} [0-9]{3} [0-9]{4}"


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    lives: int = pydantic.Field(ge=0, le=9)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    pets: list[Pet] = pydantic.Field(max_length=2)
    mail: str | None = pydantic.Field(pattern="^[a-z]{1,5}@[a-z]{1,5}[.]org$")


@pytest.fixture(scope="module")
def http(server: RunningInstance) -> Iterator[httpx.Client]:
    with server.client(timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningInstance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 300, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 4}, {"top_k": 9, "seed": 1}], ids=str
)
def test_openais_client_parses_into_its_own_type(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    extra = {"top_k": sampling.pop("top_k")} if "top_k" in sampling else {}
    answer = client.chat.completions.parse(
        model=MODEL, messages=CHAT, response_format=Person, max_tokens=300, extra_body=extra, **sampling
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)


def test_a_stream_of_it_joins_to_the_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 300, "temperature": 0}
    whole = client.chat.completions.parse(**options, response_format=Person).choices[0].message.content
    with client.chat.completions.stream(**options, response_format=Person) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    assert final.finish_reason == "stop"
    assert final.message.parsed is not None


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"frequency_penalty": 1.5, "presence_penalty": 1, "repetition_penalty": 1.3},
        {"top_p": 0.5},
        {"min_p": 0.2, "logit_bias": {"300": 60}},
        {"logprobs": 3},
        {"n": 3, "temperature": 1},
        {"ignore_eos": True, "min_tokens": 100},
    ],
    ids=str,
)
def test_every_way_of_drawing_keeps_to_the_grammar(http: httpx.Client, more: dict[str, Any]) -> None:
    for greedy in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
        answer = complete(http, **{**greedy, **more}, structured_outputs={"regex": PHONE})
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            assert re.fullmatch(PHONE, choice["text"])


def test_choices_and_grammars_in_both_notations(http: httpx.Client) -> None:
    words = ["yes", "no", "déjà vu", 'a "quote"\n']
    assert complete(http, structured_outputs={"choice": words})["choices"][0]["text"] in words
    for grammar in ('root ::= "<" name ">"\nname ::= [a-z]{3}', 'start: "<" name ">"\nname: /[a-z]{3}/'):
        assert re.fullmatch("<[a-z]{3}>", complete(http, structured_outputs={"grammar": grammar})["choices"][0]["text"])


def test_the_native_route(http: httpx.Client) -> None:
    for params in ({"regex": PHONE}, {"ebnf": 'root ::= "+" [0-9]{2}'}, {"json_schema": '{"type": "boolean"}'}):
        body = {"text": "a", "sampling_params": {**params, "max_new_tokens": 60}}
        assert http.post("/generate", json=body).json()["meta_info"]["finish_reason"] == {"type": "stop"}


def test_a_stop_string_and_a_limit_end_it_before(http: httpx.Client) -> None:
    cut = complete(http, structured_outputs={"regex": PHONE}, stop=" ")["choices"][0]
    assert re.fullmatch(r"\+[0-9]{2}", cut["text"])
    assert cut["finish_reason"] == "stop"
    short = complete(http, structured_outputs={"regex": PHONE}, max_tokens=2)["choices"][0]
    assert short["finish_reason"] == "length"
    assert re.compile(PHONE).fullmatch(short["text"]) is None


def test_json_mode_writes_the_beginning_of_an_object(http: httpx.Client) -> None:
    answer = complete(http, response_format={"type": "json_object"}, max_tokens=40)["choices"][0]
    assert answer["text"].startswith("{")


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    words = st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True)
    bounds = st.tuples(st.integers(-1000, 1000), st.integers(0, 500))
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        words.map(lambda values: {"enum": values}),
        bounds.map(lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}),
        st.tuples(st.integers(0, 2), st.integers(2, 5)).map(
            lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}
        ),
    )


def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def object_of(pair: tuple[dict[str, Any], int]) -> dict[str, Any]:
        properties, required = pair
        names = list(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": names[: required % (len(names) + 1)],
            "additionalProperties": False,
        }

    names = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=3)
    return st.one_of(
        st.tuples(inner, st.integers(0, 3)).map(lambda pair: {"type": "array", "items": pair[0], "maxItems": pair[1]}),
        st.tuples(st.dictionaries(names, inner, max_size=3), st.integers(0, 3)).map(object_of),
        st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"anyOf": schemas}),
    )


def fits(value: object, schema: dict[str, Any]) -> bool:
    """Whether a value is valid, for the schemas above."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "array":
            return (
                isinstance(value, list)
                and len(value) <= schema["maxItems"]
                and all(fits(item, schema["items"]) for item in value)
            )
    assert schema["type"] == "object"
    return (
        isinstance(value, dict)
        and all(name in value for name in schema["required"])
        and all(name in schema["properties"] and fits(item, schema["properties"][name]) for name, item in value.items())
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.recursive(leaves(), containers, max_leaves=5), seed=st.integers(0, 99))
def test_whatever_the_schema_what_is_finished_is_valid(http: httpx.Client, schema: dict[str, Any], seed: int) -> None:
    answer = complete(http, temperature=1, seed=seed, max_tokens=400, structured_outputs={"json": schema})
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        assert fits(json.loads(choice["text"]), schema)
    else:
        assert answer["usage"]["completion_tokens"] == 400


def test_a_schema_does_not_disturb_the_requests_beside_it(http: httpx.Client) -> None:
    free = {"prompt": "def main(", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    alone = complete(http, **free)["choices"][0]["text"]
    texts: dict[int, str] = {}

    def run(number: int) -> None:
        more = {"structured_outputs": {"regex": PHONE}} if number % 2 else {}
        texts[number] = complete(http, **{**free, **more, "ignore_eos": not more})["choices"][0]["text"]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[number] for number in (0, 2, 4)] == [alone] * 3
    assert all(re.fullmatch(PHONE, texts[number]) for number in (1, 3, 5))


# ---- attacks ---------------------------------------------------------------------------------------------------------

EVIL = [
    {"regex": "(a+)+$"},
    {"regex": "((((a*)*)*)*)*b"},
    {"regex": "(.|a{1,500}|[a-z]{3,900}){1,900}x"},
    {"regex": "a{100000000}"},
    {"regex": "(" * 60_000 + ")" * 60_000},
    {"regex": "|".join(f"word{number}x" for number in range(9000))},
    {"json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}},
    {"json": {"type": "array", "minItems": 1_000_000}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(10)]} for i in range(9)]}},
    {"grammar": 'start: start start | start start start | /a*/ | ""'},
    {"choice": [f"choice {number}" for number in range(5000)]},
]


def test_evil_grammars_cost_little_and_the_next_good_request_succeeds(
    http: httpx.Client, server: RunningInstance
) -> None:
    def memory() -> int:
        return sum(process.memory_info().rss for process in server.processes())

    pid = server.child("scheduler").pid
    after_rounds = []
    for _ in range(5):
        for evil in EVIL:
            answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, "structured_outputs": evil})
            assert answer.status_code in (200, 400), answer.text
        after_rounds.append(memory())
    # The first round fills the caches; what is freed goes back to the system now and then, what is lost piles up.
    assert min(after_rounds[3:]) - after_rounds[0] < 150 << 20
    assert server.child("scheduler").pid == pid
    assert psutil.Process(pid).is_running()
    assert re.fullmatch(PHONE, complete(http, structured_outputs={"regex": PHONE})["choices"][0]["text"])


def test_wrong_ones_are_refused_by_name_also_as_a_stream(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model=MODEL,
                messages=CHAT,
                stream=stream,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
            )
        assert refused.value.param == "response_format"
        assert "nonsense" in refused.value.message


# ---- without HTTP ----------------------------------------------------------------------------------------------------


def test_engine(runtime_root: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_root))
    with Engine(str(tiny_model), name="structured", dtype="float32", max_total_tokens=1 << 12) as engine:
        checks: list[tuple[dict[str, Any], Callable[[str], object]]] = [
            ({"json_schema": Person.model_json_schema()}, Person.model_validate_json),
            ({"json_schema": json.dumps(Person.model_json_schema())}, Person.model_validate_json),
            ({"regex": PHONE}, re.compile(PHONE).fullmatch),
            ({"choice": ["a", "b"]}, ["a", "b"].index),
            ({"grammar": 'start: "a" | "b"'}, re.compile("[ab]").fullmatch),
        ]
        for options, check in checks:
            generation = engine.generate("Hello", temperature=1.0, seed=1, max_new_tokens=300, **options)
            assert check(generation.text) is not None
            assert generation.finish_reason == "stop"
        with pytest.raises(RequestError) as refused:
            engine.generate("Hello", regex="(")
        assert (refused.value.status, refused.value.param) == (400, "regex")
        with pytest.raises(RequestError, match="exclude each other"):
            engine.generate("Hello", regex="a", choice=["a"])
