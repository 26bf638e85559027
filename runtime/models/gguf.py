"""Reading the headers of GGUF files. gguf_config.py interprets them, gguf_tensors.py reads tensor data.

Imports neither torch nor the gguf package, which takes seconds to read a vocabulary.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import msgspec

from llmserve.runtime.config import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 26
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-\d{5}\.gguf")
_LONG_ARRAY = 1024
"""Longer arrays of strings (vocabulary, merges) are skipped; transformers reads them once (convert.py)."""


class GgufTensor(msgspec.Struct, frozen=True):
    """Where a tensor's data is. `shape` is in torch's order; `offset` is in bytes from the start of the file `path`."""

    path: str
    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufHeader(msgspec.Struct, frozen=True):
    """The header of a GGUF file, or of all parts of a split one. `digest` is the SHA-256 of the first part's header."""

    path: str
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    digest: str

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value `ARCHITECTURE.key`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: str | Path) -> GgufHeader:
    """Reads the header of a GGUF file, and given the first part of a split file, those of all parts.

    Raises ConfigError when it is not a GGUF file, is truncated or invalid, or when a part is missing.
    """
    header = _read_file(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return header
    name = _PART.fullmatch(str(path))
    if not name or int(name["number"]) != 1:
        raise ConfigError(f"{path} is one of {count} parts of a model; give the first, ...-00001-of-{count:05d}.gguf")
    parts = [_read_file(f"{name['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(2, count + 1)]
    tensors = [tensor for part in (header, *parts) for tensor in part.tensors]
    return msgspec.structs.replace(header, tensors=tuple(tensors))


def _read_file(path: str | Path) -> GgufHeader:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(str(path), data)
    except (struct.error, UnicodeDecodeError, IndexError, TypeError, ArithmeticError, RecursionError) as error:
        reason = "it ends inside its header" if isinstance(error, struct.error) else error
        raise ConfigError(f"{path} is not a whole GGUF file: {reason}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse_header(path: str, data: mmap.mmap) -> GgufHeader:
    magic, version, tensor_count, key_count = struct.unpack_from("<4sIQQ", data, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ConfigError(f"{path} is not a GGUF file of version 2 or 3")
    position, metadata = 24, {}
    for _ in range(_checked(key_count, path)):
        key, position = _string(data, position)
        (kind,) = struct.unpack_from("<I", data, position)
        metadata[key], position = _value(data, position + 4, kind, path)
    entries = []
    for _ in range(_checked(tensor_count, path)):
        name, position = _string(data, position)
        (rank,) = struct.unpack_from("<I", data, position)
        if rank > 4:
            raise ConfigError(f"{path}: tensor {name!r} has {rank} dimensions")
        dims = struct.unpack_from(f"<{rank}Q", data, position + 4)
        kind, offset = struct.unpack_from("<IQ", data, position + 4 + 8 * rank)
        position += 16 + 8 * rank
        entries.append((name, dims[::-1], kind, offset))
    digest = hashlib.sha256(memoryview(data)[:position]).hexdigest()
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(position / alignment) * alignment
    tensors = tuple(GgufTensor(path, name, shape, kind, start + offset) for name, shape, kind, offset in entries)
    return GgufHeader(path, metadata, tensors, digest)


def _checked(count: int, path: str) -> int:
    if count > _MAX_COUNT:
        raise ConfigError(f"{path} is damaged: it claims {count} entries")
    return count


def _string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    end = position + 8 + length
    if end > len(data):
        raise struct.error("a string reaches past the end")
    return data[position + 8 : end].decode(), end


def _value(data: mmap.mmap, position: int, kind: int, path: str) -> tuple[Any, int]:
    if code := _SCALARS.get(kind):
        return struct.unpack_from(f"<{code}", data, position)[0], position + struct.calcsize(f"<{code}")
    if kind == _STRING:
        return _string(data, position)
    if kind != _ARRAY:
        raise ConfigError(f"{path} is damaged: metadata of type {kind}")
    element, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if code := _SCALARS.get(element):
        layout = struct.Struct(f"<{_checked(count, path)}{code}")
        return list(layout.unpack_from(data, position)), position + layout.size
    if element == _STRING and count > _LONG_ARRAY:
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(_checked(count, path)):
            position += 8 + length_of(data, position)[0]
        return f"<{count} strings>", position
    values = []
    for _ in range(_checked(count, path)):
        value, position = _value(data, position, element, path)
        values.append(value)
    return values, position
