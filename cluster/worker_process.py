"""Everything inside one worker's process, put together. Knows no Ray.

Threads: the event loop (all gRPC), the engine thread (all KV), one per lane of a link, and one per
tensor-parallel rank beyond the first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

import grpc

from cluster.core_binding import bind_process
from cluster.handoff_hosts import WorkerSink, WorkerSource
from cluster.members import group_of
from cluster.shutdown import run_every_step
from cluster.worker_service import WorkerService
from decode_worker.attempt_stream import Outbox
from decode_worker.intake import Intake
from decode_worker.return_source import ReturnSource
from engine.auditor import Auditor
from engine.cuda_device import require_cuda
from engine.cuda_model_runner import build_cuda_runner
from engine.engine import Engine
from engine.garbage import GarbageCollections
from engine.kv_event_feed import KvEventFeed
from engine.lora_weights import NO_ADAPTERS, load_adapters
from engine.model_directory import resolve_model
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.sampler import Sampler
from engine.sampling_stages import SamplingStages
from engine.speculation import drafts_of
from engine.step_loop import StepLoop
from engine.tree_viewer import TreeViewer
from kv_transfer.driver import HandoffDriver
from kv_transfer.session import SESSION_SERVER_OPTIONS
from kv_transfer.trace import HandoffTrace
from kvferry.addresses import LOOPBACK, host_to_bind
from kvferry.clock import MonotonicClock
from kvferry.config import DeviceKind
from kvferry.cores import cores_in
from kvferry.errors import ConfigError, WorkerUnavailable
from kvferry.grammar import GrammarCompiler
from kvferry.ids import Incarnation, WorkerId, new_incarnation
from kvferry.limits import ENGINE_TURN_MAX_S, STOP_TIMEOUT_S
from kvferry.membership import Role, WorkerInfo
from kvferry.rpc.v1 import handoff_pb2_grpc, worker_pb2_grpc
from kvferry.weights_identity import model_identity
from mem_cache.element_codec import torch_dtype
from mem_cache.factory import build_kv_cache
from mem_cache.layout import kv_dtype
from prefill_worker.prompt_source import PromptSource
from prefill_worker.return_sink import ReturnSink

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path
    from typing import Any

    from engine.step_loop import EngineSnapshot
    from engine.step_runner import StepRunner
    from kvferry.config import ClusterConfig, WorkerGroupConfig
    from mem_cache.kv_cache import KVCache

_log = logging.getLogger(__name__)


class WorkerProcess:
    """One worker: model, KV, engine, both sides of the handoff, gRPC server."""

    def __init__(
        self,
        config: ClusterConfig,
        worker_id: WorkerId,
        role: Role,
        node_address: str = LOOPBACK,
    ) -> None:
        self._config = config
        self._host = host_to_bind(config.worker_host, node_address)
        self._worker_id = worker_id
        self._role = role
        self._incarnation: Incarnation = new_incarnation()
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(
            target=self._loop.run_forever, name="grpc-loop", daemon=True
        )
        self._step_loop: StepLoop | None = None
        self._kv_cache: KVCache | None = None
        self._runner: StepRunner | None = None
        self._adapters = NO_ADAPTERS
        self._sampler = Sampler()
        self._compiler: GrammarCompiler | None = None
        self._serves = False
        self._driver: HandoffDriver | None = None
        self._trace: HandoffTrace | None = None
        self._server: grpc.aio.Server | None = None

    def start(self) -> WorkerInfo:
        """Load the model, start the threads and serve. Blocks for seconds."""
        self._bind()
        self._loop_thread.start()
        step_loop, driver, parts = self._build()
        info: WorkerInfo = self._await(self._serve(step_loop, driver))
        step_loop.start(parts)
        self._serves = True
        _log.info("worker serves", extra={"worker_id": info.worker_id, "address": info.address})
        return info

    def stop(self) -> None:
        """End all threads; streams in flight end with an error.

        Every part is ended even if another one cannot be; the first error is raised.
        """
        run_every_step(
            self._stop_engine,
            self._stop_ranks,
            self._stop_compiler,
            self._close_kv,
            self._close_links,
            self._stop_server,
            self._stop_event_loop,
            self._close_trace,
        )

    def is_alive(self) -> bool:
        """Whether the engine thread serves: it has neither ended nor does it hang."""
        step_loop = self._step_loop
        return (
            step_loop is not None
            and step_loop.is_alive()
            and step_loop.seconds_since_turn() <= ENGINE_TURN_MAX_S
        )

    def snapshot(self) -> EngineSnapshot:
        """Load, KV accounts and counters after the engine's last turn."""
        if self._step_loop is None:
            raise WorkerUnavailable("worker is starting")
        return self._step_loop.snapshot

    def _build(self) -> tuple[StepLoop, HandoffDriver, list[Any]]:
        config = self._config
        directory = resolve_model(config.model.path)
        spec = load_spec(directory)
        context_length = min(config.model.context_length, spec.context_length)
        dtype = kv_dtype(config.cache.dtype, config.model.dtype)
        ranks = self._group().tensor_parallel
        of_rank = spec.of_rank(ranks, f"workers.{self._role.value}.tensor_parallel")
        layout = of_rank.kv_layout(dtype, config.cache.page_size, config.cache.arrangement)
        # KV in files outlives this process, and other workers' KV may be another model's.
        model = model_identity(directory, config.model)
        cache_config = config.cache.with_files_in(f"{self._worker_id}-{model}")
        window = window_of_kv(spec.sliding_window, config)
        device = config.model.device
        if device is DeviceKind.CUDA:
            require_cuda()
        kv_cache = build_kv_cache(
            layout, cache_config, context_length, device.value, window=window, ranks=ranks
        )
        self._runner = runner = self._load(directory, kv_cache)
        runner.warm_up()
        clock = MonotonicClock()
        compiler = GrammarCompiler(directory, spec.vocab_size, spec.eos_token_ids)
        drafts = drafts_of(config.speculation.ngram)
        engine = Engine(kv_cache, runner, config.scheduler, clock, compiler, drafts)
        engine.adapters, engine.sampler = self._adapters.ids, self._sampler
        if config.handoff.trace_file:
            self._trace = HandoffTrace(config.handoff.trace_file, self._worker_id, clock)
        driver = HandoffDriver(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            kv_cache=kv_cache,
            config=config.handoff,
            clock=clock,
            post=self._post,
            loop=self._loop,
            link_host=self._host,
            model=model,
            trace=self._trace,
        )
        step_loop = StepLoop(engine, driver, clock)
        policy = config.handoff.kv_return
        given = ReturnSource(engine, driver, self._incarnation, policy)
        taken = ReturnSink(engine, driver, policy)
        intake = Intake(engine, driver, self._incarnation, Outbox(self._loop), given)
        source = WorkerSource(PromptSource(engine, driver), given)
        driver.set_hosts(source, WorkerSink(intake, taken), taken)
        feed = KvEventFeed(kv_cache, self._worker_id, self._incarnation, clock)
        engine.on_accepted = feed.accepted
        self._step_loop, self._driver, self._kv_cache = step_loop, driver, kv_cache
        self._compiler = compiler
        auditor = Auditor(engine, clock, config.cache.audit_interval_steps)
        garbage = GarbageCollections(clock, lambda: not kv_cache.live_requests())
        viewer = TreeViewer(kv_cache.tree, clock)
        stages = SamplingStages(lambda: engine.scheduler.is_empty)
        return step_loop, driver, [driver, intake, feed, auditor, viewer, garbage, stages]

    def _load(self, directory: Path, kv_cache: KVCache) -> StepRunner:
        model, running_max = self._config.model, self._config.scheduler.running_max
        dtype, spec = model.dtype, load_spec(directory)
        adapters = load_adapters(model.adapters, spec, torch_dtype(dtype), model.device.value)
        self._adapters = adapters
        if model.device is DeviceKind.CUDA:
            return build_cuda_runner(directory, kv_cache.pool, dtype, running_max, adapters)
        threads = self._group().threads
        pools = kv_cache.rank_pools
        runner = ModelRunner(
            directory,
            *pools,
            threads=threads,
            dtype=dtype,
            adapters=adapters,
            quantization=self._config.model.quantization,
        )
        self._sampler = Sampler(runner.crew)
        return runner

    def _post(self, event: object) -> None:
        if self._step_loop is None:
            raise WorkerUnavailable("worker is starting")
        self._step_loop.post(event)

    async def _serve(self, step_loop: StepLoop, driver: HandoffDriver) -> WorkerInfo:
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                *SESSION_SERVER_OPTIONS,
            ]
        )
        port = server.add_insecure_port(f"{self._host}:0")
        info = WorkerInfo(
            worker_id=self._worker_id,
            role=self._role,
            incarnation=self._incarnation,
            address=f"{self._host}:{port}",
        )
        driver.announce(info.address)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(info, step_loop), server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(driver.servicer(), server)
        await server.start()
        self._server = server
        return info

    def _stop_engine(self) -> None:
        if self._step_loop is not None and self._serves:
            self._step_loop.stop()

    def _stop_ranks(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def _stop_compiler(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _close_kv(self) -> None:
        if self._kv_cache is not None:
            self._kv_cache.close()

    def _close_links(self) -> None:
        if self._driver is not None and self._serves:
            self._await(self._driver.wait_closed())

    def _stop_server(self) -> None:
        if self._server is not None:
            self._await(self._server.stop(grace=0.5))

    def _stop_event_loop(self) -> None:
        if self._loop_thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(STOP_TIMEOUT_S)
        self._loop.close()

    def _close_trace(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def _bind(self) -> None:
        # Before any thread of ours is started; those of Ray run already.
        cores = cores_in(self._group().cores)
        if cores:
            try:
                bind_process(cores)
            except ValueError as error:
                raise ConfigError(f"workers.{self._role.value}.cores", str(error)) from error

    def _group(self) -> WorkerGroupConfig:
        return group_of(self._config.workers, self._role)

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STOP_TIMEOUT_S)


def window_of_kv(sliding_window: int | None, config: ClusterConfig) -> int | None:
    """What a worker keeps of each sequence, in tokens; None: all of it.

    Handoffs and lower tiers take whole sequences, so with either the window is the attention's
    alone: right, but no slot is given up early.
    """
    hands_off = config.workers.prefill.count + config.workers.decode.count > 0
    return None if hands_off or config.cache.host.memory_bytes > 0 else sliding_window
