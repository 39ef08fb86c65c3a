"""Whether the GPU backend is right, and how fast: on a machine with one GPU, in 8 minutes.

    make gpu-check          python -m benchmarks.gpu_check [--seconds 450]

One JSON object a line: {"check", "what", ..., "ok"}; the last is {"check": "end", "ok", ...}. Exit
code 0: all is right; 1: something is not, or there was no time for it; 3: there is no CUDA device;
4: a check did not end in time, nor did it let itself be ended. Needs the package flashinfer-python,
whose kernels may be compiled in the course of it, each for half a minute; what matters most comes
first.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from unittest.mock import patch

import torch

from benchmarks import gpu_kernels, gpu_model
from benchmarks.gpu_model import DTYPE, Effort
from engine.cuda_device import CudaDevice
from engine.cuda_graphs import graph_sizes
from engine.cuda_model_runner import CudaModelRunner
from engine.flashinfer_library import load_flashinfer
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL, KvDType, load_config
from kvferry.errors import ConfigError
from kvferry.membership import Role
from mem_cache.element_codec import torch_dtype
from tests.support.in_process_cluster import InProcessCluster
from tests.support.small_tokenizer import VOCAB, write_tokenizer
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from engine.cuda_device import Device
    from kvferry.clock import Clock
    from mem_cache.kv_pool import KvPool

LIMIT_S = 450.0
"""Of the whole run: less than eight minutes, the interpreter's start and end included."""
NO_DEVICE, HANGS = 3, 4
_SIZES = graph_sizes(4)
_WINDOW = 37


class Platform(Protocol):
    """A CUDA device and FlashInfer, or stand-ins for both."""

    device: Device
    library: Any

    def cluster(
        self, directory: Path, sizes: Sequence[int]
    ) -> AbstractContextManager[InProcessCluster]:
        """A prefill and a decode worker of a model on the device, with graphs of these sizes."""
        ...


class CudaPlatform:
    """Implements `Platform`."""

    def __init__(self) -> None:
        """Raises `ConfigError` where there is no device or no FlashInfer."""
        self.device: Device = CudaDevice()
        self.library = load_flashinfer()

    @contextmanager
    def cluster(self, directory: Path, sizes: Sequence[int]) -> Iterator[InProcessCluster]:
        """See `Platform.cluster`."""

        def build(directory: Path, kv_pool: KvPool, dtype: Any, _: int) -> CudaModelRunner:
            # Each worker's thread stages through memory of its own.
            return CudaModelRunner(directory, kv_pool, dtype, sizes, CudaDevice(), self.library)

        settings = {"model.device": "cuda", "workers.prefill.gpus": "0.5"}
        config = load_config(
            None, {}, settings | {"workers.decode.gpus": "0.5"} | pair_settings(directory)
        )
        with (
            patch("cluster.worker_process.build_cuda_runner", build),
            InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as cluster,
        ):
            yield cluster


def pair_settings(directory: Path) -> dict[str, str]:
    """Of two workers that share a device."""
    return {
        "model.path": str(directory),
        "model.dtype": DTYPE.value,
        "model.context_length": "1024",
        "handoff.transport": "gloo",
    }


_Run: TypeAlias = Callable[[], Iterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Check:
    """Something to find out, row by row."""

    name: str
    run: _Run


def checks(
    platform: Platform, tiny: Path, real: Path | None, effort: Effort, types: Sequence[KvDType]
) -> list[Check]:
    """All of them, the most telling first. `real`: None where no model is at hand.

    `types`: of KV and weights; only the first is looked at thoroughly.
    """
    models = {"tiny": tiny} | ({} if real is None else {"SmolLM2-135M": real})
    largest, main = list(models)[-1], types[0]

    def answers(directory: Path, sizes: Sequence[int]) -> _Run:
        return lambda: gpu_model.answers(platform, directory, sizes, effort)

    def operators(dtype: KvDType) -> _Run:
        return lambda: gpu_kernels.operators(platform, torch_dtype(dtype))

    def attention(dtype: KvDType, window: int | None) -> _Run:
        return lambda: gpu_kernels.attention(platform, dtype, window)

    return [
        Check(f"operators {main.value}", operators(main)),
        Check(f"attention {main.value}", attention(main, None)),
        *(
            Check(f"answers of {name}", answers(directory, sizes))
            for name, directory in models.items()
            for sizes in (_SIZES, ())
        ),
        Check(f"rates of {largest}", lambda: gpu_model.rates(platform, models[largest], effort)),
        Check(f"attention {main.value}, windowed", attention(main, _WINDOW)),
        *(Check(f"operators {other.value}", operators(other)) for other in types[1:]),
        *(Check(f"attention {other.value}", attention(other, None)) for other in types[1:]),
    ]


def run_checks(
    todo: Sequence[Check], clock: Clock, until_s: float, say: Callable[[dict[str, Any]], None]
) -> bool:
    """Run them one after the other; whether all was right. What there is no time for is not."""
    all_right = True
    for check in todo:
        if clock.now() >= until_s:
            say({"check": check.name, "ok": False, "problem": "no time is left"})
            all_right = False
            continue
        try:
            for row in check.run():
                say({"check": check.name} | row)
                all_right = all_right and row["ok"]
        except Exception as error:  # noqa: BLE001 - the others are still worth knowing
            say({"check": check.name, "ok": False, "problem": repr(error)})
            all_right = False
    return all_right


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)  # noqa: T201 - the report


def _real_model() -> Path | None:
    try:
        return resolve_model(BUNDLED_MODEL)
    except ConfigError as error:
        _say({"check": "SmolLM2-135M", "ok": True, "problem": f"left out: {error}"})
        return None


def _end_for_good() -> None:
    _say({"check": "end", "ok": False, "problem": "a check hangs"})
    os._exit(HANGS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LIMIT_S)
    limit_s = parser.parse_args(arguments).seconds
    if not torch.cuda.is_available():
        _say({"check": "end", "ok": False, "problem": "no CUDA device"})
        return NO_DEVICE
    guard = threading.Timer(limit_s, _end_for_good)
    guard.daemon = True
    guard.start()
    clock = MonotonicClock()
    until_s = clock.now() + 0.8 * limit_s
    platform = CudaPlatform()
    _say({"check": "device", "what": torch.cuda.get_device_name(), "ok": True})
    with tempfile.TemporaryDirectory() as folder:
        real = _real_model()
        tiny = make_tiny_llama(Path(folder), TinyLlama(head_dim=64, vocab_size=VOCAB))
        write_tokenizer(tiny)
        types = (KvDType.FLOAT16, KvDType.BFLOAT16)
        ok = run_checks(checks(platform, tiny, real, Effort(), types), clock, until_s, _say)
    guard.cancel()
    _say({"check": "end", "ok": ok, "seconds": clock.now() - until_s + 0.8 * limit_s})
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
