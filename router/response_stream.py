"""Tokens of a worker to what the client sees: text, stop strings, figures. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.generation import AttemptUsage, FinishReason
from kvferry.ids import Attempt
from router.request import Finish, ResponseChunk, Usage
from router.stop_strings import StopScan, StopStringScanner

if TYPE_CHECKING:
    from kvferry.clock import Clock
    from kvferry.generation import OutputToken
    from router.attempts import RoutedOutput
    from router.detokenizer import Detokenizer
    from router.policy import Route
    from router.request import ValidRequest


@dataclass(slots=True, eq=False)
class _Timing:
    arrived_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None

    def note(self, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def ttft_ms(self) -> float:
        if self.first_token_at is None:
            return 0.0
        return 1000.0 * (self.first_token_at - self.arrived_at)

    def itl_ms(self, tokens: int) -> float:
        if self.first_token_at is None or self.last_token_at is None or tokens < 2:
            return 0.0
        return 1000.0 * (self.last_token_at - self.first_token_at) / (tokens - 1)


class ResponseStream:
    """One client's stream. It outlives attempts: what was shown stays shown."""

    def __init__(
        self,
        request: ValidRequest,
        detokenizer: Detokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        arrived_at: float,
    ) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._scanner = StopStringScanner(request.sampling.stop)
        self._silent_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._silent_ids |= frozenset(eos_token_ids)
        self._clock = clock
        self._timing = _Timing(arrived_at)
        self._completion_tokens = 0
        self._route: Route | None = None
        self._attempt = Attempt(1)
        self._kv = AttemptUsage()

    def take(self, routed: RoutedOutput) -> ResponseChunk:
        """What the client gets for one output. It is the last if it has `finish`.

        A stop string finishes the stream although the worker goes on; the caller ends that.
        """
        if routed.attempt != self._attempt:
            self._kv = AttemptUsage()
        self._route, self._attempt = routed.route, routed.attempt
        output = routed.output
        known = output.usage if output.finish is None else output.finish.usage
        if known is not None:
            self._kv = known
        if output.tokens:
            self._timing.note(self._clock.now())
        text = ""
        for position, token in enumerate(output.tokens):
            self._completion_tokens += 1
            scan = self._scan(self._text_of(token))
            text += scan.text
            if scan.stop is not None:
                seen = output.tokens[: position + 1]
                return self._chunk(text, seen, self._finish(FinishReason.STOP, scan.stop))
        if output.finish is None:
            return self._chunk(text, output.tokens, None)
        return self._last_chunk(text, output.tokens, output.finish.reason)

    def cancelled(self) -> ResponseChunk:
        """The last chunk of a request that its client ended."""
        return self._last_chunk("", (), FinishReason.CANCELLED)

    def _text_of(self, token: OutputToken) -> str:
        """The token that ends an answer is told as an id but has no text."""
        if token.token_id in self._silent_ids:
            return ""
        return self._detokenizer.push(token.token_id)

    def _scan(self, text: str) -> StopScan:
        if self._completion_tokens <= self._request.sampling.min_tokens:
            return StopScan(text)
        return self._scanner.push(text)

    def _last_chunk(
        self, text: str, tokens: tuple[OutputToken, ...], reason: FinishReason
    ) -> ResponseChunk:
        """Show what was held back as well; it may still complete a stop string."""
        scan = self._scan(self._detokenizer.flush())
        text += scan.text
        if scan.stop is not None:
            return self._chunk(text, tokens, self._finish(FinishReason.STOP, scan.stop))
        text += self._scanner.flush()
        return self._chunk(text, tokens, self._finish(reason, ""))

    def _chunk(
        self, text: str, tokens: tuple[OutputToken, ...], finish: Finish | None
    ) -> ResponseChunk:
        return ResponseChunk(self._request.request_id, text, tokens, finish)

    def _finish(self, reason: FinishReason, stop_string: str) -> Finish:
        route = self._route
        source = None if route is None or route.prefill is None else route.prefill.worker_id
        usage = Usage(
            prompt_tokens=int(self._request.prompt.size),
            completion_tokens=self._completion_tokens,
            attempt=self._attempt,
            decode_worker=None if route is None else route.decode.worker_id,
            prefill_worker=source,
            kv=self._kv,
            ttft_ms=self._timing.ttft_ms(),
            itl_ms=self._timing.itl_ms(self._completion_tokens),
        )
        return Finish(reason, usage, stop_string)
