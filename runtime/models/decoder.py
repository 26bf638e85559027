"""The decoder: one transformer, of which the model families are configurations (configs.py).

It is built from layers/, has no state but its weights, and uses the KV cache only through the attention backend.
Modules are plain objects: nn.Module's attribute lookup costs a decode step of a small model several per cent.
"""

import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend, AttentionSpec
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.distributed.pipeline import stage_layers
from llmserve.runtime.layers.activation import GATED_ACTIVATIONS
from llmserve.runtime.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from llmserve.runtime.layers.linear import ColumnParallelLinear, RowParallelLinear, split_heads, split_rows
from llmserve.runtime.layers.moe import SparseMLP
from llmserve.runtime.layers.norm import RMSNorm
from llmserve.runtime.layers.rope import RopeConfig
from llmserve.runtime.layers.rotary import cos_sin_table
from llmserve.runtime.layers.weight import Slots, join
from llmserve.runtime.models.configs import LayerConfig, ModelConfig
from llmserve.runtime.ops import apply_rotary


class Build:
    """What every module of a model is built from: config, dtype, device, topology, and shared rotary tables."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, topology: Topology, max_positions: int
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.topology = topology
        self.max_positions = max_positions
        self._tables: dict[RopeConfig, Tensor] = {}

    def table(self, rope: RopeConfig) -> Tensor:
        """The cos and sin table of `rope`, shared by layers with the same RopeConfig."""
        if rope not in self._tables:
            self._tables[rope] = cos_sin_table(rope, self.max_positions, self.device)
        return self._tables[rope]

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, self.device, self.config.norm_plus_one)


class Attention:
    """Self-attention of layer `index` of this rank's layers, over this rank's heads."""

    def __init__(self, build: Build, layer: LayerConfig, index: int) -> None:
        config, tp = build.config, build.topology.tp
        self.index = index
        self.head_dim = config.head_dim
        queries = split_heads(config.num_heads, config.head_dim, tp)
        keys = split_heads(config.num_kv_heads, config.head_dim, tp)
        self.widths = [queries.count, keys.count, keys.count]
        self.spec = AttentionSpec(
            scale=config.attention_scale, sliding_window=layer.sliding_window, softcap=config.attention_softcap
        )
        self.table = build.table(layer.rope) if layer.rope else None
        projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv = ColumnParallelLinear(config.hidden_size, projections, config.qkv_bias, build.dtype, build.device)
        self.output = RowParallelLinear(queries, config.hidden_size, config.output_bias, build.dtype, build.device, tp)
        self.norm_heads = config.qk_norm == "head"
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            self.query_norm = build.norm(config.head_dim if self.norm_heads else queries.count)
            self.key_norm = build.norm(config.head_dim if self.norm_heads else keys.count)

    def __call__(self, x: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        q, k, v = torch.split(self.qkv(x), self.widths, -1)
        if self.query_norm and self.key_norm and not self.norm_heads:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in (q, k, v))
        if self.query_norm and self.key_norm and self.norm_heads:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.table is not None:
            q, k = apply_rotary(q, k, positions, self.table)
        return self.output(attention.forward(self.index, q, k, v, self.spec))

    def slots(self) -> Slots:
        yield from self.qkv.slots()
        yield from join("o_proj", self.output.slots())
        if self.query_norm and self.key_norm:
            yield from join("q_norm", self.query_norm.slots())
            yield from join("k_norm", self.key_norm.slots())


class MLP:
    """The gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, build: Build) -> None:
        config, tp = build.config, build.topology.tp
        rows = split_rows(config.intermediate_size, tp)
        self.gate_up = ColumnParallelLinear(
            config.hidden_size, {"gate_proj": rows, "up_proj": rows}, config.mlp_bias, build.dtype, build.device
        )
        self.activation = GATED_ACTIVATIONS[config.activation]
        self.down = RowParallelLinear(rows, config.hidden_size, config.mlp_bias, build.dtype, build.device, tp)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        return self.down(self.activation(self.gate_up(x)))

    def slots(self) -> Slots:
        yield from self.gate_up.slots()
        yield from join("down_proj", self.down.slots())


def _sparse_mlp(build: Build) -> SparseMLP:
    config = build.config
    return SparseMLP(
        config.hidden_size,
        config.expert_intermediate_size,
        config.num_experts,
        config.experts_per_token,
        config.norm_expert_weights,
        GATED_ACTIVATIONS[config.activation],
        build.dtype,
        build.device,
        build.topology.tp,
    )


class DecoderLayer:
    """Attention and MLP, each with a norm before it, after it, or both.

    A layer takes the residual stream and the output of the layer before separately, because adding and normalizing can
    be one kernel.
    """

    def __init__(self, build: Build, layer: LayerConfig, index: int) -> None:
        config = build.config
        self.attention = Attention(build, layer, index)
        self.mlp = _sparse_mlp(build) if layer.sparse else MLP(build)
        self.residual_multiplier = config.residual_multiplier
        before, after = config.norm_style != "post", config.norm_style != "pre"
        self.attention_input_norm = build.norm(config.hidden_size) if before else None
        self.attention_output_norm = build.norm(config.hidden_size) if after else None
        self.mlp_input_norm = build.norm(config.hidden_size) if before else None
        self.mlp_output_norm = build.norm(config.hidden_size) if after else None

    def __call__(
        self, delta: Tensor, residual: Tensor | None, positions: Tensor, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """delta and residual [T, hidden] to the same. The stream is delta + residual; residual is None in the first
        layer.
        """
        x, residual = _enter(self.attention_input_norm, delta, residual)
        delta = self._leave(self.attention_output_norm, self.attention(x, positions, attention))
        x, residual = _enter(self.mlp_input_norm, delta, residual)
        return self._leave(self.mlp_output_norm, self.mlp(x)), residual

    def _leave(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        if norm:
            x = norm(x)
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier

    def slots(self) -> Slots:
        yield from join("self_attn", self.attention.slots())
        yield from join("mlp", self.mlp.slots())
        # llama calls the norm before the MLP what the others call the one after attention
        pre = self.attention_output_norm is None
        names = {
            "input_layernorm": self.attention_input_norm,
            "post_attention_layernorm": self.mlp_input_norm if pre else self.attention_output_norm,
            "pre_feedforward_layernorm": None if pre else self.mlp_input_norm,
            "post_feedforward_layernorm": self.mlp_output_norm,
        }
        for name, norm in names.items():
            if norm:
                yield from join(name, norm.slots())


def _enter(norm: RMSNorm | None, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Adds delta to the residual stream; returns the (normed) input of the next module, and the stream."""
    if residual is None:
        return (norm(delta) if norm else delta), delta
    if norm:
        return norm.add(delta, residual)
    total = delta + residual
    return total, total


class Decoder:
    """A causal language model, or the pipeline stage of it that this rank holds."""

    def __init__(self, build: Build) -> None:
        config, topology = build.config, build.topology
        self.config = config
        self.dtype = build.dtype
        self.device = build.device
        self.tp = topology.tp
        self.stage = stage_layers(config.num_layers, topology.pp.rank, topology.pp.size)
        self.num_layers = len(self.stage)
        self.num_kv_heads = split_heads(config.num_kv_heads, config.head_dim, topology.tp).count // config.head_dim
        first, last = topology.pp.rank == 0, topology.pp.rank == topology.pp.size - 1
        self.embedding: VocabParallelEmbedding | None = None
        if first or (last and config.tie_word_embeddings):
            self.embedding = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                build.dtype,
                build.device,
                topology.tp,
                tied=config.tie_word_embeddings,
            )
        self.layers = [DecoderLayer(build, config.layers[number], i) for i, number in enumerate(self.stage)]
        self.norm: RMSNorm | None = None
        self.head: VocabParallelHead | None = None
        if last:
            tied = self.embedding.weight if self.embedding and config.tie_word_embeddings else None
            self.norm = build.norm(config.hidden_size)
            self.head = VocabParallelHead(
                config.vocab_size, config.hidden_size, build.dtype, build.device, topology.tp, tied
            )
        # the multiplier is rounded to the weights' dtype, as transformers does
        self.embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=build.dtype))

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend, hidden: Tensor | None = None
    ) -> Tensor:
        """int64 input_ids and positions [T] to the final hidden states [T, hidden] for `logits`.

        A later pipeline stage takes `hidden` from the stage before, and all but the last return it for the next.
        """
        if hidden is None:
            assert self.embedding is not None
            hidden = self.embedding(input_ids)
            if self.embedding_multiplier != 1.0:
                hidden = hidden * self.embedding_multiplier
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, attention)
        x, stream = _enter(self.norm, hidden, residual)
        return x if self.norm else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab_size] of final hidden states [N, hidden]. Only the last stage has them."""
        assert self.head is not None
        logits = self.head(hidden)
        if self.config.logit_divisor != 1.0:
            logits = logits / self.config.logit_divisor
        if (cap := self.config.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def slots(self) -> Slots:
        if self.embedding:
            yield from join("model.embed_tokens", self.embedding.slots())
        for number, layer in zip(self.stage, self.layers, strict=True):
            yield from join(f"model.layers.{number}", layer.slots())
        if self.norm and self.head:
            yield from join("model.norm", self.norm.slots())
            yield from join("lm_head", self.head.slots())
