import dataclasses

import pytest
import torch

from kvferry.config import KvDType
from mem_cache.layout import MlaLayout
from mem_cache.mla_pool import MLATokenToKVPool
from mem_cache.pool_choice import build_kv_pool

DEEPSEEK = MlaLayout(
    num_layers=61, kv_lora_rank=512, qk_rope_head_dim=64, dtype=KvDType.BFLOAT16, page_size=64
)
SMALL = MlaLayout(2, kv_lora_rank=8, qk_rope_head_dim=4, dtype=KvDType.FLOAT32, page_size=4)


def test_bytes_per_token_of_deepseek_v3():
    assert DEEPSEEK.bytes_per_token == 61 * 576 * 2
    int8 = dataclasses.replace(DEEPSEEK, dtype=KvDType.INT8)
    assert int8.bytes_per_token == 61 * (512 + 4 + 64 + 4)


def test_latent_and_rotated_part_lie_side_by_side():
    pool = build_kv_pool(SMALL, 16)
    assert isinstance(pool, MLATokenToKVPool)
    assert pool.buffer.shape == (2, 1, 20, 1, 12)
    latent, rope = torch.randn(2, 8), torch.randn(2, 4)
    pool.write(1, torch.tensor([9, 5]), latent, rope)
    assert pool.buffer[1, 0, 9, 0].equal(torch.cat([latent[0], rope[0]]))
    latents, ropes = pool.layer(1)
    assert latents[5].equal(latent[1])
    assert ropes[5].equal(rope[1])
    assert pool.in_place_dtype is None


def test_each_part_has_its_own_scale():
    pool = build_kv_pool(dataclasses.replace(SMALL, dtype=KvDType.INT8), 16)
    pool.write(0, torch.tensor([4]), torch.full((1, 8), 1e3), torch.full((1, 4), 1e-3))
    latent, rope = pool.read(0, torch.tensor([4]))
    torch.testing.assert_close(latent, torch.full((1, 8), 1e3))
    torch.testing.assert_close(rope, torch.full((1, 4), 1e-3))


@pytest.mark.parametrize("change", [{"kv_lora_rank": 12}, {"qk_rope_head_dim": 8}])
def test_identities_differ_where_bytes_do(change):
    other = dataclasses.replace(SMALL, **change)
    assert other.exchange_hash() != SMALL.exchange_hash()
    assert other.page_hash != SMALL.page_hash


def test_every_rank_holds_the_whole_latent():
    assert SMALL.exchange_hash(ranks=4) == SMALL.exchange_hash()


def test_identities_tell_where_the_parts_meet():
    turned = dataclasses.replace(SMALL, kv_lora_rank=4, qk_rope_head_dim=8)
    assert turned.bytes_per_token == SMALL.bytes_per_token
    assert turned.exchange_hash() != SMALL.exchange_hash()
    assert turned.page_hash != SMALL.page_hash
