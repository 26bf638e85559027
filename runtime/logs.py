"""Logging of all processes of an instance: one line per event on stderr, key=value pairs, never a prompt or an API key.

Owns the format, the level and the log file; whether stderr is a terminal, that file or a journal is up to the launcher.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 * 2**20
LOG_CHECK_S = 10.0
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


class LineFormatter(logging.Formatter):
    """`2026-11-30T13:20:00.123 info scheduler: loaded weights bytes=270000000`.

    Control characters are escaped, so that a client's data can neither forge a line nor control a terminal. A traceback
    follows its event as Python prints it.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        text = record.getMessage().strip().translate(_CONTROL)
        line = f"{moment}.{int(record.msecs):03d} {record.levelname.lower()} {self.role}: {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def setup_logging(role: str, level: str) -> logging.StreamHandler:  # type: ignore[type-arg]
    """Makes this process log to stderr as `role`, from `level` on. Called at the start; returns the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(role))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(LEVELS[level])
    for chatty in ("asyncio", "filelock", "httpcore", "httpx", "httpx2", "huggingface_hub", "urllib3", "uvicorn"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, LEVELS[level]))
    return handler


def kept_log(name: str) -> Path:
    """Where the log of an instance that failed is kept, as its own directory is removed."""
    return platformdirs.user_log_path("llmserve") / f"{name}.log"


def keep_log(path: Path, name: str) -> Path | None:
    """Moves a log to `kept_log(name)`; returns that path, or None when it cannot be written."""
    kept = kept_log(name)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, kept)
    except OSError:
        return None
    return kept


async def bound_log(path: Path) -> None:
    """Truncates the log when it exceeds MAX_LOG_BYTES, as it lies on a memory file system. Never returns; a missing
    file is ignored.
    """
    while True:
        await asyncio.sleep(LOG_CHECK_S)
        with contextlib.suppress(OSError):
            length = os.stat(path).st_size
            if length > MAX_LOG_BYTES:
                os.truncate(path, 0)  # all writers append
                log.warning("began the log anew length=%d", length)


def stderr_to_file(path: Path) -> None:
    """Redirects stdout and stderr of this process, and of children started from now on, to the end of `path`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
