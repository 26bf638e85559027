"""CausalLM, the interface of a model, and building the one that a ModelConfig describes."""

from typing import Protocol

import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.layers.weight import Slots
from llmserve.runtime.models.configs import ModelConfig
from llmserve.runtime.models.decoder import Build, Decoder


class CausalLM(Protocol):
    """A causal language model, or the part of it that this rank holds, over a paged KV cache."""

    config: ModelConfig
    dtype: torch.dtype
    """Of the weights and of the hidden states."""
    num_layers: int
    """Layers of this rank; the attention backend knows them as 0 to num_layers - 1."""
    num_kv_heads: int
    """KV heads of this rank, in each layer."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend, hidden: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [T, hidden] of tokens [T] at positions [T]; `attention` has been planned for them.

        A later pipeline stage takes the `hidden` states of the stage before it.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab_size] of final hidden states [N, hidden]."""
        ...

    def slots(self) -> Slots:
        """Where each tensor of a checkpoint goes, by its Hugging Face name."""
        ...


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    topology: Topology | None = None,
) -> CausalLM:
    """The model, without its weights, which engine/weights.py loads: our decoder, or transformers' modules.

    `max_positions` is the longest sequence to be served, by default the config's limit. Raises ValueError when the
    ranks of `topology` cannot share the heads, and ConfigError when transformers cannot build the model.
    """
    topology = topology or Topology()
    if config.implementation == "transformers":
        from llmserve.runtime.models.transformers_backend import TransformersModel

        if topology.tp.size * topology.pp.size > 1:
            raise ValueError(
                f"{config.architecture} runs through transformers' modules, which cannot be split over ranks"
            )
        return TransformersModel(config, dtype, device)
    positions = max_positions or config.max_position_embeddings
    return Decoder(Build(config, dtype, device, topology, positions))
