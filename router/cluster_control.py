"""What the operator of a cluster may order, as the router passes it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvferry.membership import Role


class ClusterControl(Protocol):
    """Who keeps the members of the cluster running. Every method raises `WorkerUnavailable` while
    there is nobody."""

    async def add_worker(self, role: Role) -> str:
        """Start one more worker of this role. Returns its name at once; it serves when it is in the
        membership. Raises `InvalidInput`."""
        ...

    async def set_role(self, worker_id: str, role: Role) -> None:
        """Use a worker in this role from now on. Raises `UnknownWorker` and `InvalidInput`."""
        ...

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        """Give a worker nothing new, and end it when it has nothing left to do, or after `drain_s`.

        Returns whether it had nothing left. Raises `UnknownWorker` and `InvalidInput`.
        """
        ...
