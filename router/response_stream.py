"""Tokens of a worker to what the client sees: text, stop strings, figures. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.generation import AttemptUsage, FinishReason
from kvferry.ids import Attempt
from router.request import Finish, ResponseChunk, Usage
from router.sample_text import SampleText
from router.stop_strings import StopScan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.clock import Clock
    from kvferry.generation import OutputToken
    from router.attempts import RoutedOutput
    from router.detokenizer import Detokenizer
    from router.policy import Route
    from router.request import ValidRequest


class ResponseStream:
    """One client's stream, of all samples. It outlives attempts: what was shown stays shown."""

    def __init__(
        self,
        request: ValidRequest,
        new_detokenizer: Callable[[], Detokenizer],
        *,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        arrived_at: float,
    ) -> None:
        self._request = request
        self._samples = [
            SampleText(request.sampling, new_detokenizer(), eos_token_ids)
            for _ in range(request.sampling.n)
        ]
        self._samples_left = len(self._samples)
        self._clock = clock
        self._arrived_at = arrived_at
        self._route: Route | None = None
        self._attempt = Attempt(1)
        self._kv = AttemptUsage()

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return self._samples_left == 0

    def take(self, routed: RoutedOutput) -> ResponseChunk:
        """What the client gets for one output. It is the sample's last if it has `finish`.

        A stop string finishes a sample although the worker goes on with it: nothing is shown of
        what comes after. When all have ended, the caller ends the rest.
        """
        if routed.attempt != self._attempt:
            self._kv = AttemptUsage()
        self._route, self._attempt = routed.route, routed.attempt
        output = routed.output
        known = output.usage if output.finish is None else output.finish.usage
        if known is not None:
            self._kv = known
        sample = self._samples[output.sample]
        if sample.is_done:
            return ResponseChunk(self._request.request_id, "", (), index=output.sample)
        count, scan = sample.push(output.tokens, self._clock.now())
        reason = FinishReason.STOP
        if scan.stop is None and output.finish is not None:
            rest = sample.flush()
            scan = StopScan(scan.text + rest.text, rest.stop)
            reason = reason if rest.stop is not None else output.finish.reason
        is_last = scan.stop is not None or output.finish is not None
        return self._chunk(output.sample, scan, output.tokens[:count], reason if is_last else None)

    def cancelled(self) -> list[ResponseChunk]:
        """The last chunks of a request that its client ended, one for each unfinished sample."""
        chunks = []
        for index, sample in enumerate(self._samples):
            if not sample.is_done:
                scan = sample.flush()
                reason = FinishReason.CANCELLED if scan.stop is None else FinishReason.STOP
                chunks.append(self._chunk(index, scan, (), reason))
        return chunks

    def _chunk(
        self,
        index: int,
        scan: StopScan,
        tokens: Sequence[OutputToken],
        reason: FinishReason | None,
    ) -> ResponseChunk:
        finish = None
        if reason is not None:
            self._samples[index].is_done = True
            self._samples_left -= 1
            usage = self._usage() if self.is_done else None
            finish = Finish(reason, usage, scan.stop or "")
        return ResponseChunk(self._request.request_id, scan.text, tuple(tokens), finish, index)

    def _usage(self) -> Usage:
        route = self._route
        source = None if route is None or route.prefill is None else route.prefill.worker_id
        return Usage(
            prompt_tokens=int(self._request.prompt.size),
            completion_tokens=sum(sample.tokens for sample in self._samples),
            attempt=self._attempt,
            decode_worker=None if route is None else route.decode.worker_id,
            prefill_worker=source,
            kv=self._kv,
            ttft_ms=self._ttft_ms(),
            itl_ms=self._itl_ms(),
        )

    def _ttft_ms(self) -> float:
        firsts = [sample.first_at for sample in self._samples if sample.first_at is not None]
        return 1000.0 * (min(firsts) - self._arrived_at) if firsts else 0.0

    def _itl_ms(self) -> float:
        gaps = sum(max(0, sample.tokens - 1) for sample in self._samples)
        return 1000.0 * sum(sample.span_s for sample in self._samples) / gaps if gaps else 0.0
