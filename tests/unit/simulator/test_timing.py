"""Timing files: round trips, presets, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvferry.errors import InvalidInput
from simulator.step_times import StepTimes
from simulator.timing import TimingKind, WorkerTiming, parse_timing, preset_names, read_timing

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_gives_what_was_written(tmp_path: Path):
    times = StepTimes(prompt_token_s=0.00123, hop_s=0.0, layers=30, decode_beside=0.4)
    timing = WorkerTiming(times, TimingKind.MEASURED, {"machine": {"cpus": 2}})
    file = tmp_path / "timing.json"
    file.write_text(timing.text(), encoding="utf-8")
    assert read_timing(str(file)) == timing


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"times": {"prompt_tokens_s": 1}}, "times.prompt_tokens_s"),
        ({"times": {"hop_s": -0.1}}, "times.hop_s"),
        ({"times": {"hop_s": True}}, "times.hop_s"),
        ({"times": {"hop_s": float("nan")}}, "times.hop_s"),
        ({"times": {"layers": 1.5}}, "times.layers"),
        ({"times": {"bytes_per_s": 0}}, "times.bytes_per_s"),
        ({"times": 3}, "times"),
        ({"about": None}, "about"),
        ({"about": {"kind": "guessed"}}, "about.kind"),
        ({"kvferry_timing": 2}, "timing"),
    ],
)
def test_errors_name_the_field(changes: dict[str, object], field: str):
    record = json.loads(WorkerTiming(StepTimes(), TimingKind.MEASURED).text()) | changes
    with pytest.raises(InvalidInput) as caught:
        parse_timing(json.dumps(record), "a file")
    assert caught.value.field == field


def test_neither_preset_nor_file(tmp_path: Path):
    with pytest.raises(InvalidInput, match="one of a100-llama"):
        read_timing(str(tmp_path / "none.json"))
    with pytest.raises(InvalidInput, match="a file: Expecting"):
        parse_timing("{", "a file")


@pytest.mark.parametrize("name", preset_names())
def test_presets_follow_from_the_figures_that_they_name(name: str):
    timing = read_timing(name)
    hardware, model, times = timing.about["hardware"], timing.about["model"], timing.times
    assert timing.kind is TimingKind.ROOFLINE
    assert hardware["source"].startswith("https://")
    assert model["source"].startswith("https://")
    gpus = hardware["gpus_per_worker"]
    flops, memory = gpus * hardware["flops_bf16"], gpus * hardware["memory_bytes_per_s"]
    head = model["hidden"] // model["heads"]
    kv_bytes = 2 * 2 * model["layers"] * model["kv_heads"] * head
    assert times.kv_bytes_per_token == kv_bytes
    assert times.layers == model["layers"]
    assert times.bytes_per_s == gpus * hardware["link_bytes_per_s"]
    close = {"rel": 1e-3}
    assert times.prompt_token_s == pytest.approx(2 * model["parameters"] / flops, **close)
    assert times.sequence_s == times.prompt_token_s
    contexts = 4 * model["layers"] * model["hidden"] / flops
    assert times.prompt_context_s == pytest.approx(contexts, **close)
    assert times.decode_step_s == pytest.approx(2 * model["parameters"] / memory, **close)
    assert times.context_token_s == pytest.approx(kv_bytes / memory, **close)
