"""The tensors of a checkpoint, one at a time, under their Hugging Face names: safetensors or GGUF, never pickles."""

import json
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.configs import TensorInfo
from llmserve.runtime.models.gguf import read_header
from llmserve.runtime.models.gguf_config import ROPE_TENSORS, hf_name
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.ops import BLOCK_FORMATS

_FLOATING = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""safetensors dtypes that are read, and their bytes."""


class Source(Protocol):
    """An open checkpoint."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole tensor on the CPU, in the file's floating dtype, or dequantized to `dtype` where it is quantized.

        torch.uint8 asks for the blocks of a quantized tensor as they are: [rows, bytes of a row] (ops/blocks.py); the
        rows of a tensor of all experts lie expert by expert.
        Raises ConfigError when the file is damaged.
        """
        ...


def open_source(checkpoint: Checkpoint) -> Source:
    """Reads the headers. Raises ConfigError for a checkpoint that is damaged, incomplete or leaves its directory."""
    if checkpoint.format == "gguf":
        return GgufSource(checkpoint)
    directory = Path(checkpoint.path)
    paths = shard_paths(directory)
    if checkpoint.config.implementation == "transformers":
        from llmserve.runtime.models.transformers_backend import TransformersSource

        return TransformersSource(directory)
    return SafetensorsSource(paths)


class SafetensorsSource:
    def __init__(self, paths: list[Path]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, safe_open] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    part = file.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), part.get_dtype()
                    self.tensors[name] = TensorInfo(shape, dtype, prod(shape) * _FLOATING.get(dtype, 0))
                    self._files[name] = file
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"tensor {name!r} cannot be read: {error}") from error
        return tensor


def shard_paths(directory: Path) -> list[Path]:
    """The files of a safetensors checkpoint: those of its index, else all there are.

    Raises ConfigError when one is missing, or lies outside the directory, by its name or through a symbolic link.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is no shard index: {error!r}") from error
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]  # some repositories have the same weights in another layout beside it
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    return [_inside(directory, name) for name in names]


def _inside(directory: Path, name: object) -> Path:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ConfigError(f"{directory}: {name!r} is no file of safetensors in the checkpoint's directory")
    path = directory / name
    if not path.is_file():
        raise ConfigError(f"{directory} is incomplete: it has no {name}")
    roots = [directory.resolve()]
    if directory.parent.name == "snapshots":  # the hub's cache keeps the files of a repository in blobs/ beside it
        roots.append(directory.parent.parent.resolve() / "blobs")
    if path.resolve().parent not in roots:
        raise ConfigError(f"{path} is a link that leaves the checkpoint's directory")
    return path


class GgufSource:
    def __init__(self, checkpoint: Checkpoint) -> None:
        from llmserve.runtime.models import gguf_tensors

        header = read_header(checkpoint.path)
        self._dequantize = gguf_tensors.dequantize
        self._undo = gguf_tensors.undo_conversion
        self._architecture = header.architecture
        self._config = checkpoint.config
        self._entries = {
            hf_name(tensor.name, checkpoint.config.model_type): tensor
            for tensor in header.tensors
            if tensor.name not in ROPE_TENSORS
        }
        sizes = {path: Path(path).stat().st_size for path in {tensor.path for tensor in header.tensors}}
        self.tensors = {}
        for name, tensor in self._entries.items():
            nbytes = gguf_tensors.nbytes(tensor)
            if tensor.offset + nbytes > sizes[tensor.path]:
                raise ConfigError(f"{tensor.path} is cut short: it ends in the middle of tensor {tensor.name!r}")
            blocks = tensor.ggml_type if tensor.ggml_type in BLOCK_FORMATS and len(tensor.shape) in (2, 3) else 0
            self.tensors[name] = TensorInfo(tensor.shape, f"GGML type {tensor.ggml_type}", nbytes, blocks)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor, nbytes = self._entries[name], self.tensors[name].nbytes
        data = np.fromfile(tensor.path, dtype=np.uint8, count=nbytes, offset=tensor.offset)
        if len(data) != nbytes:
            raise ConfigError(f"{tensor.path} was cut short while it was read")
        values = torch.from_numpy(data)
        if dtype == torch.uint8:
            values = values.view(prod(tensor.shape[:-1]), -1)
        else:
            values = self._dequantize(values, tensor, dtype)
        heads = self._config.num_heads, self._config.num_kv_heads
        return self._undo(values, tensor.name, self._architecture, *heads)
