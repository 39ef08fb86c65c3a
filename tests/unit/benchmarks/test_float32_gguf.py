"""A quantized GGUF file becomes one of float32 elements, with all that it says of itself."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from benchmarks import float32_gguf as module
from kvferry.errors import ConfigError


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, arch="llama")
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    weights = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", quantize(weights, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_every_tensor_is_float32_and_every_entry_is_there(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "default_cache_dir", lambda: tmp_path / "cache")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(module.float32_gguf(source))
    assert {tensor.tensor_type for tensor in after.tensors} == {gguf.GGMLQuantizationType.F32}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (new.name, list(new.shape)) == (old.name, list(old.shape))
        np.testing.assert_array_equal(new.data, dequantize(old.data, old.tensor_type))
    said = {name: field.contents() for name, field in before.fields.items()}
    del said["GGUF.kv_count"]  # the type of the file is an entry more
    assert said.items() <= {name: field.contents() for name, field in after.fields.items()}.items()


def test_what_is_no_gguf_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no GGUF file"):
        module.float32_gguf(tmp_path)
