"""Collectives of ranks on one machine through shared memory (ops/csrc/shared_group.h). Counts nothing.

The memory is an anonymous file (memfd), which disappears with the last rank, however the ranks end.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.ops import native

log = logging.getLogger(__name__)

FLOCK = "hhqqi4x"
"""struct flock."""


class SharedGroup:
    """This rank's end. Tensors must be contiguous and on the CPU; every call may raise RankLost.

    Only one thread at a time may call it, except for `send` and `receive` with different tags.
    """

    def __init__(self, file: int, rank: int, size: int, timeout_s: float, spins: int) -> None:
        """`file` is the memory, opened by this rank itself. Waits spin `spins` times before they sleep."""
        kernels = native.library()
        assert kernels is not None
        self._kernels = kernels
        self._size = size
        self._timeout_s = timeout_s
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        self._memory = mmap.mmap(file, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.handle: int = kernels.llmserve_shared_new(address, file, rank, size, timeout_s, spins)

    def all_reduce(self, x: Tensor) -> None:
        """Sums `x` (float32 or bfloat16) over the ranks, in place, with bitwise the same result on each."""
        self._call(
            self._kernels.llmserve_shared_all_reduce, native.DTYPES[x.dtype], self.handle, x.data_ptr(), x.numel()
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors in rank order, [size, *x.shape]."""
        parts = x.new_empty((self._size, *x.shape))
        self._call(self._kernels.llmserve_shared_all_gather, self.handle, x.data_ptr(), parts.data_ptr(), x.nbytes)
        return parts

    def broadcast(self, x: Tensor) -> None:
        """Copies rank 0's values into the others' `x`. Rank 0 may return up to a megabyte ahead of them."""
        self._call(self._kernels.llmserve_shared_broadcast, self.handle, x.data_ptr(), x.nbytes)

    def pass_over(self, nbytes: int) -> None:
        """Takes part in a broadcast of `nbytes` bytes, on a rank that does not need them."""
        self._call(self._kernels.llmserve_shared_broadcast, self.handle, 0, nbytes)

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Sends `x`; returns when it may be changed. The receiver may be up to a megabyte behind."""
        self._call(self._kernels.llmserve_shared_send, self.handle, to, tag, x.data_ptr(), x.nbytes)

    def receive(self, x: Tensor, source: int, tag: int) -> None:
        """Receives into `x` what `source` sends with `tag`."""
        self._call(self._kernels.llmserve_shared_receive, self.handle, source, tag, x.data_ptr(), x.nbytes)

    def check(self, failure: int) -> None:
        """Raises RankLost if `failure`, the return value of a kernel that uses the group, is not 0."""
        if failure > 0:
            raise RankLost(f"rank {failure - 1} of {self._size} has ended")
        if failure < 0:
            raise RankLost(f"a rank has not answered for {self._timeout_s:g} s")

    def _call(self, function: Callable[..., int], *arguments: int) -> None:
        self.check(function(*arguments))


def share_memory(
    process_group: distributed.ProcessGroup, rank: int, size: int, timeout_s: float, spins: int
) -> SharedGroup | None:
    """Joins the ranks of a process group by shared memory. All must be on this machine and call it. None on all ranks
    when one of them cannot.
    """
    kernels, own = native.library(), -1
    nbytes = 0 if kernels is None else kernels.llmserve_shared_bytes(size)
    if rank == 0 and nbytes:
        own = os.memfd_create("llmserve-ranks")
        os.ftruncate(own, nbytes)
    where = torch.tensor([os.getpid(), own])
    distributed.broadcast(where, group=process_group, group_src=0)
    pid, file = where.tolist()
    shared = None
    if file >= 0 and nbytes:
        try:
            shared = SharedGroup(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), rank, size, timeout_s, spins)
        except OSError as error:
            log.warning("ranks share no memory reason=%s", error)
    everywhere = torch.tensor([shared is not None])
    distributed.all_reduce(everywhere, distributed.ReduceOp.MIN, group=process_group)
    if own >= 0:
        os.close(own)
    return shared if everywhere.item() else None
