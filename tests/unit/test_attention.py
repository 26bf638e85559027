"""Attention backends against a naive dense computation: prompts, chunks and decodes together, over scattered pages."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmserve.runtime.attention import varlen
from llmserve.runtime.attention.base import AttentionBackend, AttentionSpec, PageGeometry
from llmserve.runtime.attention.native import NativeAttention, unsupported
from llmserve.runtime.attention.reference import ReferenceAttention
from llmserve.runtime.attention.select import make_attention, page_size
from llmserve.runtime.config import ConfigError
from llmserve.runtime.engine.batch import PlanRow, StepPlan, int32_bytes
from llmserve.runtime.engine.forward import make_forward_batch
from llmserve.runtime.ops import native

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

Backend = Callable[[PageGeometry, int, int], AttentionBackend]
BACKENDS: dict[str, Backend] = {
    "reference": lambda geometry, pages, heads: ReferenceAttention(geometry, pages),
    "native": NativeAttention,
    "varlen": lambda geometry, pages, heads: varlen.VarlenAttention(geometry, pages),
}
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no compiler, or a CPU without AVX-512")
backends = pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_kernels)])


class Sequences:
    """Sequences of random keys and values in scattered pages, and what dense attention makes of them."""

    def __init__(
        self,
        backend: str,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        page_size: int = 16,
        device: torch.device = CPU,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.dtype, self.page_size, self.device = dtype, page_size, device
        geometry = PageGeometry(1, kv_heads, head_dim, page_size, dtype, device)
        self.attention = BACKENDS[backend](geometry, 400, heads)
        # what other requests left in the pages must never show
        self.attention.pool.keys[0].fill_(float("nan"))
        self.attention.pool.values[0].fill_(float("nan"))
        self._random = torch.Generator().manual_seed(0)
        self._free = torch.randperm(400, generator=self._random).tolist()
        self._pages: dict[str, list[int]] = {}
        self._q: dict[str, Tensor] = {}
        self._k: dict[str, Tensor] = {}
        self._v: dict[str, Tensor] = {}

    def step(self, spec: AttentionSpec, **tokens: int) -> dict[str, Tensor]:
        """Adds tokens to sequences; each one's output for them, [n, heads * head_dim]."""
        rows = []
        for name, count in tokens.items():
            start = len(self._k[name]) if name in self._k else 0
            self._extend(name, count)
            pages = self._pages.setdefault(name, [])
            while len(pages) * self.page_size < start + count:
                pages.append(self._free.pop())
            rows.append(PlanRow(token_ids=int32_bytes([0] * count), start=start, pages=int32_bytes(pages)))
        batch, _ = make_forward_batch(StepPlan(rows=tuple(rows)), self.page_size, self.device)
        self.attention.plan(batch)
        q, k, v = (
            torch.cat([of[name][-count:] for name, count in tokens.items()]) for of in (self._q, self._k, self._v)
        )
        out = self.attention.forward(0, q.to(self.device), k.to(self.device), v.to(self.device), spec).cpu()
        return dict(zip(tokens, out.split(list(tokens.values())), strict=True))

    def _extend(self, name: str, count: int) -> None:
        for of, heads in ((self._q, self.heads), (self._k, self.kv_heads), (self._v, self.kv_heads)):
            new = torch.randn(count, heads, self.head_dim, generator=self._random).to(self.dtype)
            of[name] = torch.cat([of[name], new]) if name in of else new

    def dense(self, name: str, count: int, spec: AttentionSpec) -> Tensor:
        """What the last `count` tokens of a sequence get, in float64, from the whole matrix of scores."""
        q, k, v = (of[name].double() for of in (self._q, self._k, self._v))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        n = len(k)
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        if spec.sliding_window:
            visible &= ~torch.ones(n, n, dtype=torch.bool).tril(-spec.sliding_window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)[-count:].flatten(1)

    def check(self, spec: AttentionSpec, **tokens: int) -> None:
        for name, out in self.step(spec, **tokens).items():
            error = (out.double() - self.dense(name, tokens[name], spec)).abs().max().item()
            assert error < TOLERANCE[self.dtype], name


@backends
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 16), (4, 4, 32), (8, 1, 96), (2, 1, 128), (1, 1, 256)]
)
def test_prompts_chunks_and_decodes_in_one_batch(
    backend: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    sequences = Sequences(backend, heads, kv_heads, head_dim, dtype)
    spec = AttentionSpec(scale=head_dim**-0.5)
    sequences.check(spec, a=15, b=16, c=17)  # ends at, before and after a page's end
    sequences.check(spec, a=1, b=1, c=1)
    sequences.check(spec, a=1, b=40, d=1, c=100)
    sequences.check(spec, d=31, c=1)


@backends
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [1, 24, 130])
def test_a_sliding_window_ends_where_it_should(backend: str, dtype: torch.dtype, window: int) -> None:
    sequences = Sequences(backend, 4, 2, 32, dtype)
    spec = AttentionSpec(scale=0.2, sliding_window=window)
    sequences.check(spec, a=window + 20, b=window - 1 or 1)
    sequences.check(spec, a=1, b=1)
    sequences.check(spec, a=150, b=1)


@backends
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_softcap_bounds_the_scores(backend: str, dtype: torch.dtype) -> None:
    sequences = Sequences(backend, 4, 2, 32, dtype)
    spec = AttentionSpec(scale=1.0, softcap=3.0)
    sequences.check(spec, a=50)
    sequences.check(spec, a=1)


@backends
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sequences_that_one_task_does_not_hold(backend: str, dtype: torch.dtype) -> None:
    sequences = Sequences(backend, 3, 1, 32, dtype)
    spec = AttentionSpec(scale=0.2)
    sequences.check(spec, a=511, b=512, c=513, d=1300)
    sequences.check(spec, a=1, b=1)
    sequences.check(spec, d=1)
    sequences.check(AttentionSpec(scale=0.2, sliding_window=600), d=1)


@needs_kernels
def test_larger_pages() -> None:
    sequences = Sequences("native", 4, 2, 32, torch.bfloat16, page_size=64)
    sequences.check(AttentionSpec(scale=0.2), a=100, b=64)
    sequences.check(AttentionSpec(scale=0.2), a=1, b=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("window", [None, 1, 24])
def test_varlen_attention_on_a_gpu(window: int | None) -> None:
    sequences = Sequences("varlen", 9, 3, 64, torch.bfloat16, page_size=256, device=torch.device("cuda"))
    spec = AttentionSpec(scale=0.125, sliding_window=window)
    sequences.check(spec, a=255, b=256, c=257)
    sequences.check(spec, a=1, b=1, c=1)
    sequences.check(spec, a=1, b=40, d=1, c=600)


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_token_gets_the_same_whatever_else_is_in_the_batch(dtype: torch.dtype) -> None:
    spec = AttentionSpec(scale=0.2)
    q, k, v = (torch.randn(701, heads, 32, generator=torch.Generator().manual_seed(1)).to(dtype) for heads in (6, 2, 2))

    def outputs(steps: list[int], others: int) -> Tensor:
        """The tokens in steps of these sizes, in a batch with single tokens of other sequences."""
        attention = NativeAttention(PageGeometry(1, 2, 32, 16, dtype, CPU), 100, 6)
        out, start = [], 0
        for size in steps:
            rows = [PlanRow(token_ids=bytes(4 * size), start=start, pages=int32_bytes(list(range(50))))]
            rows += [PlanRow(token_ids=bytes(4), start=0, pages=int32_bytes([50 + i])) for i in range(others)]
            batch, _ = make_forward_batch(StepPlan(rows=tuple(rows)), 16, CPU)
            attention.plan(batch)
            now = slice(start, start + size)
            q_now, k_now, v_now = (torch.cat([x[now], x[:others]]) for x in (q, k, v))
            out.append(attention.forward(0, q_now, k_now, v_now, spec)[:size])
            start += size
        return torch.cat(out)

    whole = outputs([701], 0)
    for steps, others in (([700, 1], 0), ([700, 1], 40), ([16] * 43 + [13], 3), ([1, 600, 100], 7)):
        assert torch.equal(outputs(steps, others), whole)


@needs_kernels
def test_the_choice_of_a_backend(caplog: pytest.LogCaptureFixture) -> None:
    geometry = PageGeometry(1, 2, 32, 16, torch.bfloat16, CPU)
    assert isinstance(make_attention("auto", geometry, 4, 2, False), NativeAttention)
    assert isinstance(make_attention("native", geometry, 4, 2, False), NativeAttention)
    assert isinstance(make_attention("reference", geometry, 4, 2, False), ReferenceAttention)
    assert not caplog.text
    with pytest.raises(ConfigError, match="runs on CUDA, not on cpu; use --attention-backend auto"):
        make_attention("varlen", geometry, 4, 2, False)
    for odd in (
        PageGeometry(1, 2, 32, 24, torch.bfloat16, CPU),
        PageGeometry(1, 2, 40, 16, torch.bfloat16, CPU),
        PageGeometry(1, 2, 32, 16, torch.float16, CPU),
    ):
        reason = unsupported(odd)
        assert reason
        caplog.clear()
        assert isinstance(make_attention("auto", odd, 4, 2, False), ReferenceAttention)
        assert f"attention will be slow, by the reference backend reason={reason}" in caplog.text
        with pytest.raises(ConfigError, match=reason.split(",")[0]):
            make_attention("native", odd, 4, 2, False)


def test_what_varlen_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[-1])
    cuda = torch.device("cuda")
    assert page_size("auto", 16, cuda) == 256
    assert page_size("varlen", 300, cuda) == 512
    assert page_size("reference", 16, cuda) == 16
    assert page_size("auto", 16, CPU) == 16
    good = PageGeometry(1, 2, 64, 256, torch.bfloat16, cuda)
    assert varlen.unsupported(good, softcap=False) is None
    for odd, softcap, said in (
        (good, True, "softcap"),
        (dataclasses.replace(good, dtype=torch.float32), False, "float32"),
        (dataclasses.replace(good, page_size=16), False, "256 tokens, not of 16"),
        (dataclasses.replace(good, head_dim=264), False, "not of 264"),
        (dataclasses.replace(good, device=CPU), False, "not on cpu"),
    ):
        assert said in (varlen.unsupported(odd, softcap) or "")
    capability.append((7, 5))
    assert "capability 8.0" in (varlen.unsupported(good, softcap=False) or "")
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    assert "torch 2.13" in (varlen.unsupported(good, softcap=False) or "")
