"""The engine on FlashInfer and CUDA Graphs, on strict stand-ins for both, against the CPU backend.

Tokens are compared in float32, of which FlashInfer has no kernels: in the types it has, two right
answers part where rounding decides, so that there logits are compared.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.cuda_graphs import DecodeGraphs, PreparedAttention, StepParts, graph_sizes, padded
from engine.cuda_model_runner import CudaModelRunner, build_cuda_runner
from engine.engine import Engine
from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.request import Request
from kvferry.cache_key import CacheUse, Sharing
from kvferry.clock import ManualClock
from kvferry.config import CacheConfig, DType, KvArrangement, KvDType, SchedulerConfig
from kvferry.errors import ConfigError
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache
from tests.support import fake_flashinfer
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.recording_device import RecordingDevice
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from engine.step_runner import StepRunner
    from kvferry.generation import FinishReason, OutputToken
    from mem_cache.kv_pool import KvPool

VOCAB, SLOTS, NEW_TOKENS = 512, 512, 6
SIZES = (1, 2, 4)
SHAPE = TinyLlama(vocab_size=VOCAB, head_dim=64, context_length=256)
PROMPTS = [
    np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)
    for seed, length in enumerate((37, 5, 21, 60, 9))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), SHAPE)


class _Listener:
    """Remembers the tokens of one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.layers: list[int] = []

    def admitted(self, request: Request) -> None: ...

    def computing(self, request: Request, tokens: int, layers: int) -> None:
        self.layers.append(layers)

    def computed(self, request: Request) -> None: ...

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        self.ids += [token.token_id for token in tokens]

    def finished(self, request: Request, reason: FinishReason) -> None: ...


def _answers(engine: Engine, **sampling: Any) -> list[list[int]]:
    """Of all prompts, some of which come while others are decoded."""
    listeners = []
    for index, prompt in enumerate(PROMPTS):
        listeners.append(_Listener())
        request = Request(
            id=AttemptId(RequestId(f"r{index}"), Attempt(1)),
            prompt=prompt,
            sampling=SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **sampling),
            cache_use=CacheUse(ExtraKey(""), Sharing.SHARED),
            eos_token_ids=engine.eos_token_ids,
            listener=listeners[-1],
        )
        engine.submit(request)
        engine.step()
        engine.step()
    while engine.step():
        pass
    engine.kv_cache.audit()
    return [listener.ids for listener in listeners]


def _engine(
    directory: Path,
    page_size: int,
    device: RecordingDevice | None,
    arrangement: KvArrangement = KvArrangement.NHD,
) -> Engine:
    """In float32. `device`: None for the CPU backend."""
    layout = load_spec(directory).kv_layout(KvDType.FLOAT32, page_size, arrangement)
    config = CacheConfig(page_size=page_size, rows=8, audit=True)
    kv_cache = assemble_kv_cache(layout, config, SLOTS, SHAPE.context_length)
    kv_cache.pool.buffer.view(torch.uint8).fill_(255)
    runner: StepRunner
    if device is None:
        runner = ModelRunner(directory, kv_cache.pool, threads=1, dtype=DType.FLOAT32)
    else:
        runner = CudaModelRunner(
            directory, kv_cache.pool, DType.FLOAT32, SIZES, device, fake_flashinfer
        )
    runner.warm_up()
    return Engine(kv_cache, runner, SchedulerConfig(chunk_tokens=16), ManualClock())


@pytest.fixture
def float32_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.widen(monkeypatch)


@pytest.mark.usefixtures("float32_kernels")
@pytest.mark.parametrize(
    ("page_size", "arrangement"),
    [(4, KvArrangement.HND), (16, KvArrangement.NHD)],
)
def test_the_engine_says_what_it_says_on_the_cpu(
    directory: Path, page_size: int, arrangement: KvArrangement
) -> None:
    device = RecordingDevice()
    ours = _engine(directory, page_size, device, arrangement)
    cpu = _engine(directory, page_size, None)
    answers = _answers(ours)
    assert answers == _answers(cpu)
    assert all(len(set(answer)) > NEW_TOKENS // 2 for answer in answers), "answers show little"
    # Both ways were taken, and cached prefixes too.
    assert device.replays > 0
    assert device.uploads > 0
    assert _answers(ours, temperature=3.0, seed=5) == _answers(cpu, temperature=3.0, seed=5)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_logits_are_near_those_on_the_cpu(directory: Path, dtype: DType) -> None:
    """Chunks beside decoded tokens, then graphs, over the same tokens."""
    layout = load_spec(directory).kv_layout(KvDType(dtype.value), 4)
    pools = [poisoned_pool(layout) for _ in range(2)]
    runners: list[StepRunner] = [
        CudaModelRunner(directory, pools[0], dtype, SIZES, RecordingDevice(), fake_flashinfer),
        ModelRunner(directory, pools[1], threads=1, dtype=dtype),
    ]
    rows, done = make_rows(4, 3), [0, 0, 0]
    for runner in runners:
        runner.warm_up()
    for counts in ((30, 1, 9), (1, 1, 8), (1, 1, 1), (1, 1, 1)):
        steps = [
            SequenceStep(row + 1, PROMPTS[(0, 3, 2)[row]][at : at + count], at, True)
            for row, (at, count) in enumerate(zip(done, counts, strict=True))
        ]
        done = [at + count for at, count in zip(done, counts, strict=True)]
        batch = build_forward_batch(steps, rows, 4)
        ours, expected = (runner.forward(batch) for runner in runners)
        assert torch.cosine_similarity(ours, expected, dim=1).min() > 0.995


def _pool(directory: Path, page_size: int = 4) -> KvPool:
    return poisoned_pool(load_spec(directory).kv_layout(KvDType.BFLOAT16, page_size))


def _runner(
    directory: Path, pool: KvPool, device: RecordingDevice, sizes: tuple[int, ...] = SIZES
) -> CudaModelRunner:
    runner = CudaModelRunner(directory, pool, DType.BFLOAT16, sizes, device, fake_flashinfer)
    runner.warm_up()
    return runner


def test_warm_up_leaves_every_page_but_the_dummy_alone(directory: Path) -> None:
    pool = _pool(directory)
    _runner(directory, pool, RecordingDevice())
    assert pool.buffer[:, :, 4:].isnan().all()


@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 5])
def test_padding_changes_no_logits_and_no_page_of_others(directory: Path, sequences: int) -> None:
    """Steps of one size after another, each of which must find nothing of the one before."""
    rows = make_rows(4, sequences)
    outcomes = []
    for sizes in ((), SIZES):
        pool, device = _pool(directory), RecordingDevice()
        runner = _runner(directory, pool, device, sizes)
        taken = [PROMPTS[index % 5][: 6 + index] for index in range(sequences)]
        prompts = [SequenceStep(i + 1, ids, 0, False) for i, ids in enumerate(taken)]
        runner.forward(build_forward_batch(prompts, rows, 4))
        logits = []
        for turn in range(3):
            steps = [
                SequenceStep(i + 1, np.asarray([7 + i], dtype=np.int32), len(ids) + turn, True)
                for i, ids in enumerate(taken)
            ]
            before = pool.buffer.clone()
            batch = build_forward_batch(steps, rows, 4)
            logits.append(runner.forward(batch))
            changed = (pool.buffer.view(torch.int16) != before.view(torch.int16)).flatten(3)
            at = changed.any(-1).any(0).any(0).nonzero().flatten().tolist()
            assert set(at) <= {0, *batch.out_slots.tolist()}
        expected_replays = 3 if sizes and sequences <= SIZES[-1] else 0
        assert device.replays == expected_replays
        outcomes.append(torch.stack(logits))
    assert torch.equal(*outcomes)
    assert not outcomes[0].isnan().any()


def test_what_is_no_decode_step_is_no_graph(directory: Path) -> None:
    device = RecordingDevice()
    runner, rows = _runner(directory, _pool(directory), device), make_rows(4, 2)
    prompts = [SequenceStep(i, PROMPTS[i], 0, True) for i in (1, 2)]
    runner.forward(build_forward_batch(prompts, rows, 4))
    one, two = (np.full(count, 3, dtype=np.int32) for count in (1, 2))
    unwanted = [SequenceStep(i, one, len(PROMPTS[i]), i == 1) for i in (1, 2)]
    assert runner.forward(build_forward_batch(unwanted, rows, 4)).shape == (1, VOCAB)
    mixed = [SequenceStep(1, one, 5, True), SequenceStep(2, two, 21, True)]
    assert runner.forward(build_forward_batch(mixed, rows, 4)).shape == (2, VOCAB)
    assert device.replays == 0


class _MarkingDevice(RecordingDevice):
    """Says which marks it was asked for, and which were waited for."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def mark(self) -> _SaidMark:
        name = str(sum(entry.startswith("mark") for entry in self.said))
        self.said.append(f"mark {name}")
        return _SaidMark(self.said, name)


@dataclass
class _SaidMark:
    said: list[str]
    name: str

    def wait(self) -> None:
        self.said.append(f"passed {self.name}")


def test_layers_are_told_of_when_the_device_has_computed_them(directory: Path) -> None:
    said: list[str] = []
    device = _MarkingDevice(said)
    runner = _runner(directory, _pool(directory), device, ())
    said.clear()
    steps = [SequenceStep(1, PROMPTS[0], 0, False)]
    batch = build_forward_batch(steps, make_rows(4, 1), 4)
    runner.forward(batch, lambda layers: said.append(f"layers {layers}"))
    assert said == ["mark 0", "mark 1", "passed 0", "layers 1", "passed 1"]


@pytest.mark.usefixtures("float32_kernels")
def test_windows_of_every_layer(tmp_path: Path) -> None:
    """A window far shorter than the prompts, decoded by graphs."""
    make_tiny_llama(tmp_path, SHAPE)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 7}))
    device = RecordingDevice()
    assert _answers(_engine(tmp_path, 4, device)) == _answers(_engine(tmp_path, 4, None))
    assert device.replays > 0


def test_models_without_kernels_are_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path, TinyLlama(vocab_size=VOCAB))
    with pytest.raises(ConfigError, match="heads of 16"):
        _runner(directory, _pool(directory), RecordingDevice())


def test_without_a_device_the_setting_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device") as caught:
        build_cuda_runner(directory, _pool(directory), DType.BFLOAT16, running_max=4)
    assert caught.value.field == "model.device"


def test_a_graph_refuses_what_waits_for_the_device() -> None:
    """The stand-in would notice a step that a real device could not record."""
    device = RecordingDevice()
    static = torch.ones(3)
    for mode in (torch.inference_mode, contextlib.nullcontext):
        with pytest.raises(AssertionError, match="no place in a graph"), mode():
            device.capture(lambda: static * int(static.sum()))
    with pytest.raises(AssertionError, match="no place in a graph"):
        device.capture(lambda: static * torch.tensor(2.0))
    graph, result = device.capture(lambda: static * 2)
    assert result.isnan().all()
    static.fill_(4)
    graph.replay()
    assert result.tolist() == [8.0, 8.0, 8.0]


def test_padded_rows_lie_in_the_dummy_page() -> None:
    steps = [SequenceStep(row, PROMPTS[row][:1], 8, True) for row in (1, 2)]
    batch = build_forward_batch(steps, make_rows(4, 2), 4)
    step = padded(batch, 5)
    assert step.attention.kv_lengths.tolist() == [9, 9, 1, 1, 1]
    assert step.attention.query_lengths.tolist() == [1] * 5
    assert step.attention.kv_indices[-3:].tolist() == [0, 0, 0]
    assert step.attention.kv_indices[:-3].tolist() == batch.attention.kv_indices.tolist()
    assert step.out_slots.tolist() == [*batch.out_slots.tolist(), 0, 0, 0]
    assert step.attention.kv_indptr.dtype == np.int32
    assert step.attention.kv_indices.dtype == np.int32


@pytest.mark.parametrize(
    ("running_max", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
    ],
)
def test_sizes(running_max: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(running_max) == sizes


def test_sizes_ascend() -> None:
    parts = StepParts(RecordingDevice(), PreparedAttention(), _never, _never, 4)
    with pytest.raises(AssertionError, match="ascend"):
        DecodeGraphs(parts, (2, 1))


def _never(_: Any) -> Any:
    raise AssertionError("nothing is computed here")
