"""An MLP of experts: a router sends each token to the few of them that score best, and adds up what they answer."""

from collections.abc import Callable

import torch
from torch import Tensor

from llmserve.runtime.distributed.collectives import all_reduce
from llmserve.runtime.distributed.groups import Group
from llmserve.runtime.layers.linear import ColumnParallelLinear, Rows, split_rows
from llmserve.runtime.layers.weight import LinearWeight, Slot, Slots
from llmserve.runtime.ops import grouped_linear, logits
from llmserve.runtime.ops.native import PANEL


class ExpertsWeight:
    """The matrices [outputs, K] of all experts as one weight, in which each begins at a panel."""

    def __init__(self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.outputs = outputs
        self.stride = -(-outputs // PANEL) * PANEL
        self.weight = LinearWeight((experts * self.stride, inputs), dtype, device)

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """[R, K] to [R, outputs]: the first counts[0] rows are the first expert's, and so on."""
        return grouped_linear(x, counts, self.weight.value, self.outputs)

    def slot(self, expert: int, shape: tuple[int, int], part: tuple[slice, ...], first: int, count: int) -> Slot:
        """Where this rank's `part` of an expert's tensor goes: its outputs [first, first + count)."""
        start = expert * self.stride + first
        return Slot(self.weight, shape, part, (slice(start, start + count),))


class SparseMLP:
    """Of each expert, which is a gated MLP, a tensor-parallel rank has a slice; all ranks have the whole router."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        experts_per_token: int,
        norm_weights: bool,
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        self.hidden_size = hidden_size
        self.experts = experts
        self.experts_per_token = experts_per_token
        self.norm_weights = norm_weights
        self.activation = activation
        self.group = group
        self.rows = split_rows(intermediate_size, group)
        self.router = ColumnParallelLinear(hidden_size, {"gate": Rows(experts, 0, experts)}, False, dtype, device)
        self.gate_up = ExpertsWeight(experts, 2 * self.rows.count, hidden_size, dtype, device)
        self.down = ExpertsWeight(experts, hidden_size, self.rows.count, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        weights, experts = self.route(x)
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=x.device)
        counts.index_add_(0, experts.flatten(), torch.ones_like(order))
        answers = self.down(self.activation(self.gate_up(x[order // self.experts_per_token], counts)), counts)
        chosen = torch.empty_like(answers)
        chosen[order] = answers
        parts = chosen.view(len(x), self.experts_per_token, -1).float() * weights.unsqueeze(-1)
        return all_reduce(parts.sum(1).to(x.dtype), self.group)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, int64 [T, experts_per_token], and before them their weights, in float32."""
        weights, experts = logits(x, self.router.weight.value).softmax(-1).topk(self.experts_per_token)
        return (weights / weights.sum(-1, keepdim=True) if self.norm_weights else weights), experts

    def slots(self) -> Slots:
        yield from self.router.slots()
        count, whole = self.rows.count, self.rows.total
        for expert in range(self.experts):
            name, inward = f"experts.{expert}", (whole, self.hidden_size)
            yield f"{name}.gate_proj.weight", self.gate_up.slot(expert, inward, (self.rows.slice,), 0, count)
            yield f"{name}.up_proj.weight", self.gate_up.slot(expert, inward, (self.rows.slice,), count, count)
            columns = (slice(None), self.rows.slice)
            yield f"{name}.down_proj.weight", self.down.slot(expert, inward[::-1], columns, 0, self.hidden_size)
