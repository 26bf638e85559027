"""The samples that feed `top`, and the file that `--record` writes and `--replay` reads: a JSON sample per line.

SchedulerMetrics and HttpMetrics are pushed by the instance; Link and Gpus are what top itself observes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from llmserve.runtime.messages import HttpMetrics, Row, SchedulerMetrics

FORMAT = "llmserve-top"
FORMAT_VERSION = 1


Status = Literal["connecting", "connected", "draining", "starting", "lost", "dead"]


class Link(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The state of top's connection to the instance, with data from the instance's record. Made when it changes."""

    time: float
    status: Status
    name: str
    model: str = ""
    address: str = ""
    detail: str = ""
    """For the user: why there is no connection, or what is wrong with the instance."""
    replicas: int = 1
    """The number of live replicas."""
    lost_replicas: tuple[int, ...] = ()


class GpuInfo(Row, frozen=True, kw_only=True):
    index: int
    name: str
    used_bytes: int | None
    total_bytes: int | None
    busy_percent: float | None
    """None, as the others, where the driver does not tell."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The devices of this machine, where it has some."""

    time: float
    gpus: tuple[GpuInfo, ...]


Sample = SchedulerMetrics | HttpMetrics | Link | Gpus


class RecordingError(Exception):
    """A file is not a recording of this version, or a recording cannot be written."""

    exit_code = 2


class Recorder:
    """Writes samples to a file."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError when the file cannot be written."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from None
        self._file.write(json.dumps({"format": FORMAT, "version": FORMAT_VERSION}).encode() + b"\n")

    def add(self, sample: Sample) -> None:
        self._file.write(msgspec.json.encode(sample) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Sample]:
    """The samples of a recording, in order. Raises RecordingError when the file is not one."""
    decoder = msgspec.json.Decoder(Sample)
    with path.open("rb") as file:
        try:
            header = json.loads(file.readline())
            version = header["version"] if header["format"] == FORMAT else None
        except (ValueError, KeyError, TypeError):
            version = None
        if version != FORMAT_VERSION:
            raise RecordingError(f"{path} is not a recording of llmserve top (format version {FORMAT_VERSION})")
        for number, line in enumerate(file, start=2):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise RecordingError(f"{path}:{number} is not a sample: {error}") from None
