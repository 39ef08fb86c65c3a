"""The benchmark client `aiperf`, as it is on PyPI, against a cluster, in an environment of its own.

It counts tokens with the model's own tokenizer; its counts are compared with those of `usage`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.model_directory import resolve_model
from kvferry.config import ModelConfig
from kvferry.convert import accounts_from_wire
from router.request import ChatMessage
from router.tokenizer import load_tokenizer
from tests.support.local_cluster import local_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.rpc.v1 import inference_pb2 as inference
    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

ROOT = Path(__file__).parents[2]
AIPERF = ROOT / ".venv-aiperf" / "bin" / "aiperf"
TRACE = ROOT / "tests" / "data" / "mooncake" / "conversation_30_rows.jsonl"
MODEL = "SmolLM2-135M-Instruct"
TOKENIZER = "local/model"
TIMEOUT_S = 1200.0
FIGURES = (
    *("time_to_first_token", "inter_token_latency", "request_latency", "request_throughput"),
    *("output_token_throughput", "input_sequence_length", "output_sequence_length"),
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningCluster, str]]:
    with local_cluster() as running:
        yield running, running.openai_url.removesuffix("/v1")


def profile(url: str, directory: Path, *flags: str) -> None:
    """Run it to its end; what it reports is in `directory`."""
    subprocess.run(["make", "aiperf-setup"], cwd=ROOT, check=True, timeout=1800)
    command = [
        *(str(AIPERF), "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", TOKENIZER),
        *("--artifact-dir", str(directory), "--export-level", "records"),
        *("--ui", "none", "--no-gpu-telemetry", "--workers-max", "1", "--random-seed", "7"),
        *flags,
    ]
    home = {"HOME": str(directory), "HF_HOME": str(hub_cache(directory / "hub_home"))}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | home | offline,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def hub_cache(home: Path) -> Path:
    """What the hub's client would have kept of the model's tokenizer, as `TOKENIZER`.

    A plain directory will not do: the processes in which aiperf makes prompts know caches only.
    """
    repository = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    model = resolve_model(ModelConfig().path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, snapshot / name)
    return home


def check(directory: Path, count: int) -> list[dict[str, float]]:
    """Every request was answered, is in every figure, and cost what `usage` says. Returns what
    was measured of each."""
    report = json.loads((directory / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == count
    assert not report["error_summary"]
    for figure in FIGURES:
        assert report[figure]["avg"] > 0, figure
    scraped = json.loads((directory / "server_metrics_export.json").read_text())["summary"]
    assert scraped["endpoints_successful"] == scraped["endpoints_configured"] != []
    lines = (directory / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert not [record["error"] for record in records if record.get("error")]
    added = template_tokens()
    measured = []
    for record in records:
        found = {name: entry["value"] for name, entry in record["metrics"].items()}
        asked, said = found["usage_prompt_tokens"], found["usage_completion_tokens"]
        assert asked == found["input_sequence_length"] + added
        assert found["usage_total_tokens"] == asked + said
        # A text may be that of other tokens than the model chose, a few more or less.
        assert abs(found["output_sequence_length"] - said) <= max(2, said / 4)
        measured.append(found)
    return measured


def template_tokens() -> int:
    """What the model's format adds to a turn of the user."""
    tokenizer = load_tokenizer(resolve_model(ModelConfig().path))
    return tokenizer.encode_chat([ChatMessage("user", "word")]).size - tokenizer.encode("word").size


def wait_idle(cluster: RunningCluster) -> None:
    def idle(status: inference.ClusterStatusResponse) -> bool:
        accounts = (accounts_from_wire(worker.accounts) for worker in status.workers)
        return status.requests_in_flight == 0 and all(each.is_idle for each in accounts)

    cluster.wait_for_status(idle)


def test_chats(served: tuple[RunningCluster, str], tmp_path: Path) -> None:
    cluster, url = served
    profile(
        url,
        tmp_path,
        *("--request-count", "8", "--concurrency", "2", "--extra-inputs", "ignore_eos:true"),
        *("--isl", "40", "--isl-stddev", "10", "--osl", "12"),
    )
    for found in check(tmp_path, 8):
        assert found["usage_completion_tokens"] == 12
    wait_idle(cluster)


def test_thirty_rows_of_a_trace(served: tuple[RunningCluster, str], tmp_path: Path) -> None:
    """Prompts of one service, which all begin with the same 512 tokens."""
    cluster, url = served
    profile(
        url,
        tmp_path,
        *("--input-file", str(TRACE), "--custom-dataset-type", "mooncake_trace"),
        *("--no-fixed-schedule", "--concurrency", "2", "--request-count", "30"),
        *("--extra-inputs", "ignore_eos:true"),
    )
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    measured = check(tmp_path, 30)
    lengths = (
        ("input_sequence_length", "input_length"),
        ("usage_completion_tokens", "output_length"),
    )
    for figure, column in lengths:
        asked = sorted(row[column] for row in rows)
        assert sorted(found[figure] for found in measured) == asked
    cached = [found["usage_prompt_cache_read_tokens"] for found in measured]
    # The first two are computed at once; whoever comes later finds what they began with.
    assert sum(tokens >= 480 for tokens in cached) >= 28, cached
    wait_idle(cluster)
