"""Every sampling parameter does what it says: each test would fail if its parameter were ignored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import EOS_ID, make_tiny
from instances import RunningInstance, launched

FORCED = 300
"""A token that the random model has no liking for."""
PROMPT = "def parse(self, args):"


@pytest.fixture(scope="module")
def http(server: RunningInstance) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 16, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(http: httpx.Client, **body: Any) -> str:
    return str(complete(http, **body)["choices"][0]["text"])


def ids(http: httpx.Client, **params: Any) -> list[int]:
    """The output tokens of /generate."""
    answer = generate(http, **params)
    return list(answer["output_ids"])


def generate(http: httpx.Client, **params: Any) -> dict[str, Any]:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 16, "temperature": 0, **params}}
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(http: httpx.Client, **body: Any) -> list[str]:
    """The text of each choice, joined from a stream."""
    body = {"prompt": PROMPT, "max_tokens": 16, "stream": True, **body}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [""] * body.get("n", 1)
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        texts[choice["index"]] += choice["text"]
    return texts


def test_max_tokens(http: httpx.Client) -> None:
    for count in (1, 7):
        answer = complete(http, max_tokens=count, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_chat_without_max_tokens_runs_to_the_end_of_the_context(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x " * 235}], "ignore_eos": True}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 512


def test_temperature_zero_is_greedy_and_a_high_one_is_not(http: httpx.Client) -> None:
    assert text(http, temperature=0, seed=1) == text(http, temperature=0, seed=2)
    assert len({text(http, temperature=1.5, seed=seed) for seed in range(4)}) == 4


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_make_it_greedy(http: httpx.Client, narrow: dict[str, float]) -> None:
    assert text(http, temperature=1.5, seed=5, **narrow) == text(http, temperature=0)
    assert text(http, temperature=1.5, seed=5) != text(http, temperature=0)


def test_a_seed_belongs_to_one_request(http: httpx.Client) -> None:
    one, two = text(http, seed=1), text(http, seed=2)
    assert one != two
    assert text(http, seed=1) == one
    both = complete(http, prompt=[PROMPT, PROMPT], seed=1)["choices"]
    assert [choice["text"] for choice in both] == [one, one], "each prompt's first choice draws with the seed"


def test_without_a_seed_answers_differ(http: httpx.Client) -> None:
    assert len({text(http, temperature=1.5, ignore_eos=True) for _ in range(4)}) == 4


def test_n_draws_with_the_seeds_that_follow(http: httpx.Client) -> None:
    choices = complete(http, seed=10, n=3)["choices"]
    assert [choice["text"] for choice in choices] == [text(http, seed=seed) for seed in (10, 11, 12)]


def test_logit_bias(http: httpx.Client) -> None:
    assert FORCED not in ids(http)
    assert ids(http, logit_bias={FORCED: 100}) == [FORCED] * 16
    first = ids(http)[0]
    assert ids(http, logit_bias={first: -100})[0] != first


def test_a_frequency_penalty_grows_with_each_repetition(http: httpx.Client) -> None:
    """A bias of 20 is worn down by about 2 a token; a penalty that counted once would never wear it down."""
    bias = {"logit_bias": {FORCED: 20}, "max_new_tokens": 30}
    assert ids(http, **bias) == [FORCED] * 30
    worn = ids(http, **bias, frequency_penalty=2.0)
    run = next(n for n, token in enumerate(worn) if token != FORCED)
    assert 5 <= run <= 15


def test_a_presence_penalty_counts_once(http: httpx.Client) -> None:
    assert ids(http, logit_bias={FORCED: 20}, presence_penalty=2.0) == [FORCED] * 16
    plain, penalized = ids(http, max_new_tokens=32), ids(http, max_new_tokens=32, presence_penalty=2.0)
    assert len(set(penalized)) > len(set(plain))


def test_a_repetition_penalty_covers_the_prompt_and_the_others_do_not(http: httpx.Client) -> None:
    """The first token, biased up and already in the prompt: only the repetition penalty can move it."""
    in_prompt = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"][1]
    bias = {"logit_bias": {in_prompt: 12}, "max_new_tokens": 1}
    assert ids(http, **bias) == [in_prompt]
    assert ids(http, **bias, frequency_penalty=2.0, presence_penalty=2.0) == [in_prompt]
    assert ids(http, **bias, repetition_penalty=20.0) != [in_prompt]


def test_a_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    whole = text(http, temperature=0)
    stop = whole[5:8]
    answer = complete(http, temperature=0, stop=["never there", stop])
    (choice,) = answer["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 16
    assert text(http, temperature=0, stop=stop) == choice["text"]


def test_a_partial_stop_string_is_withheld_and_released_when_it_is_none(http: httpx.Client) -> None:
    """One so long that it comes in several events."""
    whole = text(http, temperature=0)
    stop = whole[4:-4]
    assert len(stop) > 16
    assert stream(http, temperature=0, stop=stop) == [whole[:4]]
    for almost in (stop + "\x00", whole[-3:] + "\x00"):
        assert stream(http, temperature=0, stop=almost) == [whole]


def test_stop_token_ids(http: httpx.Client) -> None:
    greedy = ids(http)
    stop = next(token for token in greedy[3:] if token not in greedy[:3])
    answer = generate(http, stop_token_ids=[stop])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["meta_info"]["completion_tokens"] == greedy.index(stop) + 1


def test_eos_ends_unless_it_is_ignored_or_too_early(http: httpx.Client) -> None:
    likes_eos = {"logit_bias": {str(EOS_ID): 100}, "max_tokens": 8}
    ended = complete(http, **likes_eos)
    assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
    ignored = complete(http, **likes_eos, ignore_eos=True)
    assert (ignored["choices"][0]["finish_reason"], ignored["usage"]["completion_tokens"]) == ("length", 8)
    late = complete(http, **likes_eos, min_tokens=5)
    assert late["choices"][0]["finish_reason"] == "stop"
    assert late["usage"]["completion_tokens"] == 6, "five tokens, then the end"


def test_skip_special_tokens(http: httpx.Client) -> None:
    special = {"logit_bias": {"1": 100}, "max_tokens": 3}
    assert text(http, **special) == ""
    assert text(http, **special, skip_special_tokens=False) == "<|im_start|>" * 3


def test_all_forms_of_a_prompt_give_the_same(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    expected = text(http, temperature=0)
    for prompt in ([PROMPT], tokens, [tokens]):
        assert text(http, prompt=prompt, temperature=0) == expected
    several = complete(http, prompt=["import os", PROMPT], temperature=0)["choices"]
    assert several[1]["text"] == expected
    assert several[0]["text"] == text(http, prompt="import os", temperature=0) != expected


def test_echo_scores_what_the_model_would_say(http: httpx.Client) -> None:
    """A prompt's logprobs are those with which the same tokens were generated."""
    made = complete(http, temperature=0, logprobs=1, max_tokens=8)["choices"][0]
    assert "bytes:" not in str(made["logprobs"]["tokens"]), "the text must say which tokens they are"
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"] + ids(http, max_new_tokens=8)
    scored = complete(http, prompt=tokens, echo=True, max_tokens=0, logprobs=1)["choices"][0]
    assert scored["text"] == PROMPT + made["text"]
    assert scored["logprobs"]["token_logprobs"][-8:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)
    assert scored["logprobs"]["text_offset"][-8] == len(PROMPT)


def test_streamed_logprobs_join_to_the_whole(http: httpx.Client) -> None:
    whole = complete(http, temperature=0, logprobs=2)["choices"][0]["logprobs"]
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 2, "stream": True}
    events = http.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["logprobs"] for event in events]
    for field in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[field]] == whole[field]
    values = [value for part in parts for value in part["token_logprobs"]]
    assert values == pytest.approx(whole["token_logprobs"], abs=1e-4)


def test_a_repeated_prompt_is_cached_and_usage_says_so(http: httpx.Client) -> None:
    prompt = "a prompt that nobody else sends " * 6
    first, again = (complete(http, prompt=prompt, temperature=0)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"] == first["prompt_tokens"]


def test_characters_are_never_split_across_events(http: httpx.Client) -> None:
    """Of a character of two tokens only these two are drawn: it is often whole, often cut by an event, often broken."""
    tokens = http.post("/tokenize", json={"prompt": "ж"}).json()["tokens"]
    assert len(tokens) == 2
    bias = {str(token): 100 for token in tokens}
    params = {"logit_bias": bias, "seed": 3, "n": 4, "max_tokens": 48, "ignore_eos": True}
    whole = [choice["text"] for choice in complete(http, **params)["choices"]]
    assert all(text.count("ж") > 3 and "\ufffd" in text for text in whole)
    assert stream(http, **params) == whole


def test_what_the_model_recommends_is_what_requests_get(own_root: Path, tmp_path: Path) -> None:
    """Whatever the seed, a `top_k` of 1 takes the likeliest token."""
    model = make_tiny(tmp_path / "model")
    recommended = json.loads((model / "generation_config.json").read_text()) | {"top_k": 1, "temperature": 1.5}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    with launched(own_root, "recommended", str(model)) as instance, instance.client() as http:
        likeliest = text(http, temperature=0)
        assert [text(http, seed=seed) for seed in range(3)] == [likeliest] * 3
        assert text(http, seed=0, top_k=0, temperature=1) != likeliest
        shown = http.get("/server_info").json()["sampling_defaults"]
    assert (shown["top_k"], shown["temperature"], shown["top_p"]) == (1, 1.5, 1.0)
