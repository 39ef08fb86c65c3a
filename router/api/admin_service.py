"""`kvferry.rpc.v1.Admin`: what operators call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from kvferry.ids import WorkerId
from kvferry.planner_config import PlannerMode
from kvferry.rpc.v1 import inference_pb2
from kvferry.rpc_errors import status_of_errors
from router.api.cluster_orders import ClusterOrders
from router.api.message_parsing import parse_message
from router.api.messages import audit_to_wire, summary_to_wire
from router.api.request_traces import RequestTraces

if TYPE_CHECKING:
    from router.cluster_control import ClusterControl
    from router.plan_source import PlanSource
    from router.router import Router

ADMIN_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminService:
    """Shows what this router knows of the cluster, has workers check their ledgers, and passes on
    who shall be in the cluster."""

    def __init__(
        self,
        router: Router,
        control: ClusterControl | None = None,
        planner: PlanSource | None = None,
    ) -> None:
        """Without `control` nobody can be added or removed: such calls are UNIMPLEMENTED. Without
        `planner` nobody plans."""
        self._router = router
        self._planner = planner
        self._control = control
        self._traces = RequestTraces(router.log, router.clock)

    def handler(self) -> Any:
        """To be registered at a server."""
        methods: dict[str, tuple[Any, Any]] = {
            "ClusterStatus": (self.cluster_status, inference_pb2.ClusterStatusResponse),
            "Audit": (self.audit, inference_pb2.AuditResponse),
            "Traces": (self._traces.traces, inference_pb2.TracesResponse),
            "Plans": (self.plans, inference_pb2.PlansResponse),
        }
        if self._control is not None:
            orders = ClusterOrders(self._control)
            methods |= {
                "AddWorker": (orders.add_worker, inference_pb2.AddWorkerResponse),
                "SetRole": (orders.set_role, inference_pb2.SetRoleResponse),
                "RemoveWorker": (orders.remove_worker, inference_pb2.RemoveWorkerResponse),
                "Scale": (orders.scale, inference_pb2.ScaleResponse),
                "Apply": (orders.apply, inference_pb2.RolloutStatus),
                "Restart": (orders.restart, inference_pb2.RolloutStatus),
                "Rollout": (orders.rollout, inference_pb2.RolloutStatus),
            }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                method, response_serializer=answer.SerializeToString
            )
            for name, (method, answer) in methods.items()
        }
        return grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers)

    async def cluster_status(
        self, data: bytes, context: Any
    ) -> inference_pb2.ClusterStatusResponse:
        """Every worker of the membership, by id."""
        async with status_of_errors(context):
            parse_message(inference_pb2.ClusterStatusRequest, data)
        summaries = sorted(self._router.worker_summaries(), key=lambda each: each.info.worker_id)
        return inference_pb2.ClusterStatusResponse(
            membership_version=self._router.fleet.membership_version,
            workers=[summary_to_wire(summary) for summary in summaries],
            requests_in_flight=self._router.requests_in_flight,
        )

    async def plans(self, data: bytes, context: Any) -> inference_pb2.PlansResponse:
        """What was planned lately; that nobody plans is an answer, too."""
        async with status_of_errors(context):
            message = parse_message(inference_pb2.PlansRequest, data)
        if self._planner is None:
            return inference_pb2.PlansResponse(mode=PlannerMode.OFF.value)
        return self._planner.plans(message.count)

    async def audit(self, data: bytes, context: Any) -> inference_pb2.AuditResponse:
        """The outcome of every ledger check, or why there is none, by worker id."""
        answer = inference_pb2.AuditResponse()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.AuditRequest, data)
            asked = WorkerId(message.worker_id) if message.worker_id else None
            outcomes = await self._router.fleet.audit(asked)
            answer.audits.extend(audit_to_wire(*entry) for entry in outcomes.items())
        return answer
