from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.model_spec import load_spec
from engine.tensor_parallel import WHOLE, Shard, SoleRank
from engine.weights import load_weights, write_weights
from kvferry.config import DType
from kvferry.errors import ConfigError
from tests.support.tiny_llama import TinyLlama, make_tiny_llama


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_shards_cover_everything_once(ranks):
    parts = [Shard(rank, ranks).of(12) for rank in range(ranks)]
    assert [index for part in parts for index in range(12)[part]] == list(range(12))
    assert len({part.stop - part.start for part in parts}) == 1


def test_a_shard_cuts_nothing_in_two():
    with pytest.raises(AssertionError, match="10 cannot be cut into 4 equal parts"):
        Shard(0, 4).of(10)


def test_the_sum_of_one_summand():
    summand = torch.arange(3.0)
    SoleRank().all_reduce(summand)
    assert summand.tolist() == [0.0, 1.0, 2.0]
    assert SoleRank().shard is WHOLE


@pytest.fixture
def matrices(tmp_path):
    tensors = {name: torch.rand(12, 6) for name in ("first", "second")}
    write_weights(tmp_path / "model.safetensors", tensors.items())
    return load_weights(tmp_path, DType.FLOAT32), tensors


@pytest.mark.parametrize("rank", range(3))
def test_rows_of_each_matrix_are_stacked(matrices, rank):
    weights, tensors = matrices
    rows = slice(4 * rank, 4 * rank + 4)
    expected = torch.cat([tensors["first"][rows], tensors["second"][rows]])
    assert torch.equal(weights.fused(["first", "second"], Shard(rank, 3)), expected)


@pytest.mark.parametrize("rank", range(3))
def test_columns_are_contiguous(matrices, rank):
    weights, tensors = matrices
    part = weights.columns("second", Shard(rank, 3))
    assert torch.equal(part, tensors["second"][:, 2 * rank : 2 * rank + 2])
    assert part.is_contiguous()


def test_the_whole_is_used_as_it_lies_in_the_file(matrices):
    weights, _ = matrices
    first = weights.tensor("first")
    assert weights.columns("first", WHOLE).data_ptr() == first.data_ptr()
    assert weights.fused(["first", "second"], WHOLE).data_ptr() == first.data_ptr()


@pytest.fixture
def spec(tmp_path):
    shape = TinyLlama(num_heads=12, num_kv_heads=6, intermediate_size=96, vocab_size=64)
    return load_spec(make_tiny_llama(tmp_path / "model", shape))


def test_a_rank_has_its_part_of_heads_and_columns(spec):
    part = spec.of_rank(3, "workers.decode.tensor_parallel")
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (4, 2, 32)
    whole = dataclasses.replace(part, num_heads=12, num_kv_heads=6, intermediate_size=96)
    assert whole == spec
    assert spec.of_rank(1, "unused") == spec


@pytest.mark.parametrize("ranks", [4, 5, 12])
def test_ranks_must_divide_the_kv_heads(spec, ranks):
    with pytest.raises(ConfigError, match=rf"is {ranks}; must divide .* 6 KV heads") as raised:
        spec.of_rank(ranks, "workers.decode.tensor_parallel")
    assert raised.value.field == "workers.decode.tensor_parallel"


def test_ranks_must_divide_the_mlp(spec):
    odd = dataclasses.replace(spec, intermediate_size=100)
    with pytest.raises(ConfigError, match="100 MLP columns"):
        odd.of_rank(3, "workers.decode.tensor_parallel")
