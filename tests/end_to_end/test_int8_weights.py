"""Int8 weights over prefill and decode workers: the answers of the elements that are left."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.config import DType, KvDType, Quantization, load_config
from kvferry.membership import Role
from tests.support.in_process_cluster import InProcessCluster
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.reference import Reference, divergence
from tests.support.rounded_model import write_rounded
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from tests.support.prompts import Prompt

ANSWER_TOKENS = 8
PD = (Role.PREFILL, Role.DECODE)


def _answers(
    directory: Path, roles: Sequence[Role], prompts: list[list[int]], tokens: int, at_once: int
) -> list[tuple[int, ...]]:
    settings = {
        "model.path": str(directory),
        "model.quantization": "int8",
        "model.context_length": "1024",
        "cache.audit": "true",
        "cache.memory_bytes": str(128 * 2**20),
    }
    with InProcessCluster(load_config(None, {}, settings), roles) as cluster:
        answers = cluster.generate_all(prompts, tokens, at_once)
        cluster.wait_idle()
    if roles == PD:
        assert sum(answer.finish.usage.moved_tokens for answer in answers) > 0
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("roles", [PD, (Role.BOTH,)])
def test_greedy_equals_transformers_with_rounded_weights(
    roles: Sequence[Role], tmp_path: Path, model_directory: Path
) -> None:
    shape = TinyLlama(tied_embeddings=True)
    directory = make_tiny_llama(tmp_path / "model", shape, tokenizer_from=model_directory)
    reference = Reference(write_rounded(directory, tmp_path / "rounded"))
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, 49152, length).tolist() for length in (1, 17, 40, 150)]
    answers = _answers(directory, roles, prompts, ANSWER_TOKENS, at_once=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert divergence("int8", answer, reference.greedy(prompt, ANSWER_TOKENS)) is None


@pytest.mark.slow
def test_a_pair_answers_as_one_worker(model_directory: Path, prompts: list[Prompt]) -> None:
    """The real model, one request at a time: rounding would decide between near ties."""
    ids = [list(prompt.ids) for prompt in prompts[2:20:4]]
    pair = _answers(model_directory, PD, ids, 16, at_once=1)
    assert pair == _answers(model_directory, (Role.BOTH,), ids, 16, at_once=1)


@pytest.mark.slow
def test_logits_stay_near_those_of_float32(model_directory: Path, prompts: list[Prompt]) -> None:
    """Of the real model; logits have a spread of about 3."""
    tokens = [np.asarray(prompt.ids[:200], dtype=np.int32) for prompt in prompts[10::8]]
    found = [_last_logits(model_directory, kind, tokens) for kind in Quantization]
    error = found[1] - found[0]
    assert error.square().mean().sqrt() < 0.4
    assert error.abs().max() < 3.0


def _last_logits(
    directory: Path, quantization: Quantization, prompts: list[npt.NDArray[np.int32]]
) -> torch.Tensor:
    """[prompts, V]."""
    pool = poisoned_pool(load_spec(directory).kv_layout(KvDType.FLOAT32, 16))
    runner = ModelRunner(directory, pool, threads=1, dtype=DType.FLOAT32, quantization=quantization)
    with closing(runner):
        steps = [SequenceStep(1, tokens, 0, wants_logits=True) for tokens in prompts]
        rows = make_rows(16, 1)
        return torch.cat([runner.forward(build_forward_batch([step], rows, 16)) for step in steps])
