"""Running a model over KV pages, as the engine does, without the engine."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend, ForwardBatch, PageGeometry
from llmserve.runtime.attention.native import NativeAttention
from llmserve.runtime.attention.reference import ReferenceAttention
from llmserve.runtime.engine.weights import load_weights
from llmserve.runtime.models.decoder import Decoder
from llmserve.runtime.models.hub import Checkpoint, resolve
from llmserve.runtime.models.native_decoder import NativeDecoder, runs_natively
from llmserve.runtime.models.registry import CausalLM, build_model

PAGE = 16
PAGES_A_SEQUENCE = 8


def load(
    checkpoint: Checkpoint | Path, dtype: torch.dtype = torch.float32, max_positions: int | None = None
) -> CausalLM:
    """The model of a checkpoint, or of a directory that holds one, with its weights."""
    if isinstance(checkpoint, Path):
        checkpoint = resolve(str(checkpoint))
    model = build_model(checkpoint.config, dtype, torch.device("cpu"), max_positions)
    load_weights(model, checkpoint, lambda done, total: None)
    return model


class Paged:
    """Sequences over the pages of one pool; sequence b has every `count`-th page, so that none is contiguous."""

    def __init__(
        self, model: CausalLM, dtype: torch.dtype = torch.float32, count: int = 2, native: bool = False
    ) -> None:
        """`native`: with the compiled kernels, a whole step of which is one call."""
        self.model = model
        self.attention: AttentionBackend
        config = model.config
        geometry = PageGeometry(model.num_layers, model.num_kv_heads, config.head_dim, PAGE, dtype, torch.device("cpu"))
        if native:
            assert isinstance(model, Decoder)
            assert runs_natively(model)
            self.attention = NativeAttention(geometry, count * PAGES_A_SEQUENCE, config.num_heads // model.tp.size)
            self.model = NativeDecoder(model, self.attention)
        else:
            self.attention = ReferenceAttention(geometry, count * PAGES_A_SEQUENCE)
        self.pages = torch.arange(count * PAGES_A_SEQUENCE, dtype=torch.int32).view(-1, count).T.flip(1).contiguous()
        self.lengths = [0] * count

    def step(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Computes `tokens[b]` as the next ones of sequence b; returns the logits [len(tokens[b]), vocab] of each."""
        counts = [len(part) for part in tokens]
        positions = [torch.arange(start, start + n) for start, n in zip(self.lengths, counts, strict=True)]
        self.lengths = [start + n for start, n in zip(self.lengths, counts, strict=True)]
        slots = [self.pages[b, p // PAGE] * PAGE + p % PAGE for b, p in enumerate(positions)]
        batch = ForwardBatch(
            input_ids=torch.tensor([token for part in tokens for token in part]),
            positions=torch.cat(positions),
            query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            block_table=self.pages,
            slot_mapping=torch.cat(slots).long(),
            num_tokens=sum(counts),
            num_sequences=len(counts),
            max_query_len=max(counts),
            max_seq_len=max(self.lengths),
        )
        with torch.inference_mode():
            self.attention.plan(batch)
            return list(self.compute(batch).split(counts))

    def compute(self, batch: ForwardBatch) -> Tensor:
        return self.model.logits(self.model.forward(batch.input_ids, batch.positions, self.attention))

    def run(self, sequences: Sequence[Sequence[int]], chunks: Sequence[int]) -> list[Tensor]:
        """The logits of whole sequences of one length, computed together in steps of `chunks` tokens each."""
        steps, start = [], 0
        for size in chunks:
            steps.append(self.step([ids[start : start + size] for ids in sequences]))
            start += size
        return [torch.cat(parts) for parts in zip(*steps, strict=True)]
