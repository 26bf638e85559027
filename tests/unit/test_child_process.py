"""A child and its parent's side of it, with roles made for the test: handshake, errors, signals, and no orphan ever."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from instances import PATIENCE_S, assert_gone, wait_until
from llmserve.runtime.child import ChildInit, Failed, Progress, Status
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.models.configs import ModelConfig
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.processes import ChildProcess, describe_end

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    implementation="decoder",
    vocab_size=16,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=32,
    dtype="float32",
    tie_word_embeddings=True,
    eos_token_ids=(1,),
)


def write_role(body: str, folder: Path) -> dict[str, str]:
    """Writes the module `role` with a `run` of this body; returns the environment in which a child finds it."""
    source = "import os, sys, time\ndef run(init, report):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    (folder / "role.py").write_text(source)
    return {"PYTHONPATH": str(folder)}


class Child:
    """A ChildProcess that has got its orders, and the statuses that came from it."""

    def __init__(self, body: str, folder: Path) -> None:
        self.statuses: list[Status] = []
        self.process = ChildProcess("scheduler", "role", "test", write_role(body, folder), self._on_status)
        self._orders = ChildInit(
            role="scheduler",
            args=ServerArgs(model="m"),
            ports=PortArgs.init_new(folder),
            directory=str(folder),
            checkpoint=Checkpoint("/m", "safetensors", "m", "/m", CONFIG),
        )
        self.send_orders()

    def send_orders(self) -> None:
        self.process.send(self._orders)

    def _on_status(self, child: ChildProcess, status: Status) -> None:
        self.statuses.append(status)

    async def ready(self) -> dict[str, int | float | str]:
        return (await asyncio.wait_for(asyncio.shield(self.process.ready), PATIENCE_S)).facts

    async def ended(self) -> int:
        return await asyncio.wait_for(asyncio.shield(self.process.ended), PATIENCE_S)


async def test_the_handshake(tmp_path: Path) -> None:
    body = """
        print("noise on stdout")
        report.progress("weights", 1, 2, "bytes")
        report.ready(model=init.checkpoint.name, rope=init.args.port)
        time.sleep(60)
    """
    child = Child(body, tmp_path)
    assert await child.ready() == {"model": "m", "rope": 30000}
    assert child.statuses[0] == Progress("weights", 1, 2, "bytes")
    await child.process.wait_killed()
    assert await child.ended() == -signal.SIGKILL


async def test_an_exception_is_told_with_its_type(tmp_path: Path) -> None:
    child = Child("raise ZeroDivisionError('no')", tmp_path)
    assert await child.ended() == 1
    assert child.process.failure == Failed("ZeroDivisionError: no", 1)
    assert describe_end(child.process, 1) == "the scheduler failed: ZeroDivisionError: no"


async def test_a_config_error_is_told_as_it_is(tmp_path: Path) -> None:
    body = "from llmserve.runtime.config import ConfigError\nraise ConfigError('--dtype int3: no')"
    child = Child(body, tmp_path)
    assert await child.ended() == 78
    assert child.process.failure == Failed("--dtype int3: no", 78)


async def test_a_module_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "role.py").write_text("import a_library_that_is_not_there")
    process = ChildProcess("scheduler", "role", "test", {"PYTHONPATH": str(tmp_path)}, lambda *_: None)
    assert await asyncio.wait_for(process.ended, PATIENCE_S) == 1
    assert process.failure == Failed("ModuleNotFoundError: No module named 'a_library_that_is_not_there'", 1)


async def test_a_child_that_has_ended_may_still_be_told_something(tmp_path: Path) -> None:
    child = Child("raise ZeroDivisionError", tmp_path)
    await child.ended()
    child.send_orders()
    await child.process.dismiss()


async def test_a_signal_is_told_by_name(tmp_path: Path) -> None:
    child = Child("report.ready(); os.kill(os.getpid(), 11)", tmp_path)
    code = await child.ended()
    assert code == -signal.SIGSEGV
    assert describe_end(child.process, code) == f"the scheduler (pid {child.process.pid}) was killed by SIGSEGV"


async def test_only_the_main_process_ends_a_child(tmp_path: Path) -> None:
    """systemd and Ctrl-C signal whole groups: the child must outlive that, or requests that drain would be lost."""
    body = f"""
        report.ready()
        while not os.path.exists({str(tmp_path / "signalled")!r}):
            time.sleep(0.01)
        report.progress("lives", 1, 1, "")
        time.sleep(600)
    """
    child = Child(body, tmp_path)
    await child.ready()
    os.kill(child.process.pid, signal.SIGTERM)
    os.kill(child.process.pid, signal.SIGINT)
    (tmp_path / "signalled").touch()
    async with asyncio.timeout(PATIENCE_S):
        while not child.process.ended.done() and Progress("lives", 1, 1, "") not in child.statuses:
            await asyncio.sleep(0.01)
    assert not child.process.ended.done()
    assert os.getpgid(child.process.pid) == child.process.pid
    await child.process.wait_killed()


async def test_secrets_do_not_reach_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSERVE_API_KEY", "sk-secret")
    monkeypatch.setenv("LLMSERVE_ADMIN_API_KEY", "sk-secret")
    child = Child("report.ready(seen=str('sk-secret' in str(os.environ)))", tmp_path)
    assert await child.ready() == {"seen": "False"}
    await child.process.wait_killed()


async def test_stacks_are_written_even_from_native_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = Child("report.ready(); time.sleep(60)", tmp_path)
    await child.ready()
    child.process.dump_stacks()
    text = ""
    async with asyncio.timeout(PATIENCE_S):
        while "in run" not in text:
            await asyncio.sleep(0.02)
            text += capfd.readouterr().err
    assert "role.py" in text
    assert not child.process.ended.done()
    await child.process.wait_killed()


PARENT = """
import asyncio
from llmserve.runtime.processes import ChildProcess

async def main():
    child = ChildProcess("scheduler", "role", "test", {}, lambda *_: None)
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("when", "sleep"),
    [
        ("at once", "time.sleep(600)"),
        ("loading", "ctypes.PyDLL(None).sleep(600)"),  # native code that holds the interpreter's lock
    ],
)
def test_a_killed_parent_leaves_no_child(tmp_path: Path, when: str, sleep: str) -> None:
    """By the end of a pipe, where the other net is not there yet; by the kernel, where no thread can look at that."""
    loading = tmp_path / "loading"
    (tmp_path / "role.py").write_text(f"import ctypes, time; open({str(loading)!r}, 'w'); {sleep}")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    if when == "loading":
        wait_until(loading.exists, PATIENCE_S, "the child's loading")
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert_gone([child])


async def test_a_child_ends_with_what_it_has_started(tmp_path: Path) -> None:
    body = """
        import subprocess
        report.ready(pid=subprocess.Popen(["sleep", "60"]).pid)
        time.sleep(60)
    """
    child = Child(body, tmp_path)
    grandchild = psutil.Process(int((await child.ready())["pid"]))
    await child.process.wait_killed()
    assert_gone([grandchild])
