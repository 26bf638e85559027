"""A checkpoint that rank 0 reads and broadcasts tensor by tensor, so that no two ranks can load different files.

Every rank reads the same names in the same order. A rank that fails goes on receiving until the reader has ended, so
that no rank waits for another for ever.
"""

import math
from collections import deque

import msgspec
import torch
from torch import Tensor

from llmserve.runtime.config import ConfigError
from llmserve.runtime.distributed.collectives import broadcast, least, pass_over
from llmserve.runtime.distributed.groups import Group
from llmserve.runtime.engine.checkpoint import Source
from llmserve.runtime.models.configs import TensorInfo

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8)
BATCH_BYTES = 8 << 20
"""Small tensors are sent together, up to so many bytes: a broadcast costs a millisecond when the cores are busy, and
next to nothing where ranks share memory.
"""
BATCH_TENSORS = 64


class ReaderEnded(Exception):
    """The reading rank has stopped before the end; it reports the reason itself."""


class SharedSource:
    """A Source. `source` is the open checkpoint on rank 0 of `group`, and None on the others, which open no file.

    Tensors travel in batches: a header, int64 [1 + 2 * BATCH_TENSORS], with their count (0 after the last batch) and
    each one's number in `tensors` and dtype; then their bytes. Every rank must call `end`.
    """

    def __init__(self, source: Source | None, group: Group, device: torch.device, stages: int = 1) -> None:
        """Tensors of the pipeline's `stages` are interleaved, so that all stages pack weights at the same time."""
        self._source = source
        self._group = group
        self._device = device
        self._batch_bytes = BATCH_BYTES if group.shared is None else 0
        self._ended = False
        self._waiting: deque[tuple[int, Tensor]] = deque()
        """Numbers and tensors, read but not sent or received but not taken; an empty tensor for a skipped one.
        """
        self._waiting_bytes = 0
        self._buffer = torch.empty(self._batch_bytes, dtype=torch.uint8, device=device)
        """Used by every batch of several tensors in turn; allocating each anew would fragment the memory."""
        self.tensors: dict[str, TensorInfo] = self._share_catalog(stages)
        self._names = list(self.tensors)
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """As Source.read, on the ranks' device; good until the next read. Raises ReaderEnded on those that receive."""
        if self._source is not None:
            tensor = self._source.read(name, dtype).to(self._device).contiguous()
            self._put(self._numbers[name], tensor)
            return tensor
        return self._next(name)

    def skip(self, name: str) -> None:
        """As `read`, on a receiving rank, for a tensor that it does not need."""
        self._next(name, wanted=False)

    @property
    def receives(self) -> bool:
        """Whether another rank reads and this one receives."""
        return self._source is None

    def _next(self, name: str, wanted: bool = True) -> Tensor:
        if not self._waiting and not self._receive(wanted):
            raise ReaderEnded
        number, tensor = self._waiting.popleft()
        assert self._names[number] == name, "the ranks read in the same order"
        return tensor

    def end(self, succeeded: bool) -> bool:
        """Ends reading on this rank, and returns whether all ranks have `succeeded`."""
        if self._source is not None:
            self._send()
            self._header([])
        else:
            while not self._ended and self._receive(wanted=False):
                pass
        self._waiting.clear()
        return bool(least(int(succeeded), self._group, self._device))

    def _put(self, number: int, tensor: Tensor) -> None:
        size = _aligned(tensor.nbytes)
        if self._waiting_bytes + size > self._batch_bytes or len(self._waiting) == BATCH_TENSORS:
            self._send()
        self._waiting.append((number, tensor))
        self._waiting_bytes += size
        if self._waiting_bytes > self._batch_bytes:
            self._send()

    def _send(self) -> None:
        if not self._waiting:
            return
        self._header([(number, _DTYPES.index(tensor.dtype)) for number, tensor in self._waiting])
        parts = [tensor.flatten().view(torch.uint8) for _, tensor in self._waiting]
        data = parts[0]
        if len(parts) > 1:
            data, start = self._buffer[: self._waiting_bytes], 0
            for part in parts:
                data[start : start + len(part)] = part
                start += _aligned(len(part))
        broadcast(data, self._group)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _receive(self, wanted: bool) -> bool:
        """Receives the next batch; drops a single tensor that is not `wanted`. False after the last batch."""
        self._waiting.clear()  # frees tensors that were not taken
        entries = self._header([])
        self._ended = not entries
        if self._ended:
            return False
        sizes = [self._shape(number, dtype).numel() * dtype.itemsize for number, dtype in entries]
        if len(sizes) == 1 and not wanted:
            pass_over(sizes[0], self._group, self._device)
            self._waiting.append((entries[0][0], self._buffer[:0]))
            return True
        steps = [_aligned(size) for size in sizes] if len(sizes) > 1 else sizes
        data = self._buffer[: sum(steps)]
        if len(sizes) == 1:
            data = torch.empty(sizes[0], dtype=torch.uint8, device=self._device)
        broadcast(data, self._group)
        for (number, dtype), size, part in zip(entries, sizes, torch.split(data, steps), strict=True):
            self._waiting.append((number, part[:size].view(dtype).view(self._shape(number, dtype))))
        return True

    def _shape(self, number: int, dtype: torch.dtype) -> torch.Size:
        """The shape in which a tensor travels; blocks travel as a matrix of bytes."""
        info = self.tensors[self._names[number]]
        if dtype == torch.uint8:
            rows = math.prod(info.shape[:-1])
            return torch.Size((rows, info.nbytes // rows))
        return torch.Size(info.shape)

    def _header(self, entries: list[tuple[int, int]]) -> list[tuple[int, torch.dtype]]:
        """Broadcasts rank 0's `entries`; returns them on every rank."""
        flat = [len(entries), *(value for entry in entries for value in entry)]
        header = torch.zeros(1 + 2 * BATCH_TENSORS, dtype=torch.int64)
        header[: len(flat)] = torch.tensor(flat)
        count, *values = broadcast(header.to(self._device), self._group, "plan").tolist()
        return [(values[2 * i], _DTYPES[values[2 * i + 1]]) for i in range(count)]

    def _share_catalog(self, stages: int) -> dict[str, TensorInfo]:
        data = b""
        if self._source is not None:
            tensors = list(self._source.tensors.items())
            run = -(-len(tensors) // stages)  # in the checkpoint's order, which is mostly that of the layers
            data = msgspec.msgpack.encode(dict(tensor for first in range(run) for tensor in tensors[first::run]))
        length = int(broadcast(torch.tensor([len(data)], device=self._device), self._group, "plan").item())
        if self._source is None:
            frame = torch.empty(length, dtype=torch.uint8, device=self._device)
        else:
            frame = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        shared = bytes(broadcast(frame, self._group, "plan").cpu().numpy().tobytes())
        return msgspec.msgpack.decode(shared, type=dict[str, TensorInfo])


def _aligned(nbytes: int) -> int:
    """The size rounded up so that what follows can be viewed as any dtype."""
    return nbytes + -nbytes % 8


def same_everywhere(data: bytes, what: str, group: Group, device: torch.device) -> None:
    """Raises ConfigError on every rank unless all of them have the same `data`, of at most 8 bytes."""
    number = int.from_bytes(data, "little", signed=True)
    if least(number, group, device) != -least(-number, group, device):
        raise ConfigError(f"the nodes differ in {what}: launch every one with the same model and options")
