"""Where files that are made once are kept: the user's cache directory, or where there is none, as in many containers,
a directory of this user alone under the temporary one.
"""

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)


def cached(kind: str, name: str) -> Path:
    """The path of something in the cache: where it lies, else where it can be made; its directory exists.

    Raises OSError where neither directory can be written.
    """
    directory = Path(platformdirs.user_cache_dir("llmserve"), kind)
    if (directory / name).exists():
        return directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} cannot be written")
    except OSError as error:
        log.info("the cache is under the temporary directory, as %s", error)
        directory = _private_directory() / kind
        directory.mkdir(exist_ok=True)
    return directory / name


def _private_directory() -> Path:
    """Nobody else may have put there what this process will load: code, for one."""
    directory = Path(tempfile.gettempdir(), f"llmserve-cache-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")
    return directory
