"""An answer of the router in the words of smg's vLLM engine protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from kvferry.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.generation import OutputToken
    from router.request import ResponseChunk, Usage

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class SmgAnswer:
    """Turns one request's chunks into messages.

    A streamed answer sends tokens as they come, in `chunk`, and an end without tokens for each
    sample; an answer that is not streamed sends all tokens in that end. Ends wait for the last
    of them, because only then is known what the prompt has cost.
    """

    def __init__(self, *, is_streamed: bool, stop_token_ids: Sequence[int]) -> None:
        self._is_streamed = is_streamed
        self._stop_token_ids = frozenset(stop_token_ids)
        self._samples: dict[int, _Sample] = {}
        self._ended: list[vllm.GenerateComplete] = []

    def take(self, chunk: ResponseChunk) -> list[vllm.GenerateResponse]:
        """What the gateway gets for one chunk."""
        messages = []
        sample = self._samples.setdefault(chunk.index, _Sample())
        sample.count += len(chunk.tokens)
        sample.last_tokens = chunk.tokens or sample.last_tokens
        if not self._is_streamed:
            sample.kept += chunk.tokens
        elif chunk.tokens:
            messages.append(vllm.GenerateResponse(chunk=_chunk(chunk)))
        if chunk.finish is not None:
            self._ended.append(self._end(chunk, sample))
            if chunk.finish.usage is not None:
                messages += self._ends(chunk.finish.usage)
        return messages

    def _end(self, chunk: ResponseChunk, sample: _Sample) -> vllm.GenerateComplete:
        finish = chunk.finish
        assert finish is not None, "asked for the end of a sample that has one"
        message = vllm.GenerateComplete(
            output_ids=[token.token_id for token in sample.kept],
            output_logprobs=_logprobs(sample.kept),
            finish_reason=_FINISH_REASONS[finish.reason],
            completion_tokens=sample.count,
            index=chunk.index,
        )
        if finish.stop_string:
            message.matched_stop_str = finish.stop_string
        elif finish.reason is FinishReason.STOP and sample.last_tokens:
            last = sample.last_tokens[-1].token_id
            if last in self._stop_token_ids:
                message.matched_token_id = last
        return message

    def _ends(self, usage: Usage) -> list[vllm.GenerateResponse]:
        for end in self._ended:
            end.prompt_tokens = usage.prompt_tokens
            end.cached_tokens = usage.cached_tokens
        return [vllm.GenerateResponse(complete=end) for end in self._ended]


class _Sample:
    """What one sample has said so far."""

    def __init__(self) -> None:
        self.count = 0
        self.last_tokens: tuple[OutputToken, ...] = ()
        self.kept: list[OutputToken] = []


def _chunk(chunk: ResponseChunk) -> vllm.GenerateStreamChunk:
    """Counts here are of the new tokens alone: the gateway adds them up."""
    return vllm.GenerateStreamChunk(
        token_ids=[token.token_id for token in chunk.tokens],
        completion_tokens=len(chunk.tokens),
        output_logprobs=_logprobs(chunk.tokens),
        index=chunk.index,
    )


def _logprobs(tokens: Sequence[OutputToken]) -> vllm.OutputLogProbs | None:
    """None unless they were asked for."""
    known = [token.logprobs for token in tokens if token.logprobs is not None]
    if not known:
        return None
    message = vllm.OutputLogProbs(
        token_logprobs=[each.logprob for each in known],
        token_ids=[each.token_id for each in known],
    )
    if any(each.top for each in known):
        message.top_logprobs.extend(
            vllm.TopLogProbs(
                values=[logprob for _, logprob in each.top],
                token_ids=[token_id for token_id, _ in each.top],
            )
            for each in known
        )
    return message
