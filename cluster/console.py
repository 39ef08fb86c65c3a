"""The commands that talk to a running cluster: generate, chat, status, audit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cluster.status_json import status_json
from cluster.tables import (
    ACCOUNTS_LEGEND,
    accounts_table,
    audit_table,
    counters_table,
    format_bytes,
    host_accounts_table,
    workers_table,
)
from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from typing import TextIO

    from cluster.client import Client

_USER = "user"
_ASSISTANT = "assistant"
_END_OF_CHAT = ("/quit", "/exit")


class AuditFailed(Exception):
    """Some worker's ledger is wrong, or could not be looked at. The message is for the user."""


def generate(
    client: Client,
    prompt: str,
    request: inference.GenerateRequest,
    *,
    raw: bool,
    show_usage: bool,
) -> None:
    """Print the answer to one prompt as it comes, or several when all are there.

    `request` has everything but the prompt.
    """
    if raw:
        request.text = prompt
    else:
        request.chat.messages.add(role=_USER, content=prompt)
    if request.sampling.n > 1:
        usage = print_samples(client, request, sys.stdout)
    else:
        _, usage = stream_answer(client, request, sys.stdout)
    if show_usage:
        print(describe_usage(usage), file=sys.stderr)  # noqa: T201


def chat(client: Client, request: inference.GenerateRequest, source: TextIO) -> None:
    """Ask for a line, stream the answer, and so on; each turn sends the whole conversation.

    `request` has everything but the conversation.
    """
    history = request.chat
    print("Empty line or Ctrl-D ends the chat.", file=sys.stderr)  # noqa: T201
    while True:
        print("> ", end="", flush=True, file=sys.stderr)  # noqa: T201
        line = source.readline().strip()
        if not line or line in _END_OF_CHAT:
            return
        history.messages.add(role=_USER, content=line)
        answer, _ = stream_answer(client, request, sys.stdout)
        history.messages.add(role=_ASSISTANT, content=answer)


def status(client: Client, *, show_counters: bool = False, as_json: bool = False) -> str:
    """Who serves and the accounts of each worker, and what each counted if asked to."""
    info, answer = client.model_info(), client.cluster_status()
    if as_json:
        return status_json(info, answer)
    text = (
        f"{info.model} ({info.dtype}), context {info.context_length}, page size {info.page_size}; "
        f"membership version {answer.membership_version}, "
        f"{answer.requests_in_flight} requests in flight\n\n"
        f"{workers_table(answer)}\n\nKV slots by owner, a slot holds one token\n"
        f"{accounts_table(answer)}\n{ACCOUNTS_LEGEND}"
    )
    if any(worker.HasField("host_accounts") for worker in answer.workers):
        text += f"\n\nSlots of the host tiers by owner\n{host_accounts_table(answer)}"
    if show_counters:
        text += f"\n\nCounted since each worker started\n{counters_table(answer)}"
    return text


def audit(client: Client, worker_id: str) -> None:
    """Print what the ledger checks of one worker, or of all (""), found.

    Raises `AuditFailed` unless every worker asked was checked and none has a violation.
    """
    answer = client.audit(worker_id)
    print(audit_table(answer))  # noqa: T201
    for entry in answer.audits:
        for line in (*entry.report.violations, *filter(None, [entry.failure])):
            print(f"{entry.worker_id}: {line}")  # noqa: T201
    wrong = [entry.worker_id for entry in answer.audits if entry.report.violations]
    unseen = [entry.worker_id for entry in answer.audits if not entry.HasField("report")]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("violations in", wrong), ("could not be checked", unseen))
        if names
    ]
    if problems or not answer.audits:
        raise AuditFailed("; ".join(problems) or "the cluster has no workers")


def stream_answer(
    client: Client, request: inference.GenerateRequest, sink: TextIO
) -> tuple[str, inference.Usage]:
    """Write the text of an answer as it comes; return all of it, and what it cost."""
    parts: list[str] = []
    usage = inference.Usage()
    for response in client.generate(request):
        parts.append(response.text)
        sink.write(response.text)
        sink.flush()
        if response.HasField("finish"):
            usage = response.finish.usage
    sink.write("\n")
    return "".join(parts), usage


def print_samples(
    client: Client, request: inference.GenerateRequest, sink: TextIO
) -> inference.Usage:
    """Write all answers, each below a line with its number; return what they cost together."""
    texts = [""] * request.sampling.n
    usage = inference.Usage()
    for response in client.generate(request):
        texts[response.index] += response.text
        if response.finish.HasField("usage"):
            usage = response.finish.usage
    for number, text in enumerate(texts):
        sink.write(f"--- {number} ---\n{text}\n")
    return usage


def describe_usage(usage: inference.Usage) -> str:
    """One line."""
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.prefill_hit_tokens} hit at prefill, "
        f"{usage.host_hit_tokens} loaded back, {usage.decode_hit_tokens} hit at decode), "
        f"{usage.completion_tokens} generated, "
        f"{usage.moved_tokens} tokens moved ({format_bytes(usage.moved_bytes)}), "
        f"handoff {usage.handoff_ms:.1f} ms, TTFT {usage.ttft_ms:.0f} ms, "
        f"ITL {usage.itl_ms:.1f} ms"
    )
