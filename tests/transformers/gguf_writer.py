"""Writes GGUF files for tests, by the format's description and not by the reader's code."""

import struct
from pathlib import Path

import numpy as np

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
ALIGNMENT = 32


def _text(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value):
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    items = [_value(item) for item in value]
    return (
        struct.pack("<I", 9)
        + items[0][:4]
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def write_gguf(path: Path, metadata, tensors, *, version=3):
    """*tensors* maps a name to ``(type code, shape slowest first, raw bytes)``."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_text(name) + _value(value) for name, value in metadata.items())
    data = b""
    for name, (code, shape, raw) in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        header += (
            _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        )
        header += struct.pack("<IQ", code, len(data))
        data += raw
    path.write_bytes(header + bytes(-len(header) % ALIGNMENT) + data)
    return path


def f32(values):
    return F32, values.shape, values.astype("<f4").tobytes()


def to_llama_cpp_rope_order(weight, heads):
    """Rows of Q or K as llama.cpp keeps them: within a head, the two halves' rows take turns."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + row
        for head in range(heads)
        for row in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[np.array(order)]
