"""Ranks as threads of one process: each has its part of the weights and its own pool of KV.

The thread that calls `RankGroup` is rank 0, the engine thread in a worker; it alone owns the KV's
accounts. The others follow: they wait for a batch without spinning, compute their part of it, and
write the K/V of their heads to the slots that rank 0 was given. Ranks meet in all-reduces only. So
when rank 0 has a step's result every rank has written, and the next step may begin.

A rank that raises lets go of its connections, which wakes whoever waits for it at once.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from engine.tensor_parallel import Shard, SoleRank
from kvferry.errors import InternalError
from kvferry.limits import RANK_TIMEOUT_S, STOP_TIMEOUT_S, WORKER_START_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine.forward_batch import ForwardBatch
    from engine.tensor_parallel import Collective

_log = logging.getLogger(__name__)

_Gloo: Any = ProcessGroupGloo
"""Torch's stubs lack what is used here."""


class RankModel(Protocol):
    """One rank's part of a model, over its pool."""

    def forward(self, batch: ForwardBatch, on_layers: Callable[[int], None] | None) -> torch.Tensor:
        """As `ModelRunner.forward`. For rank 0."""
        ...

    def follow(self, batch: ForwardBatch) -> None:
        """The same without logits. For the others."""
        ...


class GlooCollective:
    """Implements `Collective` between threads of this process, over its loopback interface."""

    def __init__(self, shard: Shard, store: HashStore) -> None:
        self._shard = shard
        self._store = store
        self._group: Any = None

    @property
    def shard(self) -> Shard:
        """See `Collective.shard`."""
        return self._shard

    def connect(self) -> None:
        """Blocks until every rank does so."""
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=RANK_TIMEOUT_S)
        # One thread per rank beside its own: more of them only wake one another.
        options._threads = 1
        self._group = _Gloo(self._store, self._shard.rank, self._shard.ranks, options)

    def all_reduce(self, summand: torch.Tensor) -> None:
        """See `Collective.all_reduce`."""
        group = self._group
        if group is None:
            raise RuntimeError(f"rank {self._shard.rank} has left")
        group.allreduce([summand]).wait()

    def close(self) -> None:
        """Leave: pending and later calls of the other ranks fail."""
        self._group = None


class RankGroup:
    """All ranks of a worker. Used by one thread, which is rank 0."""

    def __init__(self, ranks: int, build: Callable[[Collective], RankModel]) -> None:
        """`build` makes a rank's part of the model, on that rank's thread."""
        self._collective: GlooCollective | None = None
        self._failures: list[str] = []
        self._followers: list[_Follower] = []
        if ranks == 1:
            self._model = build(SoleRank())
            return
        store = HashStore()
        first, *others = (GlooCollective(Shard(rank, ranks), store) for rank in range(ranks))
        self._collective = first
        self._followers = [_Follower(other, build, self._failures) for other in others]
        try:
            self._model = build(first)
            for follower in self._followers:
                follower.wait_built()
            self._check()
            for follower in self._followers:
                follower.connect()
            first.connect()
        except BaseException:
            self.close()
            raise

    def forward(self, batch: ForwardBatch, on_layers: Callable[[int], None] | None) -> torch.Tensor:
        """Compute a step on all ranks. Raises `InternalError` naming a rank that has failed."""
        self._check()
        for follower in self._followers:
            follower.begin(batch)
        try:
            return self._model.forward(batch, on_layers)
        except RuntimeError as error:
            # Whoever failed has said so before it let go of the others.
            self._check(error)
            raise

    def close(self) -> None:
        """End the other ranks, whatever they do. Raises `InternalError` if one does not end."""
        if self._collective is not None:
            self._collective.close()
        for follower in self._followers:
            follower.stop()
        for follower in self._followers:
            follower.join()

    def _check(self, cause: Exception | None = None) -> None:
        if self._failures:
            # The first one is the reason of the others.
            raise InternalError(self._failures[0]) from cause


class _Follower:
    """A rank other than 0, and its thread."""

    def __init__(
        self,
        collective: GlooCollective,
        build: Callable[[Collective], RankModel],
        failures: list[str],
    ) -> None:
        self._collective = collective
        self._build = build
        self._failures = failures
        self._inbox: SimpleQueue[Callable[[RankModel], None] | None] = SimpleQueue()
        self._built = threading.Event()
        self._rank = collective.shard.rank
        self._thread = threading.Thread(target=self._run, name=f"rank-{self._rank}", daemon=True)
        self._thread.start()

    def wait_built(self) -> None:
        """Until its model is loaded, or it has failed."""
        if not self._built.wait(WORKER_START_TIMEOUT_S):
            raise InternalError(f"rank {self._rank} not loaded in {WORKER_START_TIMEOUT_S:g} s")

    def connect(self) -> None:
        """Meet the others next."""
        self._inbox.put(lambda model: self._collective.connect())

    def begin(self, batch: ForwardBatch) -> None:
        """Compute this next."""
        self._inbox.put(lambda model: model.follow(batch))

    def stop(self) -> None:
        """End after the present step."""
        self._inbox.put(None)

    def join(self) -> None:
        """Until the thread has ended."""
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(f"rank {self._rank} still in a step after {STOP_TIMEOUT_S:g} s")

    def _run(self) -> None:
        try:
            model = self._build(self._collective)
            self._built.set()
            while (task := self._inbox.get()) is not None:
                task(model)
        except Exception as error:  # noqa: BLE001  # outermost frame: ends the group with the reason
            _log.info("rank ends", extra={"rank": self._rank, "reason": repr(error)})
            self._failures.append(f"rank {self._rank} failed: {error!r}")
        finally:
            self._built.set()
            # After the reason is known: this wakes the others.
            self._collective.close()
