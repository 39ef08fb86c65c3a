"""Tells the weights of one model directory from those of another, in milliseconds.

KV outlives processes where it is kept in files, and a served name says nothing of what it named
last week. Read are `config.json`, the header of each safetensors file and a sample of each tensor:
training or merging changes nearly every number of the tensors it touches, so that samples notice.
What they cannot notice is an edit of a few rows by hand; such a model needs a name of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvferry.config import ModelConfig

_DIGEST_BYTES = 16
_SAMPLES = 16
_SAMPLE_BYTES = 256
"""So many are read of each tensor, of this size, at equal distances."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header, little-endian."""
_HEADER_BYTES_MAX = 100 * 2**20
"""As in the format's own reader."""


def model_identity(directory: Path, model: ModelConfig) -> str:
    """What KV is computed by: the weights of a directory, and how they are held and computed with.

    Workers and routers of equal ones may share KV. Fit for a file's name. Raises `ConfigError`.
    """
    identity = f"{weights_identity(directory)}-{model.dtype.value}"
    quantization = model.quantization.value
    return identity if quantization == "none" else f"{identity}-{quantization}"


def weights_identity(directory: Path) -> str:
    """Hexadecimal; equal for equal weights. Raises `ConfigError` naming `model.path`."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        digest.update((directory / "config.json").read_bytes())
        for file in sorted(directory.glob("*.safetensors")):
            digest.update(f"\0{file.name} {file.stat().st_size}\0".encode())
            for part in _parts(file):
                digest.update(part)
    except OSError as error:
        raise ConfigError(
            "model.path", f"cannot read {error.filename}: {error.strerror}"
        ) from error
    return digest.hexdigest()


def _parts(file: Path) -> Iterator[bytes]:
    """The header, then the samples of each tensor in the order of their names."""
    with file.open("rb") as opened:
        descriptor = opened.fileno()
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        header = os.pread(descriptor, min(length, _HEADER_BYTES_MAX), _LENGTH_BYTES)
        yield header
        data = _LENGTH_BYTES + length
        for start, stop in _tensor_ranges(header, file):
            size = min(_SAMPLE_BYTES, stop - start)
            step = (stop - start - size) // (_SAMPLES - 1)
            for number in range(_SAMPLES):
                yield os.pread(descriptor, size, data + start + number * step)


def _tensor_ranges(header: bytes, file: Path) -> list[tuple[int, int]]:
    """[start, stop) of each tensor, in bytes of the data, by name."""
    try:
        entries: dict[str, Any] = json.loads(header)
        ranges = [
            (int(start), int(stop))
            for name, entry in sorted(entries.items())
            if name != "__metadata__"
            for start, stop in [entry["data_offsets"]]
        ]
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError("model.path", f"{file} is no safetensors file") from error
    if any(not 0 <= start <= stop for start, stop in ranges):
        raise ConfigError("model.path", f"{file} is no safetensors file")
    return ranges
