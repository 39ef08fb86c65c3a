"""`kvferry bench run` against a cluster in processes of its own: a trace, by both doors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.record import read_record
from cluster.client import Client
from tests.support.local_cluster import local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TRACE = Path(__file__).parents[1] / "data" / "mooncake" / "conversation_30_rows.jsonl"
SCALE = 0.25
TIMEOUT_S = 500.0


def replayed(out: Path, *flags: str):
    """The record of a replay of all 30 rows, shortened to a quarter."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "cluster.cli", "bench", "run"),
            *("--dataset", "trace", "--path", str(TRACE), "--scale-tokens", str(SCALE)),
            *("--load", "replay", "--time-scale", "0.02", "--clients", "2", "--json"),
            *("--targets", "ttft=5s,itl=500ms", "--out", str(out), *flags),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    record = read_record(out)
    assert json.loads(done.stdout) == json.loads(json.dumps(record.summary))
    print(out.stem, done.stdout, record.about.warnings)  # noqa: T201
    return record


def test_a_trace_is_replayed_over_both_doors(tmp_path):
    rows = [json.loads(line) for line in TRACE.read_text(encoding="utf-8").splitlines()]
    with local_cluster() as running:
        vocab = str(running_vocab(running.address))
        grpc = replayed(tmp_path / "grpc.json", "--address", running.address)
        http = replayed(tmp_path / "http.json", "--http", running.openai_url, "--vocab-size", vocab)
    for record in (grpc, http):
        assert record.summary["requests"]["done"] == 30
        assert record.requests.prompt_tokens.tolist() == [
            round(SCALE * row["input_length"]) for row in rows
        ]
        assert record.requests.answer_tokens.tolist() == [
            max(1, round(SCALE * row["output_length"])) for row in rows
        ]
        assert (record.requests.late_s >= 0).all()
        assert (record.requests.first_token_s <= record.requests.end_s).all()
    assert {"prefill", "decode"} <= {worker["role"] for worker in grpc.about.config["workers"]}
    # Only what the decode worker lacks moves, so never more than the prompts.
    moved, prompts = grpc.requests.moved_tokens, grpc.requests.prompt_tokens
    assert moved.sum() > 0
    assert (moved <= prompts).all()
    assert (grpc.requests.moved_bytes[moved > 0] > 0).all()
    assert all(name is not None for name in grpc.requests.decode_worker)
    # The second run asks the same prompts: nearly all of each is cached by then.
    assert http.summary["hit_rate"] > 0.9 > grpc.summary["hit_rate"]
    assert np.isnan(http.requests.moved_bytes).all(), "OpenAI's API does not tell it"


def running_vocab(address: str) -> int:
    with Client(address) as client:
        return int(client.model_info().vocab_size)
