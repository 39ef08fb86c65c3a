"""LoRA adapters from the client's `model` to the token, token for token as merged weights."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from kvferry.adapter_files import adapter_identities
from kvferry.config import load_config
from kvferry.membership import Role
from router.served_models import ServedModels
from tests.support.in_process_cluster import Answer, InProcessCluster
from tests.support.reference import Reference, ReferenceAnswer, divergence
from tests.support.small_tokenizer import write_tokenizer
from tests.support.tiny_adapters import make_adapter, merge_adapter, write_adapter_config
from tests.support.tiny_families import VOCAB, make_family

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_TOKENS = 8
PAGE_SIZE = 16
NAMES = ("", "one", "two")
"""What clients ask for: the model itself, and its adapters."""
PROMPTS = [np.random.default_rng(5).integers(10, VOCAB, length).tolist() for length in (3, 40, 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, its adapters `one` and `two`, and what they make of it, `one merged`."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make_family(folder / "model", "qwen2")
    write_tokenizer(model)
    make_adapter(folder / "one", model, seed=1, rank=8)
    make_adapter(folder / "two", model, seed=2, targets=("q_proj", "v_proj", "down_proj"))
    for name in ("one", "two"):
        merge_adapter(folder / f"{name} merged", model, folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[ReferenceAnswer]]:
    """By name, of each prompt."""
    answers: dict[str, list[ReferenceAnswer]] = {}
    for name in NAMES:
        reference = Reference(folder / (f"{name} merged" if name else "model"))
        answers[name] = [reference.greedy(prompt, ANSWER_TOKENS) for prompt in PROMPTS]
    return answers


def settings_of(folder: Path, **more: str) -> dict[str, str]:
    return {
        "model.path": str(folder / "model"),
        "model.served_name": "base",
        "model.adapters": f"{{one: {folder / 'one'}, two: {folder / 'two'}}}",
        "model.context_length": "256",
        "cache.memory_bytes": str(4 * 2**20),
        "cache.audit": "true",
        "scheduler.chunk_tokens": "64",
    } | more


@pytest.mark.parametrize(
    "settings",
    [
        {"workers.decode.tensor_parallel": "2", "speculation.ngram.max_draft": "3"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"workers.prefill.tensor_parallel": "2"}, marks=pytest.mark.slow),
    ],
    ids=["two ranks decode, with drafts", "one rank", "two ranks prefill"],
)
def test_greedy_equals_merged_weights(
    settings: dict[str, str], folder: Path, expected: dict[str, list[ReferenceAnswer]]
) -> None:
    """The model and both adapters at once: prompts of all three share each batch of the pair."""
    config = load_config(None, {}, settings_of(folder, **settings))
    calls = [(name, at) for at in range(len(PROMPTS)) for name in NAMES]
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as cluster:

        def ask(call: tuple[str, int]) -> Answer:
            name, at = call
            return cluster.generate(PROMPTS[at], ANSWER_TOKENS, model=name)

        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(ask, calls))
        again = [ask(call) for call in calls]
        cluster.wait_idle()
        moved = cluster.counters()["source_started"]
    assert moved > 0, "nothing was handed off"
    assert expected[""] != expected["one"] != expected["two"] != expected[""]
    for (name, at), first, second in zip(calls, answers, again, strict=True):
        for answer in (first, second):
            assert divergence(name, answer.token_ids, expected[name][at]) is None


def test_kv_of_another_adapter_is_never_used(folder: Path) -> None:
    """Though prompts are the same: each computes its own once, and finds it the next time."""
    config = load_config(None, {}, settings_of(folder))
    prompt = PROMPTS[-1]
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as cluster:
        usages = {
            (name, turn): cluster.generate(prompt, 2, model=name).finish.usage
            for turn in (1, 2)
            for name in (*NAMES, "base")
        }
    found = {key: usage.prefill_hit_tokens for key, usage in usages.items()}
    own = {key: usage.decode_hit_tokens for key, usage in usages.items()}
    pages = len(prompt) // PAGE_SIZE * PAGE_SIZE
    for name in NAMES:
        assert (found[name, 1], own[name, 1]) == (0, 0)
        assert max(found[name, 2], own[name, 2]) == pages
    # The model's own name says nothing else than no name.
    assert max(found["base", 1], own["base", 1]) == pages


@pytest.mark.slow
def test_what_is_not_served_is_refused(folder: Path, tmp_path: Path) -> None:
    """Unknown names at the router; at a worker an adapter whose files have changed since it read
    them, of which a router that came later knows the new ones."""
    changing = shutil.copytree(folder / "one", tmp_path / "changing")
    config = load_config(
        None, {}, settings_of(folder, **{"model.adapters": f"{{one: {changing}}}"})
    )
    with InProcessCluster(config, (Role.BOTH,)) as cluster:
        with pytest.raises(grpc.RpcError, match="'two' is not served here") as caught:
            cluster.generate(PROMPTS[0], 2, model="two")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        before = cluster.generate(PROMPTS[0], 2, model="one").token_ids
        write_adapter_config(changing, {"lora_alpha": 1})
        new = adapter_identities({"one": str(changing)})
        cluster.router.models = ServedModels("base", new)
        with pytest.raises(grpc.RpcError, match=f"adapter: {new['one']} is not loaded") as caught:
            cluster.generate(PROMPTS[0], 2, model="one")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        cluster.router.models = ServedModels("base", adapter_identities({"one": f"{folder}/one"}))
        assert cluster.generate(PROMPTS[0], 2, model="one").token_ids == before
