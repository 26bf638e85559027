"""Builds the native kernels (csrc/) for this machine's CPU, once, into the user's cache.

`python -m llmserve.runtime.kernel_build` builds them ahead of the first use and keeps them with the virtual
environment, so that the loss of a cache costs no compilation; ops/native.py loads them. Nothing here needs torch, so
that the compiler can work while torch is imported.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from llmserve.runtime.caches import cached
from llmserve.runtime.tethered import run_tethered

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "ops" / "csrc"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
NEEDED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
BUILD_TIMEOUT_S = 1800.0
"""For a compiler that hangs: it takes about 19 s of a core, which are minutes where others have the cores."""
KEPT = 8
"""How many libraries a directory keeps, the last used ones."""


class BuildError(Exception):
    """The native kernels cannot be built; the text says why, for the log."""


def built_library(directory: Path | None = None) -> Path:
    """The path of the library for these sources and this CPU; built if it does not exist. Raises BuildError.

    By default it is the one that set-up has built, else one in the user's cache. A library that exists needs no
    compiler, as in a container image without build tools.
    """
    cpu_flags = _cpu_flags()
    missing = NEEDED_CPU_FLAGS - cpu_flags
    if missing:
        raise BuildError(f"the CPU lacks {', '.join(sorted(missing))}")
    name = f"{_digest(cpu_flags)}.so"
    if directory is None:
        prepared = environment_directory() / name
        if _use(prepared):
            return prepared
    try:
        library = cached("kernels", name) if directory is None else directory / name
        if _use(library):
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.with_name("lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _use(library):
                _compile(_compiler(), cpu_flags, library)
                _remove_unused(library.parent)
    except OSError as error:
        raise BuildError(f"the kernels have nowhere to be built: {error}") from error
    return library


def environment_directory() -> Path:
    """Where set-up keeps the library: in the virtual environment."""
    return Path(sys.prefix) / "share" / "llmserve" / "kernels"


def begin_build() -> None:
    """Builds the library in a thread, if it is missing; `built_library` waits for that."""

    def build() -> None:
        with contextlib.suppress(BuildError):  # reported when the library is asked for
            built_library()

    threading.Thread(target=build, daemon=True, name="kernel-build").start()


def source_digest() -> str:
    """A digest of the sources as they are now."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _use(library: Path) -> bool:
    """Whether the library exists; updates its time of last use."""
    try:
        os.utime(library)
    except FileNotFoundError:
        return False
    except OSError:  # another user's file
        return library.exists()
    return True


def _remove_unused(directory: Path) -> None:
    """Deletes all but the KEPT last used libraries. A process that has loaded one keeps it."""
    libraries = sorted(directory.glob("*.so"), key=lambda library: library.stat().st_mtime, reverse=True)
    for library in libraries[KEPT:]:
        library.unlink()


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("there is no C++ compiler (g++, c++ or clang++)")
    return compiler


def _compile(compiler: str, cpu_flags: frozenset[str], library: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    command = [compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(unfinished)]
    log.info("building native kernels library=%s", library)
    try:
        done = run_tethered(command, BUILD_TIMEOUT_S)
        if done.returncode != 0:
            raise BuildError(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        if _digest(cpu_flags) != library.stem:
            raise BuildError("their sources changed while they were compiled")
        unfinished.replace(library)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _digest(cpu_flags: frozenset[str]) -> str:
    return hashlib.sha256(repr((FLAGS, sorted(cpu_flags), source_digest())).encode()).hexdigest()[:16]


def _cpu_flags() -> frozenset[str]:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise BuildError(f"they are for Linux on x86-64, not for {platform.system()} on {platform.machine()}")
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    raise BuildError("/proc/cpuinfo names no CPU flags")


def main() -> int:
    """Builds the library and prints its path, or why there is none. Returns 0 either way: the server runs without,
    slower.
    """
    in_environment = sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK)
    try:
        print(built_library(environment_directory() if in_environment else None))
    except BuildError as error:
        print(f"no native kernels: {error}; torch's own will be used", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
