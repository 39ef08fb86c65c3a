"""Answers with adapters do not depend on what else the engine does, on either backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.cuda_model_runner import CudaModelRunner
from engine.engine import Engine
from engine.lora_weights import load_adapters
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.request import Request
from engine.speculation import drafts_of
from kvferry.adapter_files import adapter_identities
from kvferry.cache_key import CacheUse, build_extra_key
from kvferry.clock import ManualClock
from kvferry.config import CacheConfig, DType, KvDType, NgramConfig, SchedulerConfig
from kvferry.errors import AdapterNotLoaded
from kvferry.ids import NO_ADAPTER, AdapterId, Attempt, AttemptId, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache
from tests.support import fake_flashinfer
from tests.support.recording_device import RecordingDevice
from tests.support.tiny_adapters import make_adapter
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from engine.step_runner import StepRunner
    from kvferry.errors import KvferryError
    from kvferry.generation import FinishReason, OutputToken

PAGE_SIZE, SLOTS = 4, 512
NEW_TOKENS, SAMPLES = 12, 2
SHAPE = TinyLlama(vocab_size=512, head_dim=64, context_length=256)
PROMPT = np.random.default_rng(0).integers(3, 512, 45).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    model = make_tiny_llama(folder / "model", SHAPE)
    make_adapter(folder / "one", model, seed=1, rank=4)
    make_adapter(folder / "two", model, seed=2, rank=2, targets=("q_proj", "v_proj", "up_proj"))
    return folder


@pytest.fixture
def float32_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.widen(monkeypatch)


class Listener:
    """Remembers the tokens of one request, by sample."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = [[] for _ in range(SAMPLES)]

    def admitted(self, request: Request) -> None: ...

    def computing(self, request: Request, tokens: int, layers: int) -> None: ...

    def computed(self, request: Request) -> None: ...

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        for sample, token in enumerate(tokens, request.sample):
            self.ids[sample].append(token.token_id)

    def finished(self, request: Request, reason: FinishReason) -> None: ...

    def gave_up(self, request: Request, error: KvferryError) -> None:
        raise AssertionError(error)


def engine_of(
    folder: Path, *, slots: int = SLOTS, device: RecordingDevice | None = None, drafts: int = 0
) -> tuple[Engine, dict[str, AdapterId]]:
    model, folders = folder / "model", {name: str(folder / name) for name in ("one", "two")}
    spec = load_spec(model)
    config = CacheConfig(page_size=PAGE_SIZE, rows=16, audit=True)
    layout = spec.kv_layout(KvDType.FLOAT32, PAGE_SIZE)
    kv_cache = assemble_kv_cache(layout, config, slots, SHAPE.context_length)
    adapters = load_adapters(folders, spec, torch.float32)
    pool, dtype = kv_cache.pool, DType.FLOAT32
    runner: StepRunner
    if device is None:
        runner = ModelRunner(model, pool, threads=1, dtype=dtype, adapters=adapters)
    else:
        runner = CudaModelRunner(model, pool, dtype, (1, 2, 4), device, fake_flashinfer, adapters)
        runner.warm_up()
    scheduler = SchedulerConfig(chunk_tokens=16, output_reserve=0.0)
    guesses = drafts_of(NgramConfig(max_draft=drafts))
    engine = Engine(kv_cache, runner, scheduler, ManualClock(), None, guesses)
    engine.adapters = adapters.ids
    return engine, {"": NO_ADAPTER, **adapter_identities(folders)}


def submit(engine: Engine, adapter: AdapterId, name: str) -> Listener:
    listener = Listener()
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.7, seed=3, n=SAMPLES
    )
    request = Request(
        id=AttemptId(RequestId(name), Attempt(1)),
        prompt=PROMPT,
        sampling=sampling,
        cache_use=CacheUse(build_extra_key("m", adapter), adapter=adapter),
        eos_token_ids=(),
        listener=listener,
    )
    engine.submit(request)
    return listener


def run(engine: Engine) -> None:
    while engine.step():
        pass
    engine.kv_cache.audit()


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[list[int]]]:
    """By adapter: samples of the same prompt, nothing else being computed."""
    engine, ids = engine_of(folder)
    answers = {}
    for name, adapter in ids.items():
        listener = submit(engine, adapter, name)
        run(engine)
        answers[name] = listener.ids
    assert len({str(answer) for answer in answers.values()}) == len(answers)
    return answers


@pytest.mark.parametrize(
    ("slots", "drafts"), [(SLOTS, 0), (SLOTS, 3), (220, 0)], ids=["room", "drafts", "retracted"]
)
def test_samples_of_all_in_one_batch(
    folder: Path, alone: dict[str, list[list[int]]], slots: int, drafts: int
) -> None:
    """Prompts in chunks beside decoded tokens; some lose their KV and compute it again."""
    engine, ids = engine_of(folder, slots=slots, drafts=drafts)
    listeners = {
        (name, turn): submit(engine, adapter, f"{name}{turn}")
        for turn in (1, 2)
        for name, adapter in ids.items()
    }
    run(engine)
    for (name, _), listener in listeners.items():
        assert listener.ids == alone[name]
    assert (engine.scheduler.counters["retractions"] > 0) == (slots < SLOTS)


@pytest.mark.usefixtures("float32_kernels")
def test_on_a_cuda_device_graphs_are_for_steps_without_adapters(
    folder: Path, alone: dict[str, list[list[int]]]
) -> None:
    device = RecordingDevice()
    engine, ids = engine_of(folder, device=device)
    listener = submit(engine, ids["one"], "one")
    run(engine)
    assert listener.ids == alone["one"]
    assert device.replays == 0
    listener = submit(engine, NO_ADAPTER, "none")
    run(engine)
    assert listener.ids == alone[""]
    assert device.replays > 0


def test_kv_is_found_by_the_same_adapter_alone(folder: Path) -> None:
    engine, ids = engine_of(folder)
    submit(engine, ids["one"], "one")
    run(engine)
    whole = len(PROMPT) // PAGE_SIZE * PAGE_SIZE
    found = {
        name: engine.cached_len(PROMPT, build_extra_key("m", adapter))
        for name, adapter in ids.items()
    }
    assert found == {"": 0, "one": whole, "two": 0}


def test_an_adapter_that_is_not_loaded_is_named(folder: Path) -> None:
    engine, ids = engine_of(folder)
    for adapter in ids.values():
        engine.check_adapter(adapter)
    with pytest.raises(AdapterNotLoaded, match="adapter: 5a1e is not loaded here") as raised:
        engine.check_adapter(AdapterId("5a1e"))
    assert ids["one"] in str(raised.value)
    assert raised.value.status.retryable
