import math

import pytest
import torch

from kvferry.config import DType, KvDType
from mem_cache.element_codec import codec_of, torch_dtype
from mem_cache.layout import vector_bytes
from tests.support.kv_pools import ELEMENT_TYPES, rounding_bound

FLOATS = [dtype for dtype in ELEMENT_TYPES if dtype is not KvDType.INT8]
NARROW = [
    (KvDType.FLOAT16, 65504.0),
    (KvDType.FLOAT8_E4M3, 448.0),
    (KvDType.FLOAT8_E5M2, 57344.0),
]


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_a_vector_has_the_bytes_that_the_layout_counts(dtype):
    codec = codec_of(dtype)
    stored = codec.encode(torch.randn(3, 2, 8))
    assert stored.dtype == codec.storage
    assert stored.shape[:-1] == (3, 2)
    assert stored.shape[-1] * stored.itemsize == vector_bytes(dtype, 8)
    assert codec.decode(stored).shape == (3, 2, 8)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
@pytest.mark.parametrize("exponent", [-40, -20, -8, 0, 5])
def test_error_bound(dtype, exponent):
    torch.manual_seed(0)
    values = torch.randn(400, 64) * 2.0**exponent
    codec = codec_of(dtype)
    error = (codec.decode(codec.encode(values)).double() - values.double()).abs()
    bound = rounding_bound(dtype, values)
    assert (error <= bound).all()
    if exponent == 0 and dtype is not KvDType.FLOAT32:
        # The bound is not far above what happens: else it would prove nothing.
        assert float((error / bound).max()) > 0.85


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_stable(dtype):
    """What was read and is written again is the same bytes."""
    codec = codec_of(dtype)
    stored = codec.encode(torch.randn(50, 8) * 10)
    again = codec.encode(codec.decode(stored))
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_stored_number_is_what_torch_says(dtype):
    stored = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch_dtype(dtype))
    read = codec_of(dtype).decode(stored)
    torch.testing.assert_close(read, stored.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "largest"), NARROW)
def test_too_large_numbers_become_the_largest(dtype, largest):
    values = torch.tensor([1e9, -1e9, math.inf, -math.inf, largest, math.nan])
    read = codec_of(dtype).decode(codec_of(dtype).encode(values))
    assert read[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert read[5].isnan()


def test_a_wide_type_keeps_infinity():
    codec = codec_of(KvDType.BFLOAT16)
    assert codec.decode(codec.encode(torch.tensor([math.inf], dtype=torch.bfloat16)))[0].isinf()


@pytest.mark.parametrize("scale", [1.0, 3e-4, 1e30])
def test_int8_by_its_formula(scale):
    """Largest number 127 steps; everything else to the nearest step, a tie to the even one."""
    values = torch.tensor([[-127.0, 0.5, 1.5, 2.6, -3.4, 0.0, 126.4, 127.0]]) * scale
    stored = codec_of(KvDType.INT8).encode(values)
    assert stored[0, :4].view(torch.float32).item() == pytest.approx(scale, rel=1e-6)
    steps = stored[0, 4:].view(torch.int8)
    if scale == 1.0:
        assert steps.tolist() == [-127, 0, 2, 3, -3, 0, 126, 127]
    assert abs(steps).max() == 127


def test_int8_scales_each_vector_by_itself():
    values = torch.stack([torch.full((2, 4), 1e-3), torch.full((2, 4), 1e3)])
    codec = codec_of(KvDType.INT8)
    torch.testing.assert_close(codec.decode(codec.encode(values)), values, rtol=1e-6, atol=0)


def test_int8_of_zeros_and_of_the_smallest_numbers():
    codec = codec_of(KvDType.INT8)
    assert torch.equal(codec.decode(codec.encode(torch.zeros(3, 8))), torch.zeros(3, 8))
    tiny = torch.full((1, 4), 2.0**-149)
    assert codec.decode(codec.encode(tiny)).abs().max() <= 2.0**-126
    for values in (torch.zeros(1, 4), tiny):
        # A quotient by it is finite: what becomes of NaN as a whole number is undefined.
        assert codec.encode(values)[0, :4].view(torch.float32) >= 2.0**-126


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_int8_does_not_hide_what_is_not_finite(bad):
    values = torch.ones(2, 8)
    values[0, 3] = bad
    read = codec_of(KvDType.INT8).decode(codec_of(KvDType.INT8).encode(values))
    assert not read[0].isfinite().any()
    assert torch.equal(read[1], torch.ones(8))


def test_torch_types():
    for dtype in (*ELEMENT_TYPES, *DType):
        # float8_e4m3 is float8_e4m3fn: finite numbers only.
        assert str(torch_dtype(dtype)).startswith(f"torch.{dtype.value}")
    assert torch_dtype(DType.BFLOAT16) is torch_dtype(KvDType.BFLOAT16)
