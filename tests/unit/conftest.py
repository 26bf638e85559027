"""Fixtures of the tests of HTTP routes."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from http_app import App

    from llmserve.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> "Tokenizer":
    from http_app import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def app(tokenizer: "Tokenizer") -> "App":
    """The application without a key, over scripted rows."""
    from http_app import App

    return App(tokenizer)
