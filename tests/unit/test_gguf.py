"""GGUF files: dequantization against the gguf package, whole tiny models against their originals, the default model."""

import math
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from paged import Paged, load
from test_models import CHUNKS, LLAMA3, LONGROPE, sequences
from tiny_gguf import ARCHITECTURES, write_gguf
from tokenizers import Tokenizer
from torch import Tensor

import reference
from checkpoints import make_tiny
from llmserve.runtime.config import ConfigError
from llmserve.runtime.engine.checkpoint import open_source
from llmserve.runtime.engine.weights import preflight
from llmserve.runtime.layers.rotary import cos_sin_table, inverse_frequencies
from llmserve.runtime.models import convert
from llmserve.runtime.models.gguf import GgufTensor, read_header
from llmserve.runtime.models.gguf_config import to_hf_config
from llmserve.runtime.models.gguf_tensors import dequantize
from llmserve.runtime.models.hf_config import parse_config
from llmserve.runtime.models.hub import Checkpoint, default_model, resolve

SCALE_OFFSETS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ4_XS": [0],
}
"""Where a block has its float16 scales; everything else in a block may be any byte."""


def without_tokenizer(file: Path) -> Checkpoint:
    """The checkpoint of a file, but for its tokenizer, whose conversion takes seconds."""
    return Checkpoint(str(file), "gguf", file.stem, "", parse_config(to_hf_config(read_header(file))))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions go to a cache that is empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", SCALE_OFFSETS)
def test_dequantization_equals_the_gguf_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (12, size), dtype=np.uint8)
    for offset in SCALE_OFFSETS[name]:
        blocks[:, offset : offset + 2] = random.normal(size=(12, 1)).astype(np.float16).view(np.uint8)
    tensor = GgufTensor("", "w", (4, 3 * block), kind, 0)
    expected = gguf.quants.dequantize(blocks.reshape(4, 3 * size), kind)
    assert np.array_equal(dequantize(torch.from_numpy(blocks.ravel()), tensor, torch.float32).numpy(), expected)


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types_stay_what_they_are(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor = GgufTensor("", "w", (3, 8), GGMLQuantizationType[name], 0)
    assert torch.equal(dequantize(values.flatten().view(torch.uint8), tensor, torch.float32), values)


def assert_same_logits(directory: Path, file: Path) -> None:
    checkpoints = (resolve(str(directory)), without_tokenizer(file))
    original, converted = (Paged(load(checkpoint)).run(sequences(), CHUNKS) for checkpoint in checkpoints)
    for ours, theirs in zip(converted, original, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_model_equals_its_original(family: str, tmp_path: Path) -> None:
    """A float32 GGUF gives the logits of the checkpoint that it was made from: names, permutations, offsets, config."""
    scalar = {"query_pre_attn_scalar": 32} if family.startswith("gemma") else {}
    pattern = {"sliding_window_pattern": 6} if family == "gemma3_text" else {}
    make_tiny(tmp_path, family, **scalar, **pattern)
    floats = {"rope.freq_base_swa": 500.0} if family == "gemma3_text" else {}
    file = write_gguf(tmp_path, tmp_path / "tiny.gguf", floats=floats)
    assert_same_logits(tmp_path, file)


def test_partial_rotation_of_a_file(tmp_path: Path) -> None:
    make_tiny(tmp_path, "phi3", partial_rotary_factor=0.75)
    assert_same_logits(tmp_path, write_gguf(tmp_path, tmp_path / "tiny.gguf"))


def test_metadata_besides_the_architecture(tmp_path: Path) -> None:
    """A chat model may end with another token than a text; an unquantized file says which numbers it holds."""
    make_tiny(tmp_path)
    header = read_header(write_gguf(tmp_path, tmp_path / "tiny.gguf"))

    def config(key: str, value: int) -> dict[str, Any]:
        return to_hf_config(msgspec.structs.replace(header, metadata=header.metadata | {key: value}))

    assert to_hf_config(header)["eos_token_id"] == [2]
    assert config("tokenizer.ggml.eot_token_id", 7)["eos_token_id"] == [2, 7]
    assert config("tokenizer.ggml.eom_token_id", 2)["eos_token_id"] == [2]
    for file_type, dtype in ((0, "float32"), (1, "float16"), (3, "bfloat16"), (32, "bfloat16")):
        assert config("general.file_type", file_type)["dtype"] == dtype


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_rope_scaling_of_a_file(scaling: str, tmp_path: Path) -> None:
    rope_scaling = {"rope_type": scaling, "factor": 4.0, "original_max_position_embeddings": 64}
    make_tiny(tmp_path, "qwen2", rope_scaling=rope_scaling)
    file = write_gguf(tmp_path, tmp_path / "tiny.gguf")
    assert without_tokenizer(file).config.layers == resolve(str(tmp_path)).config.layers


def test_rope_scaling_of_llama3_is_a_tensor_of_factors(tmp_path: Path) -> None:
    """convert_hf_to_gguf.py writes what each frequency is divided by, not the parameters."""
    make_tiny(tmp_path, rope_scaling=LLAMA3)
    (rope,) = {layer.rope for layer in resolve(str(tmp_path)).config.layers if layer.rope}
    frequencies = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    factors = frequencies / inverse_frequencies(rope, 512)
    assert factors.min() == 1 < factors.max() == pytest.approx(8)
    file = write_gguf(tmp_path, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors.numpy()})
    (converted,) = {layer.rope for layer in without_tokenizer(file).config.layers if layer.rope}
    torch.testing.assert_close(inverse_frequencies(converted, 512), inverse_frequencies(rope, 512))
    assert converted.attention_factor == 1.0
    assert_same_logits(tmp_path, file)


@pytest.mark.parametrize("max_positions", [512, 64])
def test_longrope_of_phi3_is_two_tensors(max_positions: int, tmp_path: Path) -> None:
    make_tiny(tmp_path, "phi3", rope_scaling=LONGROPE, original_max_position_embeddings=64)
    tensors = {
        f"rope_factors_{kind}.weight": np.array(LONGROPE[f"{kind}_factor"], dtype=np.float32)
        for kind in ("long", "short")
    }
    attention_factor = math.sqrt(1 + math.log(512 / 64) / math.log(64))
    file = write_gguf(
        tmp_path,
        tmp_path / "tiny.gguf",
        tensors=tensors,
        integers={"rope.scaling.original_context_length": 64},
        floats={"rope.scaling.attn_factor": attention_factor},
    )
    ropes = [config.layers[0].rope for config in (resolve(str(tmp_path)).config, without_tokenizer(file).config)]
    first, second = (cos_sin_table(rope, max_positions, torch.device("cpu")) for rope in ropes)
    torch.testing.assert_close(first, second)


def test_quantized_file_is_near_its_original(tmp_path: Path) -> None:
    """Q8_0 keeps eight bits of a weight, so these logits, which vary by 1.5, move by less than 0.1."""
    make_tiny(tmp_path, "llama")
    file = write_gguf(tmp_path, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    checkpoints = (resolve(str(tmp_path)), without_tokenizer(file))
    original, converted = (torch.cat(Paged(load(checkpoint)).run(sequences(), CHUNKS)) for checkpoint in checkpoints)
    assert 0 < (original - converted).pow(2).mean().sqrt() < 0.1


@pytest.mark.usefixtures("own_cache")
def test_tokenizer_of_a_file_equals_the_original(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", eos_token_id=0)
    file = write_gguf(tmp_path, tmp_path / "tiny.gguf")
    checkpoint = resolve(str(file))
    ours, original = (Tokenizer.from_file(f"{path}/tokenizer.json") for path in (checkpoint.tokenizer_dir, tmp_path))
    text = "def add_argument(self, *args):\n    <|im_start|>Grüße 日本 😀<|im_end|>"
    assert ours.encode(text).ids == original.encode(text).ids
    assert checkpoint.config.eos_token_ids == (0, 2)  # the file's, and what ends a turn in its template
    assert checkpoint.name == "tiny.gguf"
    template = Path(checkpoint.tokenizer_dir) / "chat_template.jinja"
    assert template.read_text() == "{{ messages[0]['content'] }}<|im_end|>"

    # so the file may replace the original in a running model; its 1e-5 is the float32 nearest to that
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    safetensors = resolve(str(tmp_path))
    assert safetensors.config.rms_norm_eps != checkpoint.config.rms_norm_eps
    assert preflight(load(safetensors), safetensors, checkpoint) == []


def test_a_file_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What llama.cpp's gguf-split writes: the first part has the metadata, each its share of the tensors."""
    monkeypatch.setattr(convert, "converted_gguf", lambda header: tmp_path / "model")
    make_tiny(tmp_path / "model", "llama")
    whole = write_gguf(tmp_path / "model", tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(whole)
    (tmp_path / "parts").mkdir()
    for number in range(3):
        part = GGUFWriter(tmp_path / f"parts/tiny-{number + 1:05d}-of-00003.gguf", "llama")
        for key, field in reader.fields.items():
            if number == 0 and key.startswith("llama."):
                part.add_key_value(key, field.contents(), field.types[0])
        part.add_uint16("split.no", number)
        part.add_uint16("split.count", 3)
        for tensor in reader.tensors[number::3]:
            part.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        part.write_header_to_file()
        part.write_kv_data_to_file()
        part.write_tensors_to_file()
        part.close()

    checkpoint = resolve(str(tmp_path / "parts"))
    assert checkpoint.path == str(tmp_path / "parts/tiny-00001-of-00003.gguf")
    expected, computed = (
        torch.cat(Paged(load(c)).run(sequences(), CHUNKS)) for c in (without_tokenizer(whole), checkpoint)
    )
    assert torch.equal(computed, expected)
    with pytest.raises(ConfigError, match=r"one of 3 parts of a model; give the first, \.\.\.-00001-of-00003"):
        resolve(str(tmp_path / "parts/tiny-00002-of-00003.gguf"))
    (tmp_path / "parts/tiny-00003-of-00003.gguf").unlink()
    with pytest.raises(ConfigError, match=r"tiny-00003-of-00003\.gguf cannot be read: .*No such file"):
        resolve(str(tmp_path / "parts/tiny-00001-of-00003.gguf"))


# ---- damaged and foreign files ------------------------------------------------------------------------------------


def damaged(tmp_path: Path, change: Any) -> Path:
    make_tiny(tmp_path, "llama", num_hidden_layers=1)
    file = write_gguf(tmp_path, tmp_path / "tiny.gguf")
    data = bytearray(file.read_bytes())
    file.write_bytes(change(data))
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "cannot be read"),
        (lambda data: b"GGUF", "not a whole GGUF file: it ends inside its header"),
        (lambda data: b"NOPE" + data[4:], "not a GGUF file"),
        (lambda data: data[:5000], "not a whole GGUF file"),
        (lambda data: data[:-4], "cut short"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "claims"),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 62) + data[32:], "not a whole GGUF file"),
        (lambda data: data.replace(b"general.architecture", b"general.architectur_"), "architecture ''"),
        (lambda data: data.replace(b"llama.block_count", b"llama.block_coun_"), "lacks the metadata llama.block_count"),
    ],
    ids=range(9),
)
def test_damaged_file_is_a_clear_error(change: Any, message: str, tmp_path: Path) -> None:
    file = damaged(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load(without_tokenizer(file))


def test_no_damage_to_a_header_is_more_than_a_clear_error(tmp_path: Path) -> None:
    """Bytes of the header are overwritten at random: the file is refused, or read as something else, no more."""
    make_tiny(tmp_path, "llama", num_hidden_layers=1)
    file = write_gguf(tmp_path, tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    header = min(tensor.offset for tensor in read_header(file).tensors)
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 4))):
            start = draw.choice((draw.randrange(header), draw.randrange(1500), header - draw.randrange(1, 700)))
            data[start : start + 4] = draw.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", draw.randbytes(4)))
        file.write_bytes(data[: len(whole)])
        try:
            open_source(without_tokenizer(file))
        except ConfigError:
            refused += 1
    assert 100 < refused < 400


def test_unknown_architecture_names_those_that_are_served(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'mamba'; GGUF files are served for llama, "):
        resolve(str(file))


# ---- the default model ----------------------------------------------------------------------------------------------


def test_default_model_has_the_weights_that_transformers_reads() -> None:
    """Bit for bit, in all 272 tensors: Q4_1, Q8_0, the rows of q and k."""
    slots = dict(load(resolve(default_model())).slots())
    expected = dict(reference.model().named_parameters())
    assert len(slots) == 272
    assert slots.keys() == expected.keys()
    for name, slot in slots.items():
        value: Any = slot.weight.value
        tensor = value if isinstance(value, Tensor) else value.unpack()
        assert torch.equal(tensor[slot.into], expected[name]), name


def test_default_model_has_the_logits_of_transformers() -> None:
    checkpoint = resolve(default_model())
    tokenizer = Tokenizer.from_file(f"{checkpoint.tokenizer_dir}/tokenizer.json")
    prompt = (
        "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\nThe Danube, the Rhine and"
    )
    ids = tokenizer.encode(prompt).ids
    with torch.inference_mode():
        expected = reference.model()(torch.tensor([ids])).logits[0]
    (computed,) = Paged(load(checkpoint), count=1).run([ids], (len(ids) - 8, 1, 1, 6))
    assert " Rhine" in tokenizer.decode(expected.argmax(-1).tolist()[-8:]), "it predicts what the prompt goes on with"
    torch.testing.assert_close(computed, expected, atol=1e-3, rtol=0)


def test_default_model_encodes_as_transformers_does() -> None:
    theirs = reference.tokenizer()
    checkpoint = resolve(default_model())
    ours = Tokenizer.from_file(f"{checkpoint.tokenizer_dir}/tokenizer.json")
    texts = [
        "Hello, world! It's 12345 o'clock.",
        "  two  spaces\tand\n\n\nlines\r\n",
        "Grüße aus Köln, naïve café: 日本語のテキスト 😀 👩‍👩‍👧 Привет",
        "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|not special|>",
        "def f(x):\n    return x**2 + 0.5e-3  # κόσμε",
        "",
    ]
    for text in texts:
        assert ours.encode(text).ids == theirs(text).input_ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == theirs.decode(theirs(text).input_ids)
    messages = [{"role": "user", "content": "Hi"}]
    template = (Path(checkpoint.tokenizer_dir) / "chat_template.jinja").read_text()
    assert template == theirs.chat_template
    assert theirs.apply_chat_template(messages, tokenize=False).startswith("<|im_start|>system\n")


def test_finding_the_default_model_imports_no_torch() -> None:
    """What the main process does before its children load anything, conversion aside."""
    resolve(default_model())
    code = (
        "import sys; from llmserve.runtime.models import hub; hub.resolve(hub.default_model());"
        "print([name for name in ('torch', 'transformers', 'gguf', 'huggingface_hub') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
