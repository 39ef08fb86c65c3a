"""Calls of `kvferry.rpc.v1.Admin` that change who is in the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidInput
from kvferry.limits import DRAIN_S, DRAIN_S_MAX
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2
from kvferry.rpc_errors import status_of_errors
from router.api.message_parsing import parse_message

if TYPE_CHECKING:
    from router.cluster_control import ClusterControl

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
            drain_s = message.drain_s if message.HasField("drain_s") else DRAIN_S
            if not 0 <= drain_s <= DRAIN_S_MAX:
                raise InvalidInput("drain_s", f"is {drain_s:g}; must be 0 to {DRAIN_S_MAX:g}")
            answer.drained = await self._control.remove_worker(message.worker_id, drain_s)
        return answer


def _role(name: str) -> Role:
    role = _ROLES.get(name)
    if role is None:
        raise InvalidInput("role", f"is {name[:32]!r}; must be one of {', '.join(_ROLES)}")
    return role
