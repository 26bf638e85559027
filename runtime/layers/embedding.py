"""Token embedding and output head, split over tensor-parallel ranks by vocabulary."""

import torch
from torch import Tensor

from llmserve.runtime.distributed.collectives import all_gather, all_reduce
from llmserve.runtime.distributed.groups import Group
from llmserve.runtime.layers.linear import Rows
from llmserve.runtime.layers.weight import LinearWeight, PlainWeight, Slot, Slots, Weight
from llmserve.runtime.ops import embedding, logits


def split_vocab(vocab_size: int, group: Group) -> Rows:
    """This rank's rows. All ranks hold equally many; the last ones may end in rows that are never read."""
    share = -(-vocab_size // group.size)
    start = min(group.rank * share, vocab_size)
    return Rows(vocab_size, start, min(share, vocab_size - start))


def _vocab_slot(weight: Weight, vocab_size: int, group: Group) -> Slot:
    rows = split_vocab(vocab_size, group)
    return Slot(weight, (vocab_size, weight.shape[1]), (rows.slice,), (slice(0, rows.count),))


class VocabParallelEmbedding:
    """Token ids to vectors. `tied`: a head reads the same weight, which then lies as its products want it."""

    weight: PlainWeight | LinearWeight

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        tied: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.group = group
        self.rows = split_vocab(vocab_size, group)
        shape = (-(-vocab_size // group.size), hidden_size)
        self.weight = LinearWeight(shape, dtype, device) if tied else PlainWeight(shape, dtype, device)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, hidden]."""
        if self.group.size == 1:
            return embedding(input_ids, self.weight.value)
        local = input_ids - self.rows.start
        foreign = (local < 0) | (local >= self.rows.count)
        hidden = embedding(local.masked_fill(foreign, 0), self.weight.value)
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
        tied: PlainWeight | LinearWeight | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.group = group
        self.tied = tied is not None
        self.weight = tied or LinearWeight((-(-vocab_size // group.size), hidden_size), dtype, device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to float32 [N, vocab_size]."""
        return all_gather(logits(hidden, self.weight.value), self.group)[:, : self.vocab_size]

    def slots(self) -> Slots:
        if not self.tied:
            yield "weight", _vocab_slot(self.weight, self.vocab_size, self.group)
