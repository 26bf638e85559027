"""A decoder whose forward pass is one call of the native kernels (ops/csrc/decoder.h), without Python in between.

It uses the weights of a Decoder in any of its configurations, whole or a rank's part. Tensor-parallel ranks do their
all-reduces within the call, through shared memory.
"""

import ctypes

from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend
from llmserve.runtime.attention.native import NativeAttention
from llmserve.runtime.layers.linear import ColumnParallelLinear, RowParallelLinear
from llmserve.runtime.layers.moe import ExpertsWeight, SparseMLP
from llmserve.runtime.layers.norm import RMSNorm
from llmserve.runtime.layers.weight import Slots
from llmserve.runtime.models.decoder import Decoder, DecoderLayer
from llmserve.runtime.ops import PackedWeight, native

SUM_BYTES = 4
"""All-reduces are in float32, whatever the model's dtype."""
_Linear = ColumnParallelLinear | RowParallelLinear | ExpertsWeight
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def _mlp(layer: DecoderLayer) -> tuple[_Linear, ...]:
    """The projections of a layer's MLP: gate and up, down, and the router if it has experts."""
    mlp = layer.mlp
    return (mlp.gate_up, mlp.down, mlp.router) if isinstance(mlp, SparseMLP) else (mlp.gate_up, mlp.down)


def runs_natively(decoder: Decoder) -> bool:
    """Whether a NativeDecoder can replace this decoder, given a NativeAttention."""
    linears = [
        linear for layer in decoder.layers for linear in (layer.attention.qkv, layer.attention.output, *_mlp(layer))
    ]
    joined = decoder.tp.process_group is None or decoder.tp.shared is not None
    return joined and decoder.dtype in native.DTYPES and all(linear.weight.value.panels for linear in linears)


class NativeDecoder:
    """Replaces a Decoder. The kernels access its weights through descriptors whose addresses never change."""

    def __init__(self, decoder: Decoder, attention: NativeAttention) -> None:
        kernels = native.library()
        assert kernels is not None
        self.config = decoder.config
        self.dtype = decoder.dtype
        self.num_layers = decoder.num_layers
        self.num_kv_heads = decoder.num_kv_heads
        self._decoder = decoder
        self._attention = attention
        self._kernels = kernels
        layers = [_layer(layer, attention, i) for i, layer in enumerate(decoder.layers)]
        self._handle: int = kernels.llmserve_decoder_new(
            native.DTYPES[decoder.dtype], _model(decoder, attention), (native.Layer * len(layers))(*layers), len(layers)
        )

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._kernels.llmserve_decoder_delete(self._handle)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend, hidden: Tensor | None = None
    ) -> Tensor:
        """As Decoder.forward. `attention` is the backend this was made with, and its plan holds the positions."""
        assert attention is self._attention
        out = input_ids.new_empty((input_ids.shape[0], self.config.hidden_size), dtype=self.dtype)
        failure = self._kernels.llmserve_decoder_step(
            self._handle,
            self._attention.handle,
            input_ids.data_ptr(),
            None if hidden is None else hidden.data_ptr(),
            out.data_ptr(),
        )
        if (ranks := self._decoder.tp).shared is not None:
            ranks.shared.check(failure)
            sums = 2 * self.num_layers + (hidden is None)
            ranks.counts.add("all_reduce", out.numel() * SUM_BYTES, sums)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def slots(self) -> Slots:
        return self._decoder.slots()


def _model(decoder: Decoder, attention: NativeAttention) -> native.Model:
    config, geometry, ranks = decoder.config, attention.pool.geometry, decoder.tp.shared
    embedding = decoder.embedding if decoder.stage.start == 0 else None
    table = embedding.weight.value if embedding else None
    return native.Model(
        embedding=ctypes.addressof(table.descriptor) if isinstance(table, PackedWeight) else None,
        embedding_rows=table.data_ptr() if isinstance(table, Tensor) else None,
        final_norm=_address(decoder.norm),
        ranks=ranks.handle if ranks else None,
        first_token=embedding.rows.start if embedding else 0,
        token_count=embedding.rows.count if embedding else 0,
        hidden=config.hidden_size,
        heads=attention.num_heads,
        kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        page_size=geometry.page_size,
        norm_heads=config.qk_norm == "head",
        activation=_ACTIVATIONS[config.activation],
        experts=config.num_experts,
        chosen=config.experts_per_token,
        norm_experts=config.norm_expert_weights,
        expert_size=config.expert_intermediate_size // decoder.tp.size,
        eps=config.rms_norm_eps,
        scale=config.attention_scale,
        softcap=config.attention_softcap or 0.0,
        embedding_multiplier=decoder.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
    )


def _layer(layer: DecoderLayer, attention: NativeAttention, index: int) -> native.Layer:
    table = layer.attention.table
    gate_up, down, *router = map(_linear, _mlp(layer))
    return native.Layer(
        qkv=_linear(layer.attention.qkv),
        output=_linear(layer.attention.output),
        gate_up=gate_up,
        down=down,
        router=router[0] if router else native.Linear(),
        attention_input_norm=_address(layer.attention_input_norm),
        attention_output_norm=_address(layer.attention_output_norm),
        mlp_input_norm=_address(layer.mlp_input_norm),
        mlp_output_norm=_address(layer.mlp_output_norm),
        query_norm=_address(layer.attention.query_norm),
        key_norm=_address(layer.attention.key_norm),
        cos_sin=None if table is None else table.data_ptr(),
        keys=attention.pool.keys[index].data_ptr(),
        values=attention.pool.values[index].data_ptr(),
        rotary_dim=0 if table is None else table.shape[1],
        window=layer.attention.spec.sliding_window or 0,
    )


def _address(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.value.data_ptr()


def _linear(layer: _Linear) -> native.Linear:
    bias = None
    if isinstance(layer, RowParallelLinear):
        bias = layer.partial_bias
    elif isinstance(layer, ColumnParallelLinear):
        bias = layer.bias
    return native.Linear(
        weight=ctypes.addressof(layer.weight.value.descriptor), bias=bias.value.data_ptr() if bias else None
    )
