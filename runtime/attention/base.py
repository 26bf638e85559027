"""The interface of attention: the pages of keys and values, what a step looks like, and what a backend does with them.

A backend is planned once a step and then run once a layer. It chooses how a page is laid out; nobody else reads pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class AttentionSpec(NamedTuple):
    """One layer's kind of attention, always causal.

    A token sees the last `sliding_window` tokens, itself included; `softcap` c bounds scores as c * tanh(score / c).
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step. Sequence b has the tokens [query_start[b], query_start[b + 1]) of the T tokens.

    The tensors lie on the model's device; the integers are known to the host without a sync.
    """

    input_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: the index of each token in its own sequence."""
    query_start: Tensor
    """int32 [B + 1]."""
    seq_lens: Tensor
    """int32 [B]: tokens of each sequence once this step's are written."""
    block_table: Tensor
    """int32 [B, max_pages]: the pages of each sequence in order; what lies past its length is never read."""
    slot_mapping: Tensor
    """int64 [T]: page * page_size + offset, where each token's key and value go."""
    num_tokens: int
    num_sequences: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class PageGeometry:
    """What the size of a page depends on: the layers, heads and numbers that this rank holds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens in a page."""
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_page(self) -> int:
        """Keys and values of one page in all layers."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """The key and value pages of all layers, allocated once. Untouched memory of a CPU pool is not resident."""

    def __init__(
        self,
        geometry: PageGeometry,
        num_pages: int,
        key_shape: tuple[int, ...],
        value_shape: tuple[int, ...],
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        """`key_shape` and `value_shape` are those of one page of one layer, as the backend lays it out."""
        self.geometry = geometry
        self.num_pages = num_pages
        empty = allocate or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=geometry.device))
        layers = range(geometry.num_layers)
        self.keys = [empty((num_pages, *key_shape), geometry.dtype) for _ in layers]
        self.values = [empty((num_pages, *value_shape), geometry.dtype) for _ in layers]

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.geometry.bytes_per_page


class AttentionBackend(ABC):
    """Writes a step's keys and values into the pages and attends to all that the sequences have there."""

    name: ClassVar[str]
    """As --attention-backend has it."""
    pool: KVPool

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepares a step: every layer's `forward` until the next plan is about this batch. No sync with the device."""

    @abstractmethod
    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], positions already applied; query head h reads KV head h * Hkv // Hq.

        Returns [T, Hq * D].
        """
