"""Calls of `kvferry.rpc.v1.Admin` that change who is in the cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvferry.config import config_from_mapping
from kvferry.errors import InvalidInput
from kvferry.limits import DRAIN_S, DRAIN_S_MAX, WORKERS_MAX
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2
from kvferry.rpc_errors import status_of_errors
from router.api.message_parsing import parse_message

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig
    from router.cluster_control import ClusterControl, RolloutReport

_ROLES = {role.value: role for role in Role}


class ClusterOrders:
    """Passes on what the operator orders."""

    def __init__(self, control: ClusterControl) -> None:
        self._control = control

    async def add_worker(self, data: bytes, context: Any) -> inference_pb2.AddWorkerResponse:
        """Start one more worker."""
        answer = inference_pb2.AddWorkerResponse()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.AddWorkerRequest, data)
            answer.worker_id = await self._control.add_worker(_role(message.role))
        return answer

    async def set_role(self, data: bytes, context: Any) -> inference_pb2.SetRoleResponse:
        """Use a worker for something else."""
        async with status_of_errors(context):
            message = parse_message(inference_pb2.SetRoleRequest, data)
            await self._control.set_role(message.worker_id, _role(message.role))
        return inference_pb2.SetRoleResponse()

    async def remove_worker(self, data: bytes, context: Any) -> inference_pb2.RemoveWorkerResponse:
        """Drain a worker and end it."""
        answer = inference_pb2.RemoveWorkerResponse()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.RemoveWorkerRequest, data)
            drain_s = _drain_s(message)
            answer.drained = await self._control.remove_worker(message.worker_id, drain_s)
        return answer

    async def scale(self, data: bytes, context: Any) -> inference_pb2.ScaleResponse:
        """More or fewer workers of a role."""
        answer = inference_pb2.ScaleResponse()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.ScaleRequest, data)
            if message.count > WORKERS_MAX:
                raise InvalidInput("count", f"is {message.count}; at most {WORKERS_MAX}")
            role, drain_s = _role(message.role), _drain_s(message)
            outcome = await self._control.scale(role, message.count, drain_s)
            answer.added.extend(outcome.added)
            answer.draining.extend(outcome.draining)
        return answer

    async def apply(self, data: bytes, context: Any) -> inference_pb2.RolloutStatus:
        """Another configuration."""
        answer = inference_pb2.RolloutStatus()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.ApplyRequest, data)
            config = _config(message.config)
            report = await self._control.apply(config, _drain_s(message))
            answer.CopyFrom(rollout_to_wire(report))
        return answer

    async def restart(self, data: bytes, context: Any) -> inference_pb2.RolloutStatus:
        """New processes in the place of workers."""
        answer = inference_pb2.RolloutStatus()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.RestartRequest, data)
            names = tuple(message.worker_ids)
            report = await self._control.restart(names, _drain_s(message))
            answer.CopyFrom(rollout_to_wire(report))
        return answer

    async def rollout(self, data: bytes, context: Any) -> inference_pb2.RolloutStatus:
        """How far the last rollout is."""
        answer = inference_pb2.RolloutStatus()
        async with status_of_errors(context):
            parse_message(inference_pb2.RolloutRequest, data)
            answer.CopyFrom(rollout_to_wire(await self._control.rollout()))
        return answer


def rollout_to_wire(report: RolloutReport) -> inference_pb2.RolloutStatus:
    """As operators are told of it."""
    return inference_pb2.RolloutStatus(
        phase=report.phase,
        revision=report.revision,
        replaced=report.replaced,
        to_replace=report.to_replace,
        detail=report.detail,
        changes=report.changes,
    )


def _config(text: str) -> ClusterConfig:
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise InvalidInput("config", f"is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise InvalidInput("config", "must be a mapping of settings")
    return config_from_mapping(tree)


def _drain_s(message: Any) -> float:
    drain_s: float = message.drain_s if message.HasField("drain_s") else DRAIN_S
    if not 0 <= drain_s <= DRAIN_S_MAX:
        raise InvalidInput("drain_s", f"is {drain_s:g}; must be 0 to {DRAIN_S_MAX:g}")
    return drain_s


def _role(name: str) -> Role:
    role = _ROLES.get(name)
    if role is None:
        raise InvalidInput("role", f"is {name[:32]!r}; must be one of {', '.join(_ROLES)}")
    return role
