"""The interface of attention backends: the KV pages, the batch of a step, and the operations of a backend.

A backend is planned once per step and then run once per layer. It chooses the layout of a page, and nobody else reads
pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class AttentionSpec(NamedTuple):
    """The parameters of a layer's attention, which is always causal.

    A token attends to the last `sliding_window` tokens, itself included; `softcap` c limits scores to c * tanh(score /
    c).
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """The T tokens of one step, of B sequences. Sequence b has the tokens [query_start[b], query_start[b + 1]).

    The tensors are on the model's device; the integers are known to the host without a sync.
    """

    input_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: the position of each token in its sequence."""
    query_start: Tensor
    """int32 [B + 1]."""
    seq_lens: Tensor
    """int32 [B]: the length of each sequence, this step's tokens included."""
    block_table: Tensor
    """int32 [B, max_pages]: the pages of each sequence in order; entries past its length are never read."""
    slot_mapping: Tensor
    """int64 [T]: page * page_size + offset, where the key and value of each token are written."""
    num_tokens: int
    num_sequences: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class PageGeometry:
    """What determines the size of a page: the layers, KV heads and dtype of this rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens in a page."""
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the keys and values of one page in all layers."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """The key and value pages of all layers, allocated once. CPU memory becomes resident only when it is written."""

    def __init__(
        self,
        geometry: PageGeometry,
        num_pages: int,
        key_shape: tuple[int, ...],
        value_shape: tuple[int, ...],
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        """`key_shape` and `value_shape` are the shapes of one page of one layer in the backend's layout."""
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
    """Writes the keys and values of a step into the pages, and attends to all those of each sequence."""

    name: ClassVar[str]
    """Its name in --attention-backend."""
    pool: KVPool

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepares a step: `forward` of every layer is for this batch until the next plan. Does not sync with the
        device.
        """

    @abstractmethod
    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], with rotary embedding applied; query head h reads KV head h * Hkv // Hq.

        Returns [T, Hq * D].
        """
