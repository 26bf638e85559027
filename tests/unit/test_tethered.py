"""A program that must not outlive who started it, nor may what that program starts."""

import os
import subprocess
import sys

import psutil
import pytest

from instances import PATIENCE_S, assert_gone, fair_time, wait_until
from llmserve.runtime.tethered import run_tethered


def test_it_gives_what_the_program_wrote_and_its_exit_code() -> None:
    done = run_tethered(["sh", "-c", 'echo "$GREETING"; echo bad >&2; exit 3'], 60, {"GREETING": "hello"})
    assert (done.stdout, done.stderr, done.returncode) == ("hello\n", "bad\n", 3)


def test_a_program_that_a_signal_ends_has_failed() -> None:
    assert run_tethered(["sh", "-c", "kill -TERM $$"], 60).returncode == 143


def test_a_program_that_does_not_exist_has_failed() -> None:
    done = run_tethered(["/no/such/program"], 60)
    assert (done.stderr, done.returncode) == ("/no/such/program: No such file or directory\n", 127)


def test_it_is_killed_with_all_that_it_started_after_its_time() -> None:
    ours = f"61.{os.getpid()}"
    began = fair_time()
    with pytest.raises(subprocess.TimeoutExpired):
        run_tethered(["sh", "-c", f"sleep {ours} & sleep {ours}"], 0.5)
    assert fair_time() - began < 5
    assert_gone([process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", ours]])


def test_all_of_it_ends_when_who_started_it_is_killed() -> None:
    code = "from llmserve.runtime.tethered import run_tethered; run_tethered(['sh', '-c', 'sleep 62 & sleep 62'], 60)"
    with subprocess.Popen([sys.executable, "-c", code]) as starter:
        process = psutil.Process(starter.pid)
        wait_until(
            lambda: len(process.children(recursive=True)) == 4, PATIENCE_S, "the keeper, the shell and its two children"
        )
        started = process.children(recursive=True)
        starter.kill()
    assert_gone(started)
