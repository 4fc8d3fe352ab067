"""Reads a GGUF file: its metadata, its table of tensors, and the values of the tensor types small models use.

Decides what of a file is understood. Never guesses: an unknown tensor type, a truncated file or a count that can't
be true is an error before any value is used. Knows nothing of models; ``gguf_model`` turns the values into one.
"""

import math
import re
import reprlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_core import ConfigError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    code: struct.Struct("<" + letter)
    for code, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMENSIONS = 4
_BLOCK = 32
"""Weights a quantised block holds, in Q4_1 and Q8_0 alike."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class _TensorType:
    name: str
    block_weights: int
    block_bytes: int
    decode: Callable[[NDArray[np.uint8]], Floats]
    """From raw blocks ``(n, block_bytes)`` to values ``(n, block_weights)``."""


def _decode_f32(raw: NDArray[np.uint8]) -> Floats:
    return raw.view("<f4").astype(np.float32)


def _decode_f16(raw: NDArray[np.uint8]) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _decode_q4_1(raw: NDArray[np.uint8]) -> Floats:
    # scale f16 | minimum f16 | 16 bytes: the low nibbles are weights 0..15, the high nibbles weights 16..31
    edges = np.ascontiguousarray(raw[:, :4]).view("<f2").astype(np.float32)  # (n, 2)
    values = np.empty((len(raw), _BLOCK), np.float32)
    values[:, : _BLOCK // 2] = raw[:, 4:] & 0x0F
    values[:, _BLOCK // 2 :] = raw[:, 4:] >> 4
    values *= edges[:, :1]
    values += edges[:, 1:]
    return values


def _decode_q8_0(raw: NDArray[np.uint8]) -> Floats:
    # scale f16 | 32 signed bytes
    scale = np.ascontiguousarray(raw[:, :2]).view("<f2").astype(np.float32)  # (n, 1)
    values: Floats = raw[:, 2:].view(np.int8).astype(np.float32)
    values *= scale
    return values


_TENSOR_TYPES = {
    0: _TensorType(name="F32", block_weights=1, block_bytes=4, decode=_decode_f32),
    1: _TensorType(name="F16", block_weights=1, block_bytes=2, decode=_decode_f16),
    3: _TensorType(name="Q4_1", block_weights=_BLOCK, block_bytes=20, decode=_decode_q4_1),
    8: _TensorType(name="Q8_0", block_weights=_BLOCK, block_bytes=34, decode=_decode_q8_0),
}


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    shape: tuple[int, ...]
    """Slowest dimension first, as numpy has it; the file lists them the other way round."""
    type_code: int
    offset: int
    """From the start of the data section."""


class _Cursor:
    """Reads forward through the header. Every read is checked against the file's end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise ConfigError(
                f"{self._path}: the GGUF header is cut off at byte {len(self._data)}: copy the file again"
            )
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def scalar(self, kind: struct.Struct) -> Any:
        return kind.unpack(self.take(kind.size))[0]

    def text(self) -> str:
        return str(self.take(self.scalar(_U64)), "utf-8", "replace")

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.text()
        if code == _ARRAY:
            inner, count = self.scalar(_U32), self.scalar(_U64)
            if inner in _SCALARS:
                item = _SCALARS[inner]
                return [found for (found,) in item.iter_unpack(self.take(item.size * count))]
            return [self.value(inner) for _ in range(count)]
        if code not in _SCALARS:
            raise ConfigError(
                f"{self._path}: unknown GGUF metadata type {code}: the file is damaged or too new"
            )
        return self.scalar(_SCALARS[code])


class GGUFFile:
    """One GGUF file, mapped read-only. ``metadata`` is parsed at once, tensors when asked for.

    Raises ``ConfigError`` when the file is missing, no GGUF, or cut off. Cost: one pass over the header.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # an empty file can't be mapped
            raise ConfigError(f"{path}: cannot read the model file: {error}") from error
        self.path = path
        cursor = _Cursor(self._data.data, path)
        if bytes(self._data[:4]) != _MAGIC:
            raise ConfigError(f"{path}: not a GGUF file: it does not start with {_MAGIC.decode()}")
        cursor.take(len(_MAGIC))
        version = cursor.scalar(_U32)
        if version not in _VERSIONS:
            raise ConfigError(
                f"{path}: GGUF version {version} is not one of {_VERSIONS}: convert the file again"
            )
        tensors, entries = cursor.scalar(_U64), cursor.scalar(_U64)
        self.metadata: Mapping[str, Any] = {
            cursor.text(): cursor.value(cursor.scalar(_U32)) for _ in range(entries)
        }
        self._tensors = {cursor.text(): self._read_tensor_entry(cursor) for _ in range(tensors)}
        alignment = int(self.metadata.get("general.alignment", 32))
        self._data_start = -(-cursor.position // alignment) * alignment

    def _read_tensor_entry(self, cursor: _Cursor) -> _Tensor:
        dimensions = cursor.scalar(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise ConfigError(f"{self.path}: a tensor with {dimensions} dimensions: the file is damaged")
        shape = tuple(cursor.scalar(_U64) for _ in range(dimensions))[::-1]
        return _Tensor(shape=shape, type_code=cursor.scalar(_U32), offset=cursor.scalar(_U64))

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in file order."""
        return tuple(self._tensors)

    def need(self, name: str) -> Any:
        """One metadata value. Raises ``UnsupportedModelError`` when the file lacks it."""
        if name not in self.metadata:
            raise UnsupportedModelError(
                f"{self.path}: the GGUF metadata lacks {name}: convert the model again"
            )
        return self.metadata[name]

    def number(self, name: str, default: float | None = None) -> Any:
        """One metadata value that must be a number: *default* where the file lacks it, if that is given.

        Raises ``UnsupportedModelError`` as ``need`` does, and when it is of another kind, such as one for each layer.
        """
        value = self.need(name) if default is None else self.metadata.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._not_read([(name, value)])
        return value

    def refuse_other_settings(self, understood: Mapping[str, Collection[Any] | None], *, but: str) -> None:
        """Refuse each metadata entry that is not *understood*, and whose name does not match *but*.

        *understood* has the values that are, by name; ``None`` for all. Raises ``UnsupportedModelError`` naming those
        that are not: leaving one out would give a model that answers wrongly.
        """
        entries = [entry for entry in self.metadata.items() if not re.match(but, entry[0])]
        accepted = [(name, value, understood.get(name, ())) for name, value in entries]
        others = [
            (name, value) for name, value, values in accepted if values is not None and value not in values
        ]
        if others:
            raise self._not_read(others)

    def _not_read(self, settings: Iterable[tuple[str, Any]]) -> UnsupportedModelError:
        named = ", ".join(f"{name} = {reprlib.repr(value)}" for name, value in settings)
        return UnsupportedModelError(
            f"{self.path}: settings that are not read from GGUF, or not with these values: {named}: use a directory "
            "with the model's config.json, tokenizer.json and safetensors"
        )

    def tensor(self, name: str) -> Floats:
        """One tensor's values in fp32, slowest dimension first, a copy.

        Raises ``KeyError`` for an unknown name, ``UnsupportedModelError`` for a tensor type that is not read here,
        ``ConfigError`` when the file ends before the tensor does.
        """
        entry = self._tensors[name]
        kind = _TENSOR_TYPES.get(entry.type_code)
        if kind is None:
            known = ", ".join(item.name for item in _TENSOR_TYPES.values())
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has GGUF type {entry.type_code}; supported types are {known}: "
                "quantise the model to one of them or use its safetensors"
            )
        blocks, rest = divmod(math.prod(entry.shape), kind.block_weights)
        begin = self._data_start + entry.offset
        end = begin + blocks * kind.block_bytes
        if rest or end > len(self._data):
            raise ConfigError(f"{self.path}: tensor {name} does not fit the file: copy the file again")
        raw = np.asarray(self._data[begin:end]).reshape(blocks, kind.block_bytes)
        return kind.decode(raw).reshape(entry.shape)
