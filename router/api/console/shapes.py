"""What the console's API answers, as JSON has it. Times are in seconds of the router's clock."""

from __future__ import annotations

from typing import TypedDict


class LoadOut(TypedDict):
    """As `kvferry.accounts.WorkerLoad`."""

    running: int
    waiting: int
    waiting_tokens: int
    handoffs: int
    prefill_tokens_per_s: float
    link_bytes_per_s: float


class AccountsOut(TypedDict):
    """As `kvferry.accounts.KvAccounts`; the first six add up to `total`."""

    free: int
    evictable: int
    protected: int
    private: int
    inbound: int
    loading: int
    total: int
    outbound_pinned: int
    rows_live: int
    rows_total: int


class HostAccountsOut(TypedDict):
    """As `kvferry.accounts.HostAccounts`; the first five add up to `total`."""

    free: int
    evictable: int
    protected: int
    writing: int
    loading: int
    total: int


class WorkerOut(TypedDict):
    """One worker of the membership."""

    id: str
    role: str
    incarnation: str
    """Hexadecimal: JSON's numbers do not hold 63 bits everywhere."""
    address: str
    pid: int | None
    reachable: bool
    draining: bool
    indexed_blocks: int
    events_known: bool
    """Whether the router knows what it holds."""
    load: LoadOut | None
    """None, like the accounts, before its first answer."""
    accounts: AccountsOut | None
    host_accounts: HostAccountsOut | None


class QueueOut(TypedDict):
    """One class of service."""

    waiting: int
    running: int
    refused: int


class AdmissionOut(TypedDict):
    """Who waits for a place and who has one."""

    places: int
    places_taken: int
    queues: dict[str, QueueOut]


class RoleOut(TypedDict):
    """All workers of one role together."""

    workers: int
    reachable: int
    running: int
    waiting: int
    slots_held: int
    """Neither free nor evictable."""
    slots_total: int


class ClusterOut(TypedDict):
    """The cluster as the router knows it now."""

    now_s: float
    model: str
    membership_version: int
    ready: bool
    in_flight: int
    admission: AdmissionOut
    roles: dict[str, RoleOut]
    workers: list[WorkerOut]
    """By id, at most `CONSOLE_WORKERS_MAX`: those in trouble, then those with most to do."""
    workers_left_out: int


class NodeOut(TypedDict):
    """As `kvferry.tree_view.NodeView`; ids are texts, JSON's numbers do not hold 64 bits."""

    id: str
    parent: str
    start: int
    length: int
    locks: int
    hits: int
    access: int
    children: int
    device: bool
    host: bool
    priority: int
    namespace: str
    tokens: list[int]
    text: str | None
    """Of these tokens; None unless it was asked for."""


class TreeOut(TypedDict):
    """As `kvferry.tree_view.TreeView`."""

    worker: str
    path: list[str]
    path_tokens: int
    evictable: int
    protected: int
    whole: bool
    duration_ms: float
    nodes: list[NodeOut]


class HandoffOut(TypedDict):
    """One handoff, by whichever of its sides told of it."""

    key: str
    request_id: str
    attempt: int
    source: str
    """A worker's id, or the incarnation of one that is not known."""
    sink: str
    state: str
    """The sink's; the source's where the sink knows it no longer."""
    source_state: str | None
    sink_state: str | None
    age_s: float
    prompt_tokens: int
    computed_tokens: int
    moved_bytes: int
    total_bytes: int
    """0 until the sink has room."""


class HandoffsOut(TypedDict):
    """All that are not closed, oldest first."""

    handoffs: list[HandoffOut]
    workers_asked: int
    workers_silent: list[str]


class HistoryOut(TypedDict):
    """Samples, each a list of values in the order of `fields`."""

    first: int
    """Number of the first of them."""
    interval_s: float
    fields: list[str]
    points: list[list[float | int | None]]


class EventOut(TypedDict):
    """Something that happened to a worker."""

    number: int
    at_s: float
    worker: str
    kind: str
    """good, plain or trouble."""
    text: str


class GoneOut(TypedDict):
    """A worker that left a short while ago."""

    id: str
    role: str
    left_at_s: float


class LiveOut(ClusterOut):
    """What the page asks for every second."""

    history: HistoryOut
    events: list[EventOut]
    gone: list[GoneOut]


class PhaseOut(TypedDict):
    """A stretch of a request, in seconds since its arrival."""

    name: str
    """As in `router.timeline`."""
    kind: str
    """queue, prefill, transfer or decode."""
    place: str
    attempt: str
    """Its number; empty outside of one."""
    start_s: float
    end_s: float


class RequestOut(TypedDict):
    """One request, in flight or ended."""

    id: str
    tenant: str
    service_class: str
    arrived_at_s: float
    duration_s: float
    outcome: str
    error: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    moved_bytes: int
    attempts: int
    prefill_worker: str | None
    decode_worker: str | None
    ttft_s: float | None
    itl_s: float | None
    phases: list[PhaseOut]


class RequestsOut(TypedDict):
    """Those in flight first, then the ended ones, the latest first."""

    now_s: float
    requests: list[RequestOut]
