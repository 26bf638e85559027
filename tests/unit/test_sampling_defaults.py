"""What a generation_config.json recommends to clients that name no sampling parameters."""

from typing import Any

import pytest

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.sampling_defaults import SamplingDefaults, sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 1}


def test_the_models_own() -> None:
    expected = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert sampling_defaults("model", QWEN) == expected
    assert sampling_defaults("openai", QWEN) == SamplingDefaults()


@pytest.mark.parametrize("generation", [{}, {"temperature": None, "top_k": -1}, {"temperature": 1, "top_k": 0}])
def test_without_a_recommendation_they_are_openais(generation: dict[str, Any]) -> None:
    assert sampling_defaults("model", generation) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", 3), ("top_p", 0), ("top_k", 1.5), ("top_k", -2), ("min_p", [])],
)
def test_what_no_request_could_ask_for_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json.*\$\.{name}.*--sampling-defaults openai"):
        sampling_defaults("model", {name: value})
    assert sampling_defaults("openai", {name: value}) == SamplingDefaults()
