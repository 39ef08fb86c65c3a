"""How a supervisor begins: with a configuration, or with the record and the processes of one that
is gone.

A takeover disturbs nobody. Every process that is wanted goes on, and what routers are told first is
whole: a membership without a worker that serves would end its streams.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.cluster_record import record_from_json
from cluster.cluster_state import ClusterState
from cluster.configurations import Configurations
from cluster.launcher import MemberEnded, MemberUnreached
from cluster.member_state import Living, Settings
from cluster.members import members_of
from kvferry.limits import TAKEOVER_ANSWER_S

if TYPE_CHECKING:
    from cluster.cluster_record import ClusterRecord
    from cluster.launcher import FoundProcess, Launcher
    from cluster.rollout_plan import RolloutState
    from kvferry.clock import Clock
    from kvferry.config import ClusterConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a supervisor begins with."""

    state: ClusterState
    configs: Configurations
    starts: int
    """Of supervisors, this one among them."""
    rollout: RolloutState | None = None
    found: tuple[FoundProcess, ...] = ()
    """To be watched from now on."""
    unwanted: tuple[FoundProcess, ...] = ()
    """To be ended: nobody knows them."""


async def begin(
    record: str | None, config: ClusterConfig, launcher: Launcher, clock: Clock
) -> Beginning:
    """`config`: what a cluster begins with of which there is no record.

    Raises `RecordUnreadable`, and `WorkerUnavailable` if nobody can tell what lives.
    """
    living = await launcher.living()
    if record is None:
        state = ClusterState(members_of(config), config.restart_backoff_s, clock, config.workers)
        return Beginning(state, Configurations({0: config}, 0), 1, unwanted=tuple(living))
    return await _take_over(record_from_json(record), living, clock)


async def _take_over(record: ClusterRecord, living: list[FoundProcess], clock: Clock) -> Beginning:
    wanted = {member.spec.name for member in record.members}
    newest: dict[str, FoundProcess] = {}
    for process in sorted(living, key=lambda each: each.launch):
        if process.name in wanted:
            newest[process.name] = process
    answers = await asyncio.gather(*(_ask(process) for process in newest.values()))
    found = [process for process, answer in zip(newest.values(), answers, strict=True) if answer]
    known = [answer for answer in answers if answer is not None]
    configs = Configurations(record.configs, record.revision)
    settings = Settings(
        configs.current.workers,
        configs.current.restart_backoff_s,
        record.revision,
        record.lineage,
    )
    state = ClusterState.restored(
        record.members, record.next_numbers, known, settings, record.first_version, clock
    )
    _log.info("took over", extra={"living": len(found), "wanted": len(wanted)})
    return Beginning(
        state,
        configs,
        record.starts + 1,
        record.rollout,
        tuple(found),
        tuple(process for process in living if process not in newest.values()),
    )


async def _ask(process: FoundProcess) -> Living | None:
    """None: it is gone after all."""
    try:
        async with asyncio.timeout(TAKEOVER_ANSWER_S):
            info = await process.handle.describe()
    except MemberEnded:
        return None
    except (TimeoutError, MemberUnreached):
        # It may be busy, or cut off: watched like one that is being started, it has the time of
        # a start.
        info = None
    return Living(process.name, process.launch, info)
