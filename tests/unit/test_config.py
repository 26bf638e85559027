"""ServerArgs.validated: what is refused, and that the text says what was given and what would be right."""

import pytest

from llmserve.runtime.config import ConfigError, Secrets, ServerArgs


def test_defaults_are_valid() -> None:
    args = ServerArgs.validated(model="some/model")
    assert args == ServerArgs(model="some/model")


def test_lists_become_tuples() -> None:
    assert ServerArgs.validated(model="m", served_model_names=["a", "b"]).served_model_names == ("a", "b")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": ""}, "MODEL is empty: give a directory, a .gguf file or a hub id"),
        ({}, "MODEL is empty: give a directory, a .gguf file or a hub id"),
        ({"port": 65536}, "--port 65536: a port is between 0 (any free one) and 65535"),
        ({"port": "http"}, "--port 'http': expected `int`, got `str`"),
        ({"dtype": "int8"}, "--dtype 'int8': expected one of auto, bfloat16, float16, float32"),
        ({"max_model_len": 0}, "--max-model-len 0: must be at least 1"),
        ({"stream_interval": -1}, "--stream-interval -1: must be at least 1"),
        ({"threads": 0}, "--threads 0: must be at least 1"),
        ({"queue_timeout": float("nan")}, "--queue-timeout nan: must be a number of seconds, 0 or more"),
        ({"drain_timeout": -0.5}, "--drain-timeout -0.5: must be a number of seconds, 0 or more"),
        ({"max_total_tokens": 15}, "--max-total-tokens 15: must hold at least one page of 16 tokens"),
        ({"seed": -1}, "--seed -1: must be between 0 and 2**63 - 1"),
        ({"served_model_names": ["\x1b[31m"]}, "--served-model-name '\\x1b[31m': must be printable and not empty"),
        ({"host": ""}, "--host is empty: give an address to listen on, such as 127.0.0.1"),
    ],
)
def test_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs.validated(**{"model": "m"} | options if options else options)
    assert str(caught.value) == text


@pytest.mark.parametrize("name", ["", "..", ".hidden", "-n", "a/b", "a b", "ä", "x" * 33, "a\n"])
def test_names_that_no_directory_should_have(name: str) -> None:
    with pytest.raises(ConfigError, match="begins with a letter or a digit"):
        ServerArgs.validated(model="m", name=name)


@pytest.mark.parametrize("name", ["a", "prod-2", "llama3.1_8b", "x" * 32])
def test_names_that_are_fine(name: str) -> None:
    assert ServerArgs.validated(model="m", name=name).name == name


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown option 'dtypes'"):
        ServerArgs.validated(model="m", dtypes="auto")


def test_secrets_do_not_show_themselves() -> None:
    secrets = Secrets(api_key="sk-1", admin_api_key="sk-2")
    assert "sk-" not in f"{secrets} {secrets!r}"
