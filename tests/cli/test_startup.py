"""What the command line costs before it does anything."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_instance import FakeInstance, fresh_registry, request_info

BARE = """
import typer
app = typer.Typer()

@app.command()
def one(name: str = "x") -> None:
    "First."

@app.command()
def two(name: str = "x") -> None:
    "Second."

app(prog_name="bare")
"""
LLMSERVE = "from llmserve.cli.main import main; main()"
HEAVY = {"torch", "transformers", "tokenizers", "numpy", "zmq", "fastapi", "uvicorn", "httpx", "psutil"}


def seconds(code: str, arguments: list[str], environ: dict[str, str]) -> float:
    """The CPU time of a program: unlike the wall clock's, it does not depend much on what else the machine does."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def ratio(arguments: list[str], ours: dict[str, str], bare: dict[str, str]) -> float:
    """How many times a bare Typer program's time ours takes: the best of each over runs in pairs, so that a busy
    machine slows both, and more pairs for as long as the answer is not yet good."""
    best_ours = best_bare = float("inf")
    for pair in range(40):
        best_bare = min(best_bare, seconds(BARE, arguments, bare))
        best_ours = min(best_ours, seconds(LLMSERVE, arguments, ours))
        if pair >= 4 and best_ours <= 1.3 * best_bare:
            break
    return best_ours / best_bare


def test_help_costs_what_a_bare_typer_program_costs() -> None:
    assert ratio(["--help"], {}, {}) <= 1.3


def completion(program: str, words: str) -> dict[str, str]:
    """What bash sets to complete the last of `words`."""
    place = str(len(words.split(" ")) - 1)
    return {f"_{program}_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}


@pytest.mark.parametrize(
    ("words", "bare"),
    [
        ("llmserve la", "bare t"),
        ("llmserve launch --po", "bare two --na"),
        ("llmserve ping --instance ", "bare two --name "),
    ],
)
def test_completion_costs_what_a_bare_typer_program_costs(words: str, bare: str) -> None:
    assert ratio([], completion("LLMSERVE", words), completion("BARE", bare)) <= 1.3


def test_completing_a_rid_costs_what_a_bare_typer_program_costs(
    monkeypatch: pytest.MonkeyPatch, runtime_root: Path
) -> None:
    """The instance is asked for its rids, so that this loads what speaks to it."""
    fresh_registry(monkeypatch, runtime_root)
    words = completion("LLMSERVE", "llmserve abort -i asked ")
    with FakeInstance("asked") as instance:
        instance.running = [request_info("chat-1"), request_info("chat-2")]
        run = subprocess.run([sys.executable, "-c", LLMSERVE], env=os.environ | words, capture_output=True, text=True)
        assert run.stdout.split() == ["chat-1", "chat-2"]
        assert ratio([], words, completion("BARE", "bare two --name ")) <= 1.3


def loaded(code: str, arguments: list[str], environ: dict[str, str]) -> set[str]:
    """The top-level packages in sys.modules when `code` exits."""
    hook = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
    run = subprocess.run(
        [sys.executable, "-c", hook + code, *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in run.stderr.split()}


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["--help"], {}),
        (["launch", "--help"], {}),
        ([], completion("LLMSERVE", "llmserve launch --po")),
    ],
)
def test_help_and_completion_load_nothing_heavy(arguments: list[str], environ: dict[str, str]) -> None:
    modules = loaded(LLMSERVE, arguments, environ)
    assert "typer" in modules
    assert not modules & HEAVY


def test_importing_the_command_loads_no_command() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import sys, llmserve.cli.main; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {name for name in run.stdout.split() if name.startswith("llmserve.cli.")}
    assert ours == {f"llmserve.cli.{name}" for name in ("main", "commands", "common", "console", "format")}
    assert not {name.partition(".")[0] for name in run.stdout.split()} & HEAVY


def test_version_is_that_of_the_package() -> None:
    script = Path(sys.executable).with_name("llmserve")
    run = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == "llmserve 0.1.0\n"


OUTPUT = pytest.mark.parametrize("arguments", [["config", "--json"], ["--version"], ["ps", "--help"]])


def ended(arguments: list[str], **streams: Any) -> tuple[int, str]:
    """The exit status of a command, and what it wrote to stderr."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run([sys.executable, "-c", LLMSERVE, *arguments], text=True, **streams)
    return done.returncode, done.stderr or ""


@OUTPUT
def test_a_full_disk_is_said_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        assert ended(arguments, stdout=full) == (1, "llmserve: cannot write: No space left on device\n")


@OUTPUT
def test_a_reader_that_has_enough_is_no_failure(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        assert ended(arguments, stdout=pipe) == (0, "")


def test_an_output_that_is_closed_is_no_failure() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-c", LLMSERVE, "config", "--json"], stderr=-1, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("arguments", "status"), [(["ping", "-i", "nobody"], 3), (["ps", "--nonsense"], 2)])
def test_an_error_that_cannot_be_told_keeps_its_exit_status(arguments: list[str], status: int) -> None:
    with open("/dev/full", "w") as full:
        assert ended(arguments, stderr=full) == (status, "")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        assert ended(arguments, stderr=pipe) == (status, "")
