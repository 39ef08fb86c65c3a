"""An engine over the digest model and a small KV, driven step by step by a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.engine import Engine
from engine.request import Request, Stage
from kvferry.cache_key import CacheUse
from kvferry.clock import ManualClock
from kvferry.config import CacheConfig, HostTierConfig, SchedulerConfig
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache
from tests.support.digest_model import EOS, DigestRunner, digest_layout
from tests.support.manual_copier import ManualCopier

if TYPE_CHECKING:
    from engine.speculation import Drafts
    from kvferry.errors import KvferryError
    from kvferry.generation import FinishReason, OutputToken
    from kvferry.grammar import GrammarCompiler


@dataclass(eq=False)
class Recorder:
    """A `RequestListener` that remembers what it was told, by `name_of` request or sample."""

    told: dict[str, list[int]] = field(default_factory=dict)
    computed_lens: dict[str, list[int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    ends: dict[str, FinishReason | KvferryError] = field(default_factory=dict)
    engine: Engine | None = None
    """Ends what its constraint gave up."""

    def admitted(self, request: Request) -> None:
        assert request.id.request_id not in self.hits, "admitted twice"
        self.hits[request.id.request_id] = request.kv.prefix_len

    def computing(self, request: Request, tokens: int, layers: int) -> None:
        """Of no interest: the digest model has one layer."""

    def computed(self, request: Request) -> None:
        self.computed_lens.setdefault(name_of(request), []).append(request.kv.committed_len)

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        for sample, token in enumerate(tokens, request.sample):
            name = name_of(request, sample)
            assert name not in self.ends, "a token after the end"
            self.told.setdefault(name, []).append(token.token_id)

    def finished(self, request: Request, reason: FinishReason) -> None:
        assert name_of(request) not in self.ends, "a second end"
        self.ends[name_of(request)] = reason

    def gave_up(self, request: Request, error: KvferryError) -> None:
        assert name_of(request) not in self.ends, "a second end"
        self.ends[name_of(request)] = error
        assert self.engine is not None, "nobody to end it"
        for sample in request.samples:
            if sample.stage is not Stage.ENDED:
                self.engine.end(sample)


def name_of(request: Request, sample: int | None = None) -> str:
    """`r` for sample 0 of request `r`, `r/1` for the next."""
    number = request.sample if sample is None else sample
    return f"{request.id.request_id}/{number}" if number else request.id.request_id


class EngineBench:
    """Engine, KV and recorder, with short names for what tests do."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_slots: int = 256,
        rows: int = 8,
        radix: bool = True,
        context_length: int | None = None,
        scheduler: SchedulerConfig | None = None,
        auditing: bool = True,
        host: HostTierConfig | None = None,
        window: int | None = None,
        compiler: GrammarCompiler | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        layout = digest_layout(page_size)
        cache = CacheConfig(
            page_size=page_size,
            rows=rows,
            radix=radix,
            audit=auditing,
            host=host or HostTierConfig(),
        )
        self.copier = ManualCopier()
        self.kv_cache = assemble_kv_cache(
            layout,
            cache,
            num_slots,
            context_length or num_slots,
            new_copier=lambda: self.copier,
            window=window,
        )
        self.runner = DigestRunner(self.kv_cache.pool, page_size, window)
        self.engine = Engine(
            self.kv_cache,
            self.runner,
            scheduler or SchedulerConfig(),
            ManualClock(),
            compiler,
            drafts,
        )
        self.recorder = Recorder(engine=self.engine)

    def request(self, name: str, prompt: list[int], **options: object) -> Request:
        """A greedy request that ignores the end-of-text token unless told otherwise."""
        prefill_only = bool(options.pop("prefill_only", False))
        sampling = SamplingParams(
            **{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | options
        )
        return Request(
            id=AttemptId(RequestId(name), Attempt(1)),
            prompt=np.asarray(prompt, dtype=np.int32),
            sampling=sampling,
            cache_use=CacheUse(ExtraKey("")),
            eos_token_ids=(EOS,),
            listener=self.recorder,
            prefill_only=prefill_only,
        )

    def submit(self, name: str, prompt: list[int], **options: object) -> Request:
        request = self.request(name, prompt, **options)
        self.engine.submit(request)
        return request

    def reserve(self, name: str, prompt: list[int], **options: object) -> Request:
        """A request with row and slots for KV that another worker sends."""
        request = self.request(name, prompt, **options)
        self.engine.submit_inbound(request)
        assert self.engine.next_expected() is request
        assert self.engine.reserve_inbound(request)
        return request

    def run(self, steps_max: int = 500) -> None:
        """Step until there is nothing to compute. Copies between tiers end when nothing else is
        left to do."""
        for _ in range(steps_max):
            if self.engine.step():
                continue
            if not self.copier.pending:
                return
            self.copier.run_all()
        raise AssertionError(f"still busy after {steps_max} steps")

    def assert_idle(self) -> None:
        self.kv_cache.audit()
        assert self.kv_cache.accounts().is_idle, self.kv_cache.oom_report()
