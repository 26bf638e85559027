"""What the main process does around its children: how threads end, which addresses it binds and shows."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from instances import PATIENCE_S, environment_for
from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.launch import Stack
from llmserve.runtime.listener import bind, url_of
from llmserve.runtime.models.hub import Progress
from llmserve.runtime.observer import SilentObserver
from llmserve.runtime.ranks import local_address
from llmserve.runtime.threads import in_thread


async def test_work_in_a_thread_ends_as_it_ends() -> None:
    assert await in_thread(int, "12") == 12
    with pytest.raises(ValueError, match="invalid literal"):
        await in_thread(int, "twelve")


def test_an_abandoned_thread_holds_nothing_up() -> None:
    """A download goes on while Ctrl-C ends the loop; that it has nobody to tell any more is no error."""
    release = threading.Event()
    left: list[threading.Thread] = []

    def work() -> None:
        left.append(threading.current_thread())
        release.wait(60)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(work), 0.05)

    asyncio.run(give_up())
    assert left[0].is_alive()
    assert left[0].daemon
    release.set()
    left[0].join(60)
    assert not left[0].is_alive()


async def test_a_download_is_told_to_who_shows_the_start(own_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown(SilentObserver):
        def progress(self, *event: object) -> None:
            shown.append(event)

    def download(model: str, load_format: str, progress: Progress) -> None:
        progress(1, 3)
        raise ConfigError("it breaks off")

    shown: list[object] = []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_root))
    monkeypatch.setattr("llmserve.runtime.models.hub.resolve", download)
    stack = Stack(ServerArgs.validated(model="org/name", name="fetched"), Shown())
    with pytest.raises(ConfigError, match="it breaks off"):
        await stack.start()
    await stack.stop()
    assert shown == [("model", 1, 3, "bytes")]


DOWNLOADING = """
import time
from concurrent.futures import ThreadPoolExecutor
from llmserve.cli.main import main
from llmserve.runtime.models import hub

def download(*_):
    with ThreadPoolExecutor() as pool:
        print("downloading", flush=True)
        pool.submit(time.sleep, 600).result()

hub.resolve = download
main()
"""


def test_a_download_does_not_hold_up_the_end(own_root: Path) -> None:
    """That of the hub's client has threads of its own."""
    command = [sys.executable, "-c", DOWNLOADING, "launch", "org/name", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment_for(own_root))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"downloading\n"
        process.terminate()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert not (own_root / "llmserve/default").exists()
    finally:
        process.kill()


@pytest.mark.parametrize(("whose", "top_k"), [("model", 5), ("openai", 0)])
async def test_sampling_defaults_are_those_of_the_option(
    own_root: Path, monkeypatch: pytest.MonkeyPatch, whose: str, top_k: int
) -> None:
    def spawn(self: Stack) -> None:
        raise ConfigError("far enough")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_root))
    recommending = SimpleNamespace(generation={"top_k": 5}, config=None)
    monkeypatch.setattr("llmserve.runtime.models.hub.resolve", lambda *_: recommending)
    monkeypatch.setattr(Stack, "_spawn_all", spawn)
    stack = Stack(ServerArgs.validated(model="org/name", name="recommending", sampling_defaults=whose))
    with pytest.raises(ConfigError, match="far enough"):
        await stack.start()
    await stack.stop()
    assert stack.sampling_defaults.top_k == top_k


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fe80::1", "http://[fe80::1]:8000"),
        ("example.org", "http://example.org:8000"),
    ],
)
def test_the_address_that_is_shown_can_be_typed(host: str, url: str) -> None:
    assert url_of(host, 8000) == url


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "caf\udce9"])
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^--host .*: this is no name of a host; give an address"):
        bind(host, 0)
    with pytest.raises(ConfigError, match=r"^--dist-init-addr .*:1 cannot be reached: this is no name of a host"):
        local_address(host, 1)
