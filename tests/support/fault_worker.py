"""A worker of a fault test: the product's worker in a process of its own, held where told.

The process is forked from a server that has imported everything, so that one that was killed is
back in a fraction of a second. It may live in a network namespace of its own (`fault_wire`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import grpc

from cluster.worker_process import WorkerProcess
from kv_transfer.trace import HandoffTrace
from kvferry.config import config_from_mapping
from kvferry.convert import accounts_from_wire, audit_report_from_wire
from kvferry.ids import WorkerId
from kvferry.membership import Role
from kvferry.rpc.v1 import worker_pb2, worker_pb2_grpc
from kvferry.telemetry import configure_logging
from tests.support import fault_wire
from tests.support.fault_model import FaultRunner, fault_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from kv_transfer.protocol.key import HandoffKey
    from kvferry.accounts import KvAccounts
    from kvferry.membership import WorkerInfo

HOLD_MAX_S = 3.0
"""An engine that nobody releases goes on by itself."""

_PR_SET_PDEATHSIG = 1
_RPC_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker's process is started with."""

    config: Mapping[str, Any]
    worker_id: str
    role: str
    log_file: str
    fake_model: bool = True
    address: str = ""
    """Its own address in a namespace of its own; "": the machine's loopback."""


@dataclass(frozen=True, slots=True)
class Held:
    """An engine thread stands at a state until it is released."""

    side: str
    state: str
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Hold:
    """Stand when a handoff enters this state on this side, once."""

    side: str
    state: str


@dataclass(frozen=True, slots=True)
class Pass:
    """Do not stand there."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `Worker.Status` and `Worker.Audit` say."""

    accounts: KvAccounts
    handoffs: int
    violations: tuple[str, ...]
    counters: Mapping[str, int]

    @property
    def is_idle(self) -> bool:
        return self.accounts.is_idle and self.handoffs == 0


class _HoldingTrace(HandoffTrace):
    """The product's trace, which also stands still where it is told."""

    control: Connection
    holds: ClassVar[set[Hold]] = set()
    released: ClassVar[threading.Event] = threading.Event()
    standing: ClassVar[Hold | None] = None

    def __call__(self, side, key, state) -> None:
        super().__call__(side, key, state)
        hold = Hold(side, state)
        if hold in self.holds:
            self.holds.discard(hold)
            self.released.clear()
            type(self).standing = hold
            self.control.send(Held(side, state, key))
            self.released.wait(HOLD_MAX_S)
            type(self).standing = None


def run_worker(plan: WorkerPlan, control: Connection) -> None:
    """The main function of the process; ends with the other end of `control`."""
    _end_with_parent()
    _log_to(plan.log_file, plan.worker_id)
    if plan.address:
        fault_wire.enter_namespace(plan.address, control)
    _HoldingTrace.control = control
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch("cluster.worker_process.HandoffTrace", _HoldingTrace))
        if plan.fake_model:
            patches.enter_context(patch("cluster.worker_process.load_spec", fault_spec))
            patches.enter_context(patch("cluster.worker_process.ModelRunner", FaultRunner))
        worker = WorkerProcess(
            config_from_mapping(plan.config), WorkerId(plan.worker_id), Role(plan.role)
        )
        info = worker.start()
    control.send(info)
    with contextlib.suppress(EOFError, OSError):
        _serve(control, info)
    worker.stop()


def _serve(control: Connection, info: WorkerInfo) -> None:
    while True:
        match control.recv():
            case Hold() as hold:
                _HoldingTrace.holds.add(hold)
            case Pass(hold):
                _HoldingTrace.holds.discard(hold)
                # Its word that it stands may have crossed ours that it shall not.
                if _HoldingTrace.standing == hold:
                    _HoldingTrace.released.set()
            case "release":
                _HoldingTrace.released.set()
            case "inspect":
                control.send(_inspect(info))
            case "stop":
                return


def _inspect(info: WorkerInfo) -> Inspection | str:
    """From this process: a worker that is cut off can still be asked."""
    try:
        with grpc.insecure_channel(info.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            audit = stub.Audit(worker_pb2.WorkerAuditRequest(), timeout=_RPC_S)
            status = stub.Status(worker_pb2.WorkerStatusRequest(), timeout=_RPC_S)
    except grpc.RpcError as error:
        return f"{info.worker_id}: {error.code().name}: {error.details()}"
    return Inspection(
        accounts=accounts_from_wire(status.accounts),
        handoffs=status.load.handoffs,
        violations=tuple(audit_report_from_wire(audit.report).violations),
        counters=dict(status.counters),
    )


def _end_with_parent() -> None:
    """A test that is killed leaves no worker behind, not even a stopped one: the server of forks
    ends with the test, unless a child holds its pipe, and takes its children along."""
    os.close(forkserver._forkserver._forkserver_alive_fd)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _log_to(file: str, worker_id: str) -> None:
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, sys.stderr.fileno())
    configure_logging(worker_id)
