"""Fixtures that more than one folder of tests uses: a real instance, shared by all tests that leave it as it was."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from instances import RunningInstance, end_all, launched, runtime_directory

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported: nothing else has the cores alone

# Of the terminal, the proxies and the Python of whoever runs the tests, the programs under test hear nothing.
os.environ["TERM"] = "xterm-256color"
for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
    os.environ.pop(name, None)
    os.environ.pop(name.lower(), None)
for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)

# Sockets lie in temporary directories, and their paths may have 107 bytes.
if len(tempfile.gettempdir()) > len("/tmp") and os.access("/tmp", os.W_OK | os.X_OK):
    tempfile.tempdir = "/tmp"

# A busy machine is no reason to fail, nor is the luck of a run: the same examples every time.
settings.register_profile("everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everywhere")

# A shell's background job ignores these, and so would the instances that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through torch again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def runtime_root() -> Iterator[Path]:
    """The runtime directory of the shared instances."""
    root = runtime_directory()
    yield root
    end_all(root)


@pytest.fixture
def own_root() -> Iterator[Path]:
    """A runtime directory for one test, where no other instance runs."""
    root = runtime_directory()
    yield root
    end_all(root)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama checkpoint of a few hundred kilobytes, with random weights and a tokenizer."""
    from checkpoints import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that can generate FOREVER: for what happens meanwhile."""
    from checkpoints import make_endless

    return make_endless(tmp_path_factory.mktemp("models") / "long-llama")


@pytest.fixture(scope="session")
def server(runtime_root: Path, tiny_model: Path) -> Iterator[RunningInstance]:
    """A ready instance of the tiny model. Leave it as it was: everyone shares it."""
    with launched(runtime_root, "tiny", str(tiny_model)) as instance:
        yield instance


@pytest.fixture(scope="session")
def default_server(runtime_root: Path) -> Iterator[RunningInstance]:
    """A ready instance of the default model. Leave it as it was: everyone shares it."""
    with launched(runtime_root, "default") as instance:
        yield instance
