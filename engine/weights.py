"""Weights in safetensors files: mapped, not read, so that workers on one host share the pages.

The format (8 bytes little-endian header length, JSON header, data) is documented at
https://github.com/huggingface/safetensors#format. We read it ourselves for one reason: tensors that
are neighbours in a file can be used as one tensor (`fused`) without a copy. Files written by
`write_weights` keep the order they are given, so a model written in the order of its use has its
q, k, v and gate, up weights fused for nothing.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from engine.operators.quantized_weight import quantize
from engine.tensor_parallel import WHOLE
from kvferry.config import Quantization
from kvferry.errors import ConfigError
from kvferry.model_files import read_json
from mem_cache.element_codec import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from engine.operators.quantized_weight import Weight
    from engine.tensor_parallel import Shard
    from kvferry.config import DType

_TORCH_OF_NAME = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAME_OF_TORCH = {dtype: name for name, dtype in _TORCH_OF_NAME.items()}
_ALIGNMENT = 64
"""Bytes; data begins on a cache line."""
_INDEX = "model.safetensors.index.json"
_FOLLOWING = "rotary_emb.inv_freq"
"""What some checkpoints hold though it follows from their config."""
_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100 * 2**20
"""As the safetensors library allows."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a tensor lies: [start, stop) bytes of `data`, a mapped file as uint8."""

    data: torch.Tensor
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """A view into the file."""
        return self.data[self.start : self.stop].view(self.dtype).view(self.shape)

    def rows(self, shard: Shard) -> _Placed:
        """A part of the rows; they are neighbours."""
        rows = shard.of(self.shape[0])
        row_bytes = (self.stop - self.start) // self.shape[0]
        start, stop = (self.start + row * row_bytes for row in (rows.start, rows.stop))
        return replace(
            self, start=start, stop=stop, shape=(rows.stop - rows.start, *self.shape[1:])
        )

    def continues(self, before: _Placed) -> bool:
        """Whether this tensor is the next rows of `before`."""
        return (
            self.data is before.data
            and self.start == before.stop
            and self.dtype == before.dtype
            and self.shape[1:] == before.shape[1:]
        )


class Weights:
    """The tensors of a model directory, by name. Reading one that is missing is a `ConfigError`."""

    def __init__(
        self,
        placed: Mapping[str, _Placed],
        dtype: torch.dtype,
        device: str = "cpu",
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        self._placed = dict(placed)
        self._dtype = dtype
        self._device = device
        self._quantization = quantization
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._placed

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises `ConfigError` naming the tensor unless there is one of this shape."""
        found = self._find(name).shape
        if found != shape:
            raise ConfigError("model.path", f"{name!r} has shape {found}; config.json says {shape}")

    def refuse_unused(self) -> None:
        """Raises `ConfigError` naming a tensor that was never read: the model is another one."""
        for name in self._placed:
            if name not in self._used and not name.endswith(_FOLLOWING):
                raise ConfigError(
                    "model.path",
                    f"the weights have a tensor {name!r} that config.json has no use for",
                )

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in the model's dtype, on its device; a view into the file if it lies so."""
        return self._converted(self._find(name).tensor())

    def held(self, matrix: torch.Tensor) -> Weight:
        """As products take a matrix: quantized where that is configured."""
        return matrix if self._quantization is Quantization.NONE else quantize(matrix)

    def release(self) -> None:
        """Forget the files: what no tensor lies in is unmapped. Nothing is read after."""
        self._placed.clear()

    def columns(self, name: str, shard: Shard) -> torch.Tensor:
        """A part of the columns of a matrix, contiguous; as `tensor` where it is the whole."""
        whole = self._find(name).tensor()
        return self._converted(whole[:, shard.of(whole.shape[1])]).contiguous()

    def fused(self, names: Sequence[str], shard: Shard = WHOLE) -> torch.Tensor:
        """Tensors of equal width stacked by rows, a part of the rows of each.

        A view where those are neighbours in a file.
        """
        parts = [self._find(name).rows(shard) for name in names]
        if all(after.continues(before) for before, after in pairwise(parts)):
            rows = sum(part.shape[0] for part in parts)
            first = parts[0]
            whole = _Placed(
                first.data, first.start, parts[-1].stop, first.dtype, (rows, *first.shape[1:])
            )
            return self._converted(whole.tensor())
        return torch.cat([self._converted(part.tensor()) for part in parts])

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        # Where matrices are quantized, a vector alone must not keep a file mapped.
        copy = self._quantization is not Quantization.NONE and tensor.ndim == 1
        return tensor.to(self._device, self._dtype, copy=copy)

    def _find(self, name: str) -> _Placed:
        found = self._placed.get(name)
        if found is None:
            raise ConfigError("model.path", f"the weights have no tensor {name!r}")
        self._used.add(name)
        return found


def load_weights(
    directory: Path,
    dtype: DType,
    device: str = "cpu",
    quantization: Quantization = Quantization.NONE,
) -> Weights:
    """Map the safetensors files of a model directory; tensors are read to `device`."""
    placed: dict[str, _Placed] = {}
    for file in _files(directory):
        placed |= _map_file(file)
    return Weights(placed, torch_dtype(dtype), device, quantization)


def _files(directory: Path) -> list[Path]:
    """Those that the index names, `model.safetensors`, or all: some directories hold the same
    weights once more in another form."""
    index, single = directory / _INDEX, directory / "model.safetensors"
    if index.is_file():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(v, str) for v in named.values()):
            raise ConfigError("model.path", f"{index} has no weight_map from tensors to files")
        files = [directory / name for name in sorted(set(named.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError("model.path", f"{directory} lacks {missing[0]}, which {_INDEX} names")
        return files
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError("model.path", f"{directory} has no .safetensors file")
    return files


def _map_file(file: Path) -> dict[str, _Placed]:
    """Raises `ConfigError` for a file that is cut off or damaged."""
    try:
        size = file.stat().st_size
        header, base = _read_header(file, size)
    except OSError as error:
        raise ConfigError("model.path", f"cannot read {file}: {error.strerror}") from error
    raw = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    placed: dict[str, _Placed] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            placed[name] = _place(raw, base, entry)
        except ConfigError as error:
            raise ConfigError("model.path", f"{file}: {name} {error.problem}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"{file} is cut off or damaged at {name}: {error}"
            raise ConfigError("model.path", problem) from error
    return placed


def _read_header(file: Path, size: int) -> tuple[dict[str, Any], int]:
    """The entries of tensors, and where the data begins."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < header_bytes <= min(size - _LENGTH_BYTES, _HEADER_BYTES_MAX):
            raise ConfigError("model.path", f"{file} is not a safetensors file")
        text = stream.read(header_bytes)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"{file} is not a safetensors file: its header is not valid JSON: {error}"
        raise ConfigError("model.path", problem) from error
    if not isinstance(header, dict):
        raise ConfigError(
            "model.path", f"{file} is not a safetensors file: no object in its header"
        )
    return header, _LENGTH_BYTES + header_bytes


def _place(data: torch.Tensor, base: int, entry: dict[str, Any]) -> _Placed:
    dtype = _TORCH_OF_NAME.get(entry["dtype"])
    if dtype is None:
        raise ConfigError("model.path", f"is {entry['dtype']}; not supported")
    start, stop = map(operator.index, entry["data_offsets"])
    shape = tuple(map(operator.index, entry["shape"]))
    is_inside = 0 <= start <= stop and base + stop <= len(data)
    if not is_inside or min(shape, default=0) < 0:
        raise ValueError(f"bytes {start} to {stop} of shape {shape}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes for shape {shape}")
    return _Placed(data, base + start, base + stop, dtype, shape)


def write_weights(file: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a safetensors file whose data has the order of `tensors`."""
    listed = [(name, tensor.detach().contiguous()) for name, tensor in tensors]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in listed:
        stop = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAME_OF_TORCH[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for _, tensor in listed:
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
