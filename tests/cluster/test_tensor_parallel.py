"""Workers of several ranks in processes of their own, as a user starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from cluster.client import Client
from engine.model_directory import resolve_model
from kvferry.config import BUNDLED_MODEL
from kvferry.convert import accounts_from_wire
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.local_cluster import local_cluster
from tests.support.reference import Reference, divergence
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_TOKENS = 8


@pytest.mark.slow
def test_two_ranks_hand_off_to_four(tmp_path: Path) -> None:
    shape = TinyLlama(num_layers=3, num_heads=8, num_kv_heads=4)
    tokenizer = resolve_model(BUNDLED_MODEL)
    directory = make_tiny_llama(tmp_path / "model", shape, tokenizer_from=tokenizer)
    prompt = np.random.default_rng(3).integers(3, 49152, 150).tolist()
    expected = Reference(directory).greedy(prompt, ANSWER_TOKENS)
    settings = {
        "model__path": directory,
        "workers__prefill__tensor_parallel": 2,
        "workers__decode__tensor_parallel": 4,
        "cache__memory_bytes": 32 * 2**20,
    }
    with local_cluster(**settings) as cluster:
        request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=prompt),
            sampling=inference.SamplingParams(
                max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True
            ),
        )
        with Client(cluster.address) as client:
            responses = list(client.generate(request))
        ids = [token for response in responses for token in response.token_ids]
        assert divergence("prompt", ids, expected) is None
        usage = responses[-1].finish.usage
        assert (usage.prefill_worker, usage.decode_worker) == ("prefill-0", "decode-0")
        assert usage.moved_tokens == len(prompt)
        cluster.wait_for_status(
            lambda status: all(
                accounts_from_wire(worker.accounts).is_idle for worker in status.workers
            )
        )
