"""The native kernels as Python calls them: the C interface of csrc/kernels.cpp, typed. Calls release the GIL.

The calls check nothing: shapes, dtypes and contiguity are the callers' business. One thread at a time may call.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Sequence
from ctypes import CDLL, POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from llmserve.runtime.kernel_build import BuildError, built_library, source_digest

log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that the kernels take, by their numbers there."""
PANEL = 64
"""Outputs that a packed weight keeps together: its rows are padded to a multiple."""
BLOCK = 16
"""Tokens of a page that the attention kernels keep together: page sizes are a multiple."""
CACHE_LINE = 64
ARENA_CHUNK = 32 << 20

_SOURCES = source_digest()
"""What this module mirrors: with the structures and calls of other sources, a call would corrupt memory."""


class Weight(ctypes.Structure):
    """A packed weight [outputs, inputs]. format: 0 for panels of the kernels' own dtype, or a BlockFormat's number.

    rest: the address of another one, which has the last of the outputs, or None.
    """

    _fields_ = (
        ("data", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("format", c_int64),
        ("rest", c_void_p),
    )


class Linear(ctypes.Structure):
    """LinearDesc: the address of a Weight, and a bias, which may be None."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Layer(ctypes.Structure):
    """LayerDesc."""

    _fields_ = (
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("router", Linear),
        ("attention_input_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_input_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("rotary_dim", c_int64),
        ("window", c_int64),
    )


class Model(ctypes.Structure):
    """ModelDesc."""

    _fields_ = (
        ("embedding", c_void_p),
        ("embedding_rows", c_void_p),
        ("final_norm", c_void_p),
        ("ranks", c_void_p),
        ("first_token", c_int64),
        ("token_count", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_size", c_int64),
        ("norm_heads", c_int64),
        ("activation", c_int64),
        ("experts", c_int64),
        ("chosen", c_int64),
        ("norm_experts", c_int64),
        ("expert_size", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("softcap", c_float),
        ("embedding_multiplier", c_float),
        ("residual_multiplier", c_float),
    )


class Draw(ctypes.Structure):
    """DrawParams. top_k 0, top_p 1 and min_p 0 are off; `number` is the random one in [0, 1)."""

    _fields_ = (
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
        ("number", c_double),
    )


class Batch(ctypes.Structure):
    """The tokens of a step, as all layers see it."""

    _fields_ = (
        ("tokens", c_int),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
    )


class AttentionCall(ctypes.Structure):
    """One layer's attention. A window or a softcap of 0 is none."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("page_size", c_int),
        ("scale", c_float),
        ("window", c_int),
        ("softcap", c_float),
    )


_SIGNATURES = {
    "set_threads": (None, [c_int]),
    "huge_pages": (None, [c_void_p, c_int64]),
    "pack": (None, [c_int, c_void_p, c_void_p, c_int64, c_int64]),
    "unpack": (None, [c_int, c_void_p, c_void_p, c_int64, c_int64]),
    "pack_blocks": (None, [c_int64, c_void_p, c_void_p, c_int64, c_int64]),
    "gather_rows": (None, [c_int, POINTER(Weight), c_void_p, c_void_p, c_int64]),
    "linear": (None, [c_int, c_void_p, c_int64, c_int64, POINTER(Weight), c_void_p, c_void_p, c_int]),
    "rms_norm": (None, [c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float]),
    "activate_and_multiply": (None, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int]),
    "rotary": (None, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64]),
    "argmax": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "mask": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "draw": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "plan_new": (c_void_p, []),
    "plan_delete": (None, [c_void_p]),
    "plan_make": (None, [c_void_p, POINTER(Batch), c_int, c_void_p, c_void_p, c_int, c_int]),
    "attention": (None, [c_int, c_void_p, POINTER(AttentionCall)]),
    "shared_bytes": (c_int64, [c_int]),
    "shared_new": (c_void_p, [c_void_p, c_int, c_int, c_int, c_double, c_int]),
    "shared_all_reduce": (c_int, [c_int, c_void_p, c_void_p, c_int64]),
    "shared_all_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_int64]),
    "shared_broadcast": (c_int, [c_void_p, c_void_p, c_int64]),
    "shared_send": (c_int, [c_void_p, c_int, c_int, c_void_p, c_int64]),
    "shared_receive": (c_int, [c_void_p, c_int, c_int, c_void_p, c_int64]),
    "decoder_new": (c_void_p, [c_int, POINTER(Model), POINTER(Layer), c_int]),
    "decoder_delete": (None, [c_void_p]),
    "decoder_step": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
}


@functools.cache
def library() -> CDLL | None:
    """The kernels; None, and one line in the log, where they cannot be built. The first call may take seconds."""
    try:
        if source_digest() != _SOURCES:
            raise BuildError("their sources have changed since this process began")
        loaded = CDLL(str(built_library()))
    except (BuildError, OSError) as error:
        log.warning("no native kernels, torch's own are used reason=%s", error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"llmserve_{name}")
        function.restype, function.argtypes = result, arguments
    loaded.llmserve_set_threads(torch.get_num_threads())
    return loaded


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels are there and take these tensors: on the CPU, contiguous, of one dtype that they know."""
    first = tensors[0]
    return (
        first.dtype in DTYPES
        and all(t.device.type == "cpu" and t.dtype == first.dtype and t.is_contiguous() for t in tensors)
        and library() is not None
    )


def set_threads(threads: int) -> None:
    """How many threads the kernels may use."""
    if (kernels := library()) is not None:
        kernels.llmserve_set_threads(threads)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory on the CPU that is large and read in long runs, in huge pages where the system has them."""
    tensor = torch.empty(shape, dtype=dtype)
    _kernels().llmserve_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


class Arena:
    """Memory for many tensors that stay: together they fill huge pages, which each alone would not."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that starts at a cache line. Memory comes back when all tensors of a chunk are gone."""
        size = math.prod(shape) * dtype.itemsize
        rounded = -(-size // CACHE_LINE) * CACHE_LINE
        if rounded > self._rest.shape[0]:
            chunk = empty((max(rounded, ARENA_CHUNK) + CACHE_LINE,), torch.uint8)
            self._rest = chunk[-chunk.data_ptr() % CACHE_LINE :]
        tensor, self._rest = self._rest[:size].view(dtype).view(shape), self._rest[rounded:]
        return tensor


# The functions below are for `usable` tensors only.


def pack(weight: Tensor, packed: Tensor) -> None:
    """Lays weight [N, K] out in panels; packed is [N rounded up to PANEL, K]."""
    _kernels().llmserve_pack(DTYPES[weight.dtype], weight.data_ptr(), packed.data_ptr(), *weight.shape)


def unpack(packed: Tensor, outputs: int) -> Tensor:
    """The weight [outputs, K] of a packed one."""
    weight = packed.new_empty((outputs, packed.shape[1]))
    _kernels().llmserve_unpack(DTYPES[weight.dtype], packed.data_ptr(), weight.data_ptr(), *weight.shape)
    return weight


def pack_blocks(format: int, blocks: Tensor, packed: Tensor, inputs: int) -> None:
    """Lays the blocks of a weight, uint8 [N, bytes of a row] as GGUF has them, out in panels; packed is uint8."""
    _kernels().llmserve_pack_blocks(format, blocks.data_ptr(), packed.data_ptr(), blocks.shape[0], inputs)


def gather_rows(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows [n, K] of a packed weight that int64 ids [n] name."""
    rows = torch.empty((ids.shape[0], weight.inputs), dtype=dtype)
    _kernels().llmserve_gather_rows(DTYPES[dtype], weight, ids.data_ptr(), rows.data_ptr(), len(ids))
    return rows


def linear(x: Tensor, weight: Weight, bias: Tensor | None, wide: bool = False) -> Tensor:
    """x [..., K] times the packed weight [N, K] transposed, plus bias; `wide`: in float32, without rounding."""
    y = torch.empty((*x.shape[:-1], weight.outputs), dtype=torch.float32 if wide else x.dtype)
    rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
    _kernels().llmserve_linear(
        DTYPES[x.dtype],
        x.data_ptr(),
        inputs,
        rows,
        weight,
        bias.data_ptr() if bias is not None else None,
        y.data_ptr(),
        wide,
    )
    return y


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and x + residual (x itself without a residual). weight is float32 [x.shape[-1]]."""
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    size = x.shape[-1]
    _kernels().llmserve_rms_norm(
        DTYPES[x.dtype],
        x.data_ptr(),
        residual.data_ptr() if residual is not None else None,
        weight.data_ptr(),
        normed.data_ptr(),
        total.data_ptr(),
        x.numel() // size,
        size,
        eps,
    )
    return normed, total


def activate_and_multiply(x: Tensor, activation: int) -> Tensor:
    """activation(gate) * up of x [..., 2 * I]; the activation by its number (ACTIVATIONS)."""
    size = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], size))
    _kernels().llmserve_activate_and_multiply(
        DTYPES[x.dtype], x.data_ptr(), y.data_ptr(), y.numel() // size, size, activation
    )
    return y


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates x [T, H, D] in place; positions int64 [T], cos_sin float32 [max_position, R], contiguous."""
    _kernels().llmserve_rotary(
        DTYPES[x.dtype], x.data_ptr(), *x.shape, positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1]
    )


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of the largest of each row of float32 logits [N, V], int64 [N], and that value, [N]."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    best = torch.empty(logits.shape[0])
    _kernels().llmserve_argmax(logits.data_ptr(), tokens.data_ptr(), best.data_ptr(), *logits.shape)
    return tokens, best


def mask(rows: Sequence[Tensor], masks: Sequence[bytes]) -> Tensor:
    """The rows, float32 [V] each, as [n, V] with -inf where a row's mask has no bit; a bit each, the lowest first."""
    masked = torch.empty(len(rows), rows[0].shape[0])
    addresses = (c_void_p * len(rows))(*(row.data_ptr() for row in rows))
    bits = (c_char_p * len(rows))(*masks)
    _kernels().llmserve_mask(addresses, bits, masked.data_ptr(), *masked.shape)
    return masked


def draw(rows: Sequence[Tensor], best: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A token of each of the rows, float32 [V] each, as engine/sampler.py's draw; best [n] are the largest scores."""
    tokens = torch.empty(len(rows), dtype=torch.int64)
    addresses = (c_void_p * len(rows))(*(row.data_ptr() for row in rows))
    _kernels().llmserve_draw(
        addresses, best.data_ptr(), (Draw * len(rows))(*draws), tokens.data_ptr(), len(rows), rows[0].shape[0]
    )
    return tokens


def _kernels() -> CDLL:
    kernels = library()
    assert kernels is not None
    return kernels
