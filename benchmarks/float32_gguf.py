"""The model as a GGUF file of float32 elements, for peers that read nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

from engine.model_directory import default_cache_dir, publish_once
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_WRITER_ADDS = ("GGUF.", "general.architecture", "general.file_type")


def float32_gguf(gguf: Path) -> Path:
    """A copy of `gguf` with every tensor as float32, made once. Raises `ConfigError`."""
    if gguf.suffix != ".gguf":
        raise ConfigError("model", f"{gguf} is no GGUF file, and llama.cpp reads nothing else")
    directory = default_cache_dir() / f"{gguf.stem}-float32-gguf"
    publish_once(directory, lambda partial: _write(gguf, partial / "model.gguf"))
    return directory / "model.gguf"


def _write(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, arch=architecture)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for name, entry in reader.fields.items():
        if not name.startswith(_WRITER_ADDS):
            kind, *of = entry.types
            element = of[-1] if kind is GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), kind, element)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name,
            dequantize(tensor.data, tensor.tensor_type),
            raw_dtype=GGMLQuantizationType.F32,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
