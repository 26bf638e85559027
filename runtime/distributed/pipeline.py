"""Pipeline parallelism: the layers of a stage, and passing hidden states from stage to stage."""

from collections import deque

import torch
from torch import Tensor, distributed

from llmserve.runtime.distributed.collectives import all_gather, finish, receive, send
from llmserve.runtime.distributed.groups import Topology


def stage_layers(num_layers: int, rank: int, size: int) -> range:
    """The layers of stage `rank` of `size`. Uneven stages differ by one layer.

    Additional layers go to the stages in the middle first. The last stage gets one last, because it also computes the
    logits, which cost more than the embedding of the first.
    """
    base, extra = divmod(num_layers, size)
    # the extra layers go to the stages in the middle first, then to the first, then to the last
    order = [*range(1, size - 1), 0, size - 1]
    counts = [base + (stage in order[:extra]) for stage in range(size)]
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


class Pipe:
    """The connections of a stage to its neighbours. Each tensor-parallel rank sends a slice of the columns; the
    receivers gather them.
    """

    def __init__(self, topology: Topology, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.first = topology.pp.rank == 0
        self.last = topology.pp.rank == topology.pp.size - 1
        self._tp, self._pp = topology.tp, topology.pp
        self._width = hidden_size // topology.tp.size
        self._dtype, self._device = dtype, device
        self._sent: deque[tuple[Tensor, distributed.Work | None]] = deque()
        """Tensors under way, kept until they have arrived."""

    def receive(self, num_tokens: int) -> Tensor:
        """Waits for the hidden states [num_tokens, hidden_size] of the stage before. Raises RankLost."""
        part = torch.empty(num_tokens, self._width, dtype=self._dtype, device=self._device)
        return all_gather(receive(part, self._pp.rank - 1, self._pp), self._tp)

    def send(self, hidden: Tensor) -> None:
        """Sends hidden states [T, hidden_size] to the next stage without waiting for their arrival. Raises RankLost.

        The next stage may still be at earlier steps: at most as many sends are under way as there are stages.
        """
        while len(self._sent) >= self._pp.size:
            finish(self._sent.popleft()[1])
        part = hidden.chunk(self._tp.size, -1)[self._tp.rank].contiguous()
        self._sent.append((part, send(part, self._pp.rank + 1, self._pp)))
