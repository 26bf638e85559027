"""The processes of instances as /proc (proc(5)) shows them: start time, whether stopped, and role."""

from pathlib import Path

CHILD_MODULE = "llmserve.runtime.child"
"""The module that child processes run: `python -m CHILD_MODULE ROLE …` (processes.py)."""


def process_start_time(pid: int) -> int | None:
    """The start time of a process in clock ticks since the boot; None when it has ended, even if it is a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def child_role(pid: int) -> str:
    """The role of a child process of an instance (processes.py); empty for any other process."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return ""
    return command[command.index(CHILD_MODULE) + 1] if CHILD_MODULE in command else ""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, a debugger)."""
    return _stat(pid)[:1] in (["T"], ["t"])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat (proc(5)) from the state, field 3, on; the start time is field 22. Empty when it has
    ended.
    """
    try:
        # The name before it is in parentheses, and may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
