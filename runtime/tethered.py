"""Runs a program (a compiler, a conversion) that is killed when this process ends, however it ends.

A keeper process stands in between: it leads a process group with the program and its descendants, and kills the group
when the pipe from this process closes. Run as a script, this file is the keeper.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence


def run_tethered(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run with captured output and no stdin. The return code of a program killed by a signal is 128 +
    number.

    Raises OSError, or TimeoutExpired when the program took longer than `timeout_s` and was killed.
    """
    reader, writer = os.pipe()
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *command],
            stdin=reader,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,
        )
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    with keeper:
        try:
            output, errors = keeper.communicate(timeout=timeout_s)
        finally:
            os.close(writer)
    return subprocess.CompletedProcess(command, keeper.returncode, output, errors)


def keep(command: Sequence[str]) -> int:
    """The keeper: runs the program and returns its exit code."""
    threading.Thread(target=kill_group_at_end_of_input, daemon=True).start()
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return code if code >= 0 else 128 - code


def kill_group_at_end_of_input() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
