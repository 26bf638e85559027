"""Pipeline parallelism: which layers a stage has, and how hidden states go from one stage to the next."""

import torch
from torch import Tensor, distributed

from llmserve.runtime.distributed.collectives import all_gather
from llmserve.runtime.distributed.groups import Topology


def stage_layers(num_layers: int, rank: int, size: int) -> range:
    """The layers of stage `rank` of `size`; uneven stages differ by one layer, the earlier ones being smaller.

    The first stage also embeds and the last one also computes logits, which costs more: it stays small while it can.
    """
    base, extra = divmod(num_layers, size)
    # the extra layers go to the stages in the middle first, then to the first, then to the last
    order = [*range(1, size - 1), 0, size - 1]
    counts = [base + (stage in order[:extra]) for stage in range(size)]
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


def send_hidden(hidden: Tensor, topology: Topology) -> None:
    """Sends hidden states [T, hidden] to the next stage: each tensor-parallel rank its slice of the columns."""
    part = hidden.chunk(topology.tp.size, -1)[topology.tp.rank].contiguous()
    distributed.send(part, group_dst=topology.pp.rank + 1, group=topology.pp.process_group)


def receive_hidden(
    num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device, topology: Topology
) -> Tensor:
    """Receives hidden states [num_tokens, hidden_size] from the stage before."""
    part = torch.empty(num_tokens, hidden_size // topology.tp.size, dtype=dtype, device=device)
    distributed.recv(part, group_src=topology.pp.rank - 1, group=topology.pp.process_group)
    return all_gather(part, topology.tp)
