"""CUDA devices that are not there: tensors that say they lie on one, computed on the CPU.

An operation that mixes devices fails as it would on a real one, and flash attention checks its arguments as torch's
does (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp). Memory of a device can only be taken under
`pretended_cuda`, in the thread that entered it.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from llmserve.runtime.attention.base import AttentionSpec
from llmserve.runtime.attention.reference import attend

CPU = torch.device("cpu")
MAY_MIX = {Tensor.copy_, Tensor.to, Tensor.__getitem__}
"""Operations that take tensors of the CPU and of a device together."""


class OnDevice(Tensor):
    """A tensor of the CPU that says that it lies on `place`."""

    place: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Pretending(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the CPU; what comes of it lies where it would."""
    if func is torch.device:
        return func(*args, **kwargs)
    leaves = tree_leaves((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
    devices = {tensor.place for tensor in ours}
    with torch._C.DisableTorchFunctionSubclass():
        plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) and leaf.dim()]
        unwrapped = {id(tensor): tensor.as_subclass(Tensor) for tensor in ours}
    if func == Tensor.device.__get__ and ours:
        return ours[0].place
    if func not in MAY_MIX:
        assert len(devices) < 2, f"{func} of tensors on {devices}"
        assert not (devices and plain), f"{func} of tensors on {devices} and on the CPU"
    assert func is not Tensor.numpy or not ours, "only tensors of the CPU are numpy's"
    named = [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    named += [torch.device(leaf) for leaf in tree_leaves(args) if names_device(func, leaf)]
    place = CPU if func is Tensor.cpu else [*named, *devices, CPU][0]
    assert place.type != "cuda" or place.index is not None, (
        f"{func} on the current device of a thread, whichever that is"
    )
    moved = func in (Tensor.to, Tensor.cpu) and [*devices, CPU][0] != place

    def on_cpu(leaf: Any) -> Any:
        return instead(leaf) if names_device(func, leaf) else unwrapped.get(id(leaf), leaf)

    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": instead(kwargs["device"])}
    args, kwargs = tree_map(on_cpu, (args, kwargs))
    result = func(*args, **kwargs)
    same = {id(plain): tensor for tensor in ours for plain in [unwrapped[id(tensor)]]}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.clone() if moved else leaf
        if place.type != "cuda" or id(leaf) in same:
            return same.get(id(leaf), leaf)
        wrapped = leaf.as_subclass(OnDevice)
        wrapped.place = place
        return wrapped

    return tree_map(wrap, result)


def names_device(func: Any, leaf: object) -> bool:
    return isinstance(leaf, torch.device) or (func is Tensor.to and isinstance(leaf, str))


def instead(name: Any) -> torch.device:
    """Where that is done which is asked of a device."""
    device = torch.device(name)
    return CPU if device.type == "cuda" else device


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> tuple[Tensor, ...]:
    """mha_varlen_fwd over pages. Its masks are aligned with the end: the last query sees the last key."""
    sequences = len(query_start) - 1
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert {x.dtype for x in (query_start, key_start, seqused_k, block_table)} == {torch.int32}
    assert all(x.is_contiguous() for x in (query_start, key_start, seqused_k))
    assert all(x.stride(-1) == 1 for x in (q, k, v, block_table))
    assert k.shape[1] % 256 == 0, "pages of a multiple of 256 tokens"
    assert k.shape == v.shape
    assert k.shape[3] == q.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[2] == 0
    assert len(key_start) == sequences + 1
    assert len(seqused_k) == len(block_table) == sequences
    assert num_splits == 1, "with more it writes rows of the first sequence only (pytorch/pytorch#194167)"
    assert window_size_right == 0, "causal"
    assert is_causal == (window_size_left == -1)
    lengths = seqused_k.tolist()
    assert max_k >= max(lengths)
    assert max_q >= int(query_start.diff().max())
    assert key_start.diff().tolist() == lengths
    spec = AttentionSpec(scale, None if window_size_left < 0 else window_size_left + 1)
    out = torch.empty_like(q)
    for i, length in enumerate(lengths):
        keys, values = (x[block_table[i].long()].flatten(0, 1)[:length] for x in (k, v))
        rows = slice(int(query_start[i]), int(query_start[i + 1]))
        out[rows] = attend(q[rows], keys, values, spec)
    return out, torch.empty(0), torch.empty(0), torch.empty(0), torch.empty(0)


class Mark:
    """A CUDA event of a stream that is never behind."""

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self, stream: object) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Mark") -> float:
        return 1000 * (end.time - self.time)


@contextlib.contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch, devices: int = 1, free_bytes: int = 1 << 30) -> Iterator[list[Any]]:
    """So many devices with so much free memory each; gives the devices that became current."""
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 2 * free_bytes))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    with torch.library._scoped_library("aten", "IMPL") as library, Pretending():
        library.impl("_flash_attention_forward", flash_attention, "CPU")
        yield current
