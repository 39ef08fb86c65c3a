"""The cluster as smg sees it: one engine, with the load of all its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from kvferry.membership import Role
from kvferry.model_files import read_json

if TYPE_CHECKING:
    from router.router import Router

SERVER_TYPE = "kvferry"


def model_info(router: Router) -> vllm.GetModelInfoResponse:
    """What is served. Raises `ConfigError` when the model's files are gone."""
    config: dict[str, Any] = read_json(router.model_directory / "config.json")
    name, length = router.config.model.served_name, router.card.context_length
    message = vllm.GetModelInfoResponse(
        model_path=name,
        # Not the directory, which a gateway elsewhere could not read, and no mere name, which it
        # would look up at a public hub first. What it finds nowhere it fetches from here.
        tokenizer_path=f"/{SERVER_TYPE}/{name}",
        served_model_name=name,
        is_generation=True,
        max_context_length=length,
        # An answer takes at least one token.
        max_req_input_len=length - 1,
        vocab_size=router.card.vocab_size,
        eos_token_ids=router.card.eos_token_ids,
        model_type=str(config.get("model_type", "")),
        architectures=map(str, config.get("architectures") or ()),
    )
    if isinstance(bos := config.get("bos_token_id"), int):
        message.bos_token_id = bos
    if isinstance(pad := config.get("pad_token_id"), int):
        message.pad_token_id = pad
    return message


def server_info(router: Router) -> vllm.GetServerInfoResponse:
    """How it is served."""
    config = router.config
    return vllm.GetServerInfoResponse(
        active_requests=router.requests_in_flight,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype=config.cache.dtype.value,
        block_size=config.cache.page_size,
        model_dtype=config.model.dtype.value,
        max_num_seqs=_running_max(router),
        constrained_decoding_start="first_token",
    )


def scheduler_load(router: Router) -> vllm.SchedulerLoad:
    """The load of all reachable workers together."""
    load = engine_load(router)
    return vllm.SchedulerLoad(
        num_running_reqs=load.running_requests,
        num_waiting_reqs=load.waiting_requests,
        num_total_reqs=load.running_requests + load.waiting_requests,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=load.max_total_num_tokens,
        token_usage=load.token_usage,
        max_running_requests=load.max_running_requests,
        num_waiting_uncached_tokens=load.waiting_uncached_tokens,
    )


def engine_load(router: Router) -> common_pb2.EngineLoad:
    """As `scheduler_load`. KV is that of the workers that decode: a prompt's leaves the others."""
    running = waiting = waiting_tokens = used = total = 0
    for summary in router.worker_summaries():
        status = summary.status
        if status is None or not summary.is_reachable:
            continue
        running += status.load.running
        waiting += status.load.waiting
        waiting_tokens += status.load.waiting_tokens
        if summary.info.role is not Role.PREFILL:
            used += status.accounts.total - status.accounts.free - status.accounts.evictable
            total += status.accounts.total
    return common_pb2.EngineLoad(
        running_requests=running,
        waiting_requests=waiting,
        waiting_uncached_tokens=waiting_tokens,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=used / total if total else 0.0,
        active_token_usage=used / total if total else 0.0,
        max_running_requests=_running_max(router),
    )


def _running_max(router: Router) -> int:
    deciding = [s for s in router.worker_summaries() if s.info.role is not Role.PREFILL]
    return router.config.scheduler.running_max * len(deciding)
