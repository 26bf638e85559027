"""Native kernels against the torch reference, op by op, and how they are built."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from llmserve.runtime import kernel_build, ops
from llmserve.runtime.ops import native, reference

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler, or a CPU without AVX-512")

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""The largest relative error of one rounding, with a little room for float32 sums in another order."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: Tensor, exact: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """`actual` is `exact` but for a rounding or two, of numbers about as large as `scale`."""
    error = (actual.double() - exact.double()).abs() / (exact.double().abs() + scale)
    assert actual.shape == exact.shape
    assert error.max().item() < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (960, 576), (1000, 64), (30, 96), (576, 1536)])
def test_a_packed_weight_holds_the_weight(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs, dtype=dtype)
    packed = ops.PackedWeight(weight)
    assert packed.panels
    assert torch.equal(packed.unpack(), weight)
    ids = torch.tensor([outputs - 1, 0, 7, 7])
    assert torch.equal(ops.embedding(ids, packed), weight[ids])
    address = packed.data.data_ptr()
    other = ops.PackedWeight(2 * weight)
    packed.exchange(other)
    assert torch.equal(packed.unpack(), 2 * weight)
    assert torch.equal(other.unpack(), weight)
    assert packed.data.data_ptr() == address


def test_a_weight_that_the_kernels_do_not_take_stays_plain() -> None:
    for weight in (random(8, 6, dtype=torch.float16), random(8, 7, dtype=torch.bfloat16)):
        packed = ops.PackedWeight(weight)
        assert not packed.panels
        x = torch.ones(2, weight.shape[1], dtype=weight.dtype)
        assert torch.equal(ops.linear(x, packed), reference.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (960, 576), (1000, 64), (30, 96), (576, 1536)])
def test_linear(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1)
    packed = ops.PackedWeight(weight)
    for rows in (1, 2, 5, 6, 7, 13, 64, 97, 300):
        x = random(rows, inputs, dtype=dtype, seed=rows)
        exact = x.double() @ weight.double().T
        assert_rounded(ops.linear(x, packed, bias), exact + bias.double(), dtype, scale=4 * inputs**0.5)
        logits = ops.logits(x, packed)
        assert logits.dtype == torch.float32
        assert_rounded(logits, exact, torch.float32, scale=10 * inputs**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    packed = ops.PackedWeight(random(960, 576, dtype=dtype))
    x = random(200, 576, dtype=dtype, seed=1)
    together = ops.linear(x, packed)
    for rows in (1, 3, 16, 64):
        assert torch.equal(ops.linear(x[:rows].contiguous(), packed), together[:rows])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_groups_of_rows_have_weights_of_their_own(dtype: torch.dtype) -> None:
    """Those of 40 outputs each begin at a panel; torch computes what the kernels do not take."""
    weight = random(3 * 64, 32, dtype=dtype)
    packed = ops.PackedWeight(weight)
    assert packed.panels == (dtype in DTYPES)
    x = random(20, 32, dtype=dtype, seed=1)
    y = ops.grouped_linear(x, torch.tensor([13, 0, 7]), packed, 40)
    assert torch.equal(y[:13], ops.linear(x[:13], ops.PackedWeight(weight[:40])))
    assert torch.equal(y[13:], ops.linear(x[13:], ops.PackedWeight(weight[128:168])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (17, 576), (2, 5, 48), (1, 7)])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=torch.float32, seed=2)
    assert_rounded(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5), dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, reference.rms_norm(total.double(), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("size", [1536, 24])
def test_gated_activations(dtype: torch.dtype, name: str, size: int) -> None:
    x = 4 * random(5, 2 * size, dtype=dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    gate, up = x.double().chunk(2, -1)
    exact = silu(gate) if name == "silu_and_mul" else gelu(gate, approximate="tanh")
    assert_rounded(getattr(ops, name)(x), exact * up, dtype)
    assert_rounded(getattr(reference, name)(x), exact * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [64, 48])
def test_rotary(dtype: torch.dtype, rotary_dim: int) -> None:
    q, k = random(5, 4, 64, dtype=dtype), random(5, 2, 64, dtype=dtype, seed=1)
    angles = torch.outer(torch.arange(100.0), 100.0 ** -(torch.arange(rotary_dim // 2) / (rotary_dim // 2)))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([0, 1, 50, 98, 99])
    expected = reference.apply_rotary(q.float(), k.float(), positions, table)
    for actual, exact in zip(ops.apply_rotary(q, k, positions, table), expected, strict=True):
        assert_rounded(actual, exact, dtype)


def test_argmax_finds_the_first_of_equals_and_any_nan() -> None:
    logits = random(6, 1003, dtype=torch.float32)
    logits[1, [17, 900]] = 50.0
    logits[2, [40, 1002]] = float("nan")
    logits[3] = float("-inf")
    logits[4, 1002] = float("inf")
    tokens, best = native.argmax(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    assert tokens[1] == 17
    torch.testing.assert_close(best, logits[torch.arange(6), tokens], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 50, 64, 1003])
def test_a_mask_leaves_its_tokens_alone(size: int) -> None:
    rows = random(3, size, dtype=torch.float32)
    chosen = torch.rand(3, size, generator=torch.Generator().manual_seed(1)) < 0.3
    masks = [np.packbits(row.numpy(), bitorder="little").tobytes() for row in chosen]
    expected = rows.masked_fill(~chosen, float("-inf"))
    padded = [mask + b"\xff" * 3 for mask in masks]  # a library may round up
    for masked in (native.mask([*rows], masks), reference.mask([*rows], masks), native.mask([*rows], padded)):
        assert torch.equal(masked, expected)
    assert torch.equal(reference.mask([*rows], padded), expected)


def test_without_a_compiler_the_reason_is_said_and_torch_computes(tmp_path: Path) -> None:
    script = (
        "import torch; from pathlib import Path; from llmserve.runtime import kernel_build, ops\n"
        f"kernel_build.environment_directory = lambda: Path({str(tmp_path)!r})\n"
        "w = ops.PackedWeight(torch.eye(4)); assert not w.panels\n"
        "assert torch.equal(ops.linear(torch.ones(1, 4), w), torch.ones(1, 4))\n"
    )
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CXX": str(tmp_path / "no-compiler")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no native kernels" in done.stderr


def test_the_library_is_built_once_and_again_when_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "kernels.cpp").write_text("int one() { return 1; }")
    monkeypatch.setattr(kernel_build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = kernel_build.built_library()
    file = first.stat().st_ino
    assert kernel_build.built_library() == first
    assert first.stat().st_ino == file
    (sources / "kernels.cpp").write_text("int two() { return 2; }")
    assert kernel_build.built_library() != first
    (sources / "kernels.cpp").write_text("no C++")
    with pytest.raises(kernel_build.BuildError, match="failed"):
        kernel_build.built_library()
    assert sorted(path.suffix for path in first.parent.iterdir()) == ["", ".so", ".so"]


def test_sources_that_change_under_the_compiler_give_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name would say that it was made of the ones before."""
    source = tmp_path / "csrc" / "kernels.cpp"
    source.parent.mkdir()
    source.write_text("int one;\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "int two;" > {source}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(kernel_build, "SOURCES", source.parent)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(kernel_build.BuildError, match="changed while"):
        kernel_build.built_library(tmp_path / "kernels")
    assert kernel_build.built_library(tmp_path / "kernels").exists()  # the compiler changes nothing now


def test_a_library_of_other_sources_than_python_mirrors_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "kernels.cpp").write_text("// the next version\n")
    script = (
        "from pathlib import Path; from llmserve.runtime import kernel_build; from llmserve.runtime.ops import native\n"
        f"kernel_build.SOURCES = Path({str(tmp_path)!r}); assert native.library() is None\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sources have changed since this process began" in done.stderr


def test_the_libraries_that_were_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, kernels = tmp_path / "csrc" / "kernels.cpp", tmp_path / "kernels"
    source.parent.mkdir()
    monkeypatch.setattr(kernel_build, "SOURCES", source.parent)
    source.write_text("int first;\n")
    first = kernel_build.built_library(kernels)
    others = [kernels / f"{i}.so" for i in range(kernel_build.KEPT)]
    for age, path in enumerate([*others, first]):
        path.touch()
        os.utime(path, (0, 1e9 - age))
    assert kernel_build.built_library(kernels) == first  # is used, and so no longer old
    source.write_text("int second;\n")
    second = kernel_build.built_library(kernels)
    assert set(kernels.glob("*.so")) == {first, second, *others[: kernel_build.KEPT - 2]}


def test_a_library_that_set_up_built_needs_no_cache_and_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "kernels.cpp").write_text("int answer;\n")
    monkeypatch.setattr(kernel_build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(kernel_build, "environment_directory", lambda: tmp_path / "environment")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prepared = kernel_build.built_library(kernel_build.environment_directory())
    assert prepared.parent == tmp_path / "environment"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert kernel_build.built_library() == prepared
    assert not (tmp_path / "cache").exists()
