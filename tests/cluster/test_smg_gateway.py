"""The gateway `smg`, as it is on PyPI, in front of a cluster, in an environment of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.client import CallFailed, Client
from kvferry.convert import accounts_from_wire
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.certificates import Authority
from tests.support.local_cluster import local_cluster
from tests.support.ports import free_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

ROOT = Path(__file__).parents[2]
SMG = ROOT / ".venv-smg" / "bin" / "smg"
MODEL = "SmolLM2-135M-Instruct"
HELLO = [{"role": "user", "content": "Name three rivers."}]


class Gateway:
    """A running `smg`, spoken to as OpenAI's clients do."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        with self._connection() as connection:
            response = self._send(connection, path, body)
            return response.status, json.loads(response.read())

    def chat(self, **body: Any) -> dict[str, Any]:
        given = {"model": MODEL, "messages": HELLO, "temperature": 0} | body
        status, answer = self.post("/v1/chat/completions", **given)
        assert status == 200, answer
        return answer

    @contextlib.contextmanager
    def stream(self, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Events as they come; leaving closes the connection."""
        given = {"model": MODEL, "messages": HELLO, "temperature": 0, "stream": True} | body
        with self._connection() as connection:
            response = self._send(connection, "/v1/chat/completions", given)
            assert response.status == 200
            yield _events(response)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            yield connection
        finally:
            connection.close()

    @staticmethod
    def _send(connection: http.client.HTTPConnection, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection.getresponse()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            yield json.loads(data)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with local_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def gateway(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(cluster.address, tmp_path_factory.mktemp("smg") / "log") as made:
        yield made


@contextlib.contextmanager
def running_gateway(engine: str, log: Path) -> Iterator[Gateway]:
    """In front of the engine at this address."""
    subprocess.run(["make", "smg-setup"], cwd=ROOT, check=True, timeout=900)
    port, metrics_port = free_port(), free_port()
    command = [
        *(str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"grpc://{engine}", "--backend", "vllm"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    made = Gateway(port)
    try:
        wait_until(
            "a gateway with a tokenizer",
            lambda: _answers(made),
            120,
            state=lambda: log.read_text(errors="replace")[-4000:],
        )
        yield made
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(gateway: Gateway) -> bool:
    with contextlib.suppress(OSError):
        question = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
        return gateway.post("/v1/chat/completions", **question)[0] == 200
    return False


@pytest.fixture(scope="module")
def direct(cluster: RunningCluster) -> str:
    """What the cluster answers to whom asks it without the gateway."""
    request = inference.GenerateRequest(
        chat={"messages": HELLO},
        sampling=inference.SamplingParams(max_tokens=12, temperature=0.0),
    )
    with Client(cluster.address) as client:
        return "".join(response.text for response in client.generate(request))


def wait_idle(cluster: RunningCluster) -> None:
    def idle(status: inference.ClusterStatusResponse) -> bool:
        accounts = (accounts_from_wire(worker.accounts) for worker in status.workers)
        return status.requests_in_flight == 0 and all(each.is_idle for each in accounts)

    cluster.wait_for_status(idle)


def test_a_conversation(cluster: RunningCluster, gateway: Gateway, direct: str) -> None:
    answer = gateway.chat(max_tokens=12, logprobs=True, top_logprobs=2)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == direct
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 12
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    wait_idle(cluster)


def test_a_stream_with_usage(cluster: RunningCluster, gateway: Gateway, direct: str) -> None:
    whole = gateway.chat(max_tokens=12, n=2)
    with gateway.stream(max_tokens=12, n=2, stream_options={"include_usage": True}) as events:
        told = list(events)
    texts = {0: "", 1: ""}
    for choice in (choice for event in told for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: direct, 1: direct}
    usage = told[-1]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    # Whole pages of a prompt that was computed before, its last token aside.
    expected = (usage["prompt_tokens"] - 1) // 16 * 16
    assert usage["prompt_tokens_details"]["cached_tokens"] == expected
    wait_idle(cluster)


def test_a_stop_string(cluster: RunningCluster, gateway: Gateway) -> None:
    question = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0}
    status, answer = gateway.post("/v1/completions", **question, max_tokens=12, stop=["."])
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert "." not in choice["text"]
    wait_idle(cluster)


def test_an_answer_under_a_schema(cluster: RunningCluster, gateway: Gateway) -> None:
    schema = {
        "type": "object",
        "properties": {"river": {"enum": ["Rhine", "Nile"]}},
        "required": ["river"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "river", "schema": schema}}
    answer = gateway.chat(max_tokens=40, response_format=wanted)
    (choice,) = answer["choices"]
    assert json.loads(choice["message"]["content"])["river"] in ("Rhine", "Nile")
    assert choice["finish_reason"] == "stop"
    wait_idle(cluster)


def test_a_client_that_leaves_frees_everything(cluster: RunningCluster, gateway: Gateway) -> None:
    with gateway.stream(max_tokens=2000, ignore_eos=True) as events:
        for event in events:
            if event["choices"][0]["delta"].get("content"):
                break
        assert cluster.status().requests_in_flight == 1
    wait_idle(cluster)


def test_a_refusal_is_the_clients_fault(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": 5000 * "many words "}]
    status, answer = gateway.post(
        "/v1/chat/completions", model=MODEL, messages=messages, max_tokens=4
    )
    assert status == 400, answer
    assert "context" in json.dumps(answer["error"])


def test_a_protected_cluster_behind_a_gateway_that_shows_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    server, keys, port = authority.identity("server"), tmp_path / "keys", free_port()
    keys.write_text("admin: the-operators-key-01\n")
    with local_cluster(
        router__security__tls_certificate=server.certificate,
        router__security__tls_key=server.key,
        router__security__tls_client_ca=authority.file,
        router__security__api_keys=keys,
        router__smg__port=port,
    ) as running:
        # Its front door keeps out who shows nothing.
        with Client(running.address) as client, pytest.raises(CallFailed):
            client.model_info()
        with running_gateway(f"127.0.0.1:{port}", tmp_path / "log") as gateway:
            answer = gateway.chat(max_tokens=6)
            assert answer["usage"]["completion_tokens"] == 6
            with gateway.stream(max_tokens=6) as events:
                told = [choice["delta"] for event in events for choice in event["choices"]]
            text = "".join(delta.get("content") or "" for delta in told)
            assert text == answer["choices"][0]["message"]["content"]
