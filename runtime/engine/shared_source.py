"""A checkpoint that one rank reads and the others receive tensor by tensor: no two can hold different files.

Every rank reads the same names in the same order. A rank that fails goes on receiving until the reader has ended, so
that they never wait for each other.
"""

import msgspec
import torch
from torch import Tensor

from llmserve.runtime.config import ConfigError
from llmserve.runtime.distributed.collectives import broadcast, least
from llmserve.runtime.distributed.groups import Group
from llmserve.runtime.engine.checkpoint import Source
from llmserve.runtime.models.configs import TensorInfo

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8)
_END = -1


class ReaderEnded(Exception):
    """The rank that reads has stopped before the end: it says why itself."""


class SharedSource:
    """A Source. `source` is the open checkpoint on rank 0 of `group`, and None on the others, which open no file.

    On the way is a header, int64 [2]: the tensor's number in `tensors` or _END, and its dtype; and then the tensor.
    """

    def __init__(self, source: Source | None, group: Group, device: torch.device) -> None:
        self._source = source
        self._group = group
        self._device = device
        self._ended = False
        self.tensors: dict[str, TensorInfo] = self._share_catalog()
        self._names = list(self.tensors)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """As Source.read, on the ranks' device. Raises ReaderEnded on the ranks that receive."""
        if self._source is None:
            received = self._receive()
            if received is None:
                raise ReaderEnded
            return received
        tensor = self._source.read(name, dtype)
        self._header(self._names.index(name), _DTYPES.index(tensor.dtype))
        return broadcast(tensor.to(self._device).contiguous(), self._group)

    def end(self, succeeded: bool) -> bool:
        """Ends the reading on this rank, and says whether all ranks have succeeded."""
        if self._source is not None:
            self._header(_END, 0)
        else:
            while not self._ended and self._receive() is not None:
                pass
        return bool(least(int(succeeded), self._group, self._device))

    def _receive(self) -> Tensor | None:
        """The next tensor; None when there is none any more."""
        number, dtype = self._header(0, 0)
        if number == _END:
            self._ended = True
            return None
        info = self.tensors[self._names[number]]
        shape = info.shape
        if _DTYPES[dtype] == torch.uint8:
            shape = (shape[0], info.nbytes // shape[0])
        return broadcast(torch.empty(shape, dtype=_DTYPES[dtype], device=self._device), self._group)

    def _header(self, number: int, dtype: int) -> tuple[int, int]:
        header = broadcast(torch.tensor([number, dtype], device=self._device), self._group, "plan")
        number, dtype = header.tolist()
        return number, dtype

    def _share_catalog(self) -> dict[str, TensorInfo]:
        data = b"" if self._source is None else msgspec.msgpack.encode(self._source.tensors)
        length = int(broadcast(torch.tensor([len(data)], device=self._device), self._group, "plan").item())
        if self._source is None:
            frame = torch.empty(length, dtype=torch.uint8, device=self._device)
        else:
            frame = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        shared = bytes(broadcast(frame, self._group, "plan").cpu().numpy().tobytes())
        return msgspec.msgpack.decode(shared, type=dict[str, TensorInfo])


def same_everywhere(data: bytes, what: str, group: Group, device: torch.device) -> None:
    """Raises ConfigError on every rank unless all of them have the same `data`, of at most 8 bytes."""
    number = int.from_bytes(data, "little", signed=True)
    if least(number, group, device) != -least(-number, group, device):
        raise ConfigError(f"the nodes differ in {what}: launch every one with the same model and options")
