"""The cache of files that are made once: in the user's cache directory or, where that cannot be written, as in many
containers, in a private directory under the temporary one.
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
    """The path of the entry `name` of the cache for `kind`: where it is, or where it is to be made. Its directory
    exists.

    Raises OSError when neither directory can be written.
    """
    try:
        directory = Path(platformdirs.user_cache_dir("llmserve"), kind)
        if (directory / name).exists():
            return directory / name
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} cannot be written")
    except (OSError, RuntimeError) as error:  # the latter of a user without a home
        log.info("the cache is under the temporary directory, as %s", error)
        directory = _private_directory() / kind
        directory.mkdir(exist_ok=True)
    return directory / name


def _private_directory() -> Path:
    """A directory that only this user can write, because code is loaded from it. Raises PermissionError otherwise."""
    directory = Path(tempfile.gettempdir(), f"llmserve-cache-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")
    return directory
