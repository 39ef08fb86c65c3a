"""A cluster as an operator protects it: TLS, client certificates and keys, and its command line."""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import CallFailed, Client
from cluster.client_security import ClientSecurity
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.certificates import Authority
from tests.support.local_cluster import local_cluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.certificates import Identity
    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

OPERATOR, BLUE, RED = "the-operators-key-01", "the-key-of-blue-0001", "the-key-of-red-00001"
UNKNOWN = "the-key-of-nobody-01"
MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Protected:
    """A running cluster, and what its clients have."""

    running: RunningCluster
    ca: Path
    client: Identity
    stranger: Identity
    keys: Path

    def security(self, key: str, shown: Identity | None) -> ClientSecurity:
        certificate = None if shown is None else shown.certificate
        return ClientSecurity(self.ca, certificate, None if shown is None else shown.key, key)

    def ask(self, security: ClientSecurity, **fields: Any) -> str:
        """One answer over gRPC."""
        greedy = inference.SamplingParams(max_tokens=4, temperature=0.0)
        request = inference.GenerateRequest(text="hello", sampling=greedy, **fields)
        with Client(self.running.address, security=security) as client:
            return "".join(response.text for response in client.generate(request))

    def openai(self, key: str, shown: Identity | None) -> openai.OpenAI:
        context = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
        client = openai.DefaultHttpxClient(verify=context)
        return openai.OpenAI(
            base_url=self.running.openai_url, api_key=key, max_retries=0, http_client=client
        )

    def kvferry(self, *arguments: str, key: str, tls: bool = True) -> tuple[int, str, str]:
        """The command line."""
        shown = ("--tls-ca", self.ca, "--tls-certificate", self.client.certificate)
        flags = (*shown, "--tls-key", self.client.key) if tls else ()
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "cluster.cli", *arguments),
                *("--address", self.running.address, *map(str, flags)),
            ],
            env=os.environ | {"KVFERRY_API_KEY": key},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    directory = tmp_path_factory.mktemp("security")
    ours, clients = Authority(directory, "ca"), Authority(directory, "clients")
    server, keys = ours.identity("server"), directory / "keys"
    keys.write_text(f"admin: {OPERATOR}\nblue: {BLUE}\n")
    stranger = Authority(directory, "strangers").identity("stranger")
    with local_cluster(
        router__security__tls_certificate=server.certificate,
        router__security__tls_key=server.key,
        router__security__tls_client_ca=clients.file,
        router__security__api_keys=keys,
    ) as running:
        yield Protected(running, ours.file, clients.identity("client"), stranger, keys)
        logs = running.all_logs()
        assert "worker serves" in logs
        for key in (OPERATOR, BLUE, RED, UNKNOWN):
            assert key not in logs


def test_grpc(protected: Protected) -> None:
    client = protected.client
    assert protected.ask(protected.security(BLUE, client))
    assert protected.ask(protected.security(BLUE, client), tenant="blue")
    for key in ("", UNKNOWN):
        with pytest.raises(CallFailed, match="UNAUTHENTICATED"):
            protected.ask(protected.security(key, client))
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT: tenant: is 'red'"):
        protected.ask(protected.security(BLUE, client), tenant="red")
    for shown in (None, protected.stranger):
        with pytest.raises(CallFailed, match="no kvferry cluster answers"):
            protected.ask(protected.security(BLUE, shown))
    with pytest.raises(CallFailed, match="no kvferry cluster answers"):
        protected.ask(ClientSecurity(api_key=BLUE))


def test_openai(protected: Protected) -> None:
    question: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    question |= {"max_tokens": 4, "temperature": 0}
    with protected.openai(BLUE, protected.client) as client:
        answer = client.chat.completions.create(**question)
        assert answer.choices[0].message.content
        stream = client.chat.completions.create(**question, stream=True)
        texts = [event.choices[0].delta.content or "" for event in stream]
        assert "".join(texts) == answer.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="x-kvferry-tenant: is 'red'"):
            client.chat.completions.create(**question, extra_headers={"x-kvferry-tenant": "red"})
    with protected.openai(UNKNOWN, protected.client) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.chat.completions.create(**question)
        assert UNKNOWN not in str(caught.value)
    for shown in (None, protected.stranger):
        with protected.openai(BLUE, shown) as client, pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(**question)
    host, port = protected.running.openai_url.removeprefix("https://").split("/")[0].split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=30)) as clear:
        clear.request("GET", "/v1/models", headers={"x-api-key": BLUE})
        with pytest.raises((http.client.HTTPException, OSError)):
            clear.getresponse()


def test_a_new_key_works_and_an_old_one_does_not_without_a_restart(protected: Protected) -> None:
    def is_known(key: str) -> bool:
        try:
            return bool(protected.ask(protected.security(key, protected.client)))
        except CallFailed as error:
            if "UNAUTHENTICATED" not in str(error):
                raise
            return False

    before = protected.keys.read_text()
    protected.keys.write_text(f"admin: {OPERATOR}\nred: {RED}\n")
    try:
        wait_until("the new key", lambda: is_known(RED))
        assert not is_known(BLUE)
    finally:
        protected.keys.write_text(before)
    wait_until("the old key", lambda: is_known(BLUE))


def test_the_command_line(protected: Protected) -> None:
    code, said, _ = protected.kvferry("status", key=OPERATOR)
    assert (code, "decode-0" in said) == (0, True)
    code, said, problem = protected.kvferry("generate", "--max-tokens", "4", "hello", key=BLUE)
    assert (code, problem) == (0, "")
    assert said.strip()
    code, _, problem = protected.kvferry("audit", key=OPERATOR)
    assert (code, problem) == (0, "")
    for arguments in (("status",), ("remove-worker", "decode-0")):
        code, _, problem = protected.kvferry(*arguments, key=BLUE)
        assert (code, "PERMISSION_DENIED" in problem) == (1, True)
    code, _, problem = protected.kvferry("status", key="")
    assert (code, "UNAUTHENTICATED: show an API key" in problem) == (1, True)
    code, _, problem = protected.kvferry("status", key=OPERATOR, tls=False)
    assert (code, "give the files of its TLS" in problem) == (1, True)


def test_health_is_open_to_who_has_a_certificate(protected: Protected) -> None:
    client = protected.client
    credentials = grpc.ssl_channel_credentials(
        protected.ca.read_bytes(), client.key_bytes(), client.certificate_bytes()
    )
    with grpc.secure_channel(protected.running.address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        told = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert told.status == health_pb2.HealthCheckResponse.SERVING
