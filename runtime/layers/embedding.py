"""Token embedding and output head, split over tensor-parallel ranks by vocabulary."""

import torch
from torch import Tensor
from torch.nn import functional

from llmserve.runtime.distributed.collectives import all_gather, all_reduce
from llmserve.runtime.distributed.groups import Group
from llmserve.runtime.layers.linear import Rows
from llmserve.runtime.layers.weight import LinearWeight, PlainWeight, Slot, Slots, Weight
from llmserve.runtime.ops import linear


def split_vocab(vocab_size: int, group: Group) -> Rows:
    """This rank's rows. All ranks hold equally many; the last rows of the last ones may be padding."""
    share = -(-vocab_size // group.size)
    start = min(group.rank * share, vocab_size)
    return Rows(vocab_size, start, min(share, vocab_size - start))


def _vocab_slot(weight: Weight, vocab_size: int, group: Group) -> Slot:
    rows = split_vocab(vocab_size, group)
    return Slot(weight, (vocab_size, weight.shape[1]), (rows.slice,), (slice(0, rows.count),))


class VocabParallelEmbedding:
    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, group: Group
    ) -> None:
        self.vocab_size = vocab_size
        self.group = group
        self.rows = split_vocab(vocab_size, group)
        self.weight = PlainWeight((-(-vocab_size // group.size), hidden_size), dtype, device)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, hidden]."""
        if self.group.size == 1:
            return functional.embedding(input_ids, self.weight.value)
        local = input_ids - self.rows.start
        foreign = (local < 0) | (local >= self.rows.count)
        hidden = functional.embedding(local.masked_fill(foreign, 0), self.weight.value)
        return all_reduce(hidden.masked_fill(foreign.unsqueeze(-1), 0), self.group)

    def slots(self) -> Slots:
        yield "weight", _vocab_slot(self.weight, self.vocab_size, self.group)


class VocabParallelHead:
    """Hidden states to logits. With `tied` it reads the embedding's weight and has none of its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        tied: PlainWeight | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.group = group
        self.tied = tied is not None
        self.weight = tied or LinearWeight((-(-vocab_size // group.size), hidden_size), dtype, device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to [N, vocab_size]."""
        return all_gather(linear(hidden, self.weight.value), self.group)[:, : self.vocab_size]

    def slots(self) -> Slots:
        if not self.tied:
            yield "weight", _vocab_slot(self.weight, self.vocab_size, self.group)
