"""One attempt of a request as the router states it and a worker answers it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvferry.attempt_marks import AttemptMarks, PromptMarks
    from kvferry.cache_key import CacheUse
    from kvferry.ids import AttemptId, Incarnation, TokenIds, WorkerId
    from kvferry.sampling import SamplingParams


class FinishReason(Enum):
    """Why a stream of tokens ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PrefillSource:
    """The worker that computes a prompt for another one."""

    worker_id: WorkerId
    address: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """What a client already has of one sample."""

    token_ids: tuple[int, ...] = ()
    is_done: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AttemptRequest:
    """What a worker is asked to generate. Validated at the router."""

    id: AttemptId
    prompt: TokenIds
    """[prompt_tokens], int32, at least one."""
    sampling: SamplingParams
    cache_use: CacheUse
    source: PrefillSource | None
    """None: the receiving worker computes the prompt itself."""
    resumed: tuple[SampleProgress, ...] = ()
    """Where each sample goes on, `sampling.n` of them; empty: from the beginning."""
    goes_first: bool = False
    """Its prompt is computed before those of others that the worker has."""

    @property
    def samples_left(self) -> int:
        """Samples that this attempt is to bring to their ends."""
        if not self.resumed:
            return self.sampling.n
        return sum(not sample.is_done for sample in self.resumed)


class TokenLogprobs(NamedTuple):
    """Log probability of a chosen token, and of the most likely ones, best first. A tuple, as
    `OutputToken` is."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class OutputToken(NamedTuple):
    """One generated token. `logprobs` is None unless asked for.

    A tuple, like `AttemptOutput`: a frozen dataclass takes longer to make (1.2 times with two
    fields, 2.5 times with four), and there is one per token.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class AttemptUsage:
    """Where the KV of a prompt came from. All zero for what did not happen."""

    prefill_hit_tokens: int = 0
    """Found in device memory by the worker that computed the prompt."""
    decode_hit_tokens: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    handoff_ms: float = 0.0
    """From the first token's arrival to the commit of the last chunk: what decoding waited for.
    Chunks that travelled while the prompt was computed cost nobody anything."""
    host_hit_tokens: int = 0
    """Loaded back from a lower tier by the worker that computed the prompt; no part of the hits
    in device memory."""
    source_marks: PromptMarks | None = None
    """How a source spent its time on the prompt. Goes to routers with the other marks."""


@dataclass(frozen=True, slots=True)
class AttemptFinish:
    """The one end of a sample that succeeded; an attempt that failed ends in an error."""

    reason: FinishReason
    usage: AttemptUsage


class AttemptOutput(NamedTuple):
    """Tokens of one sample since its last output, and its end if this is its last.

    The attempt ends with the last of its `sampling.n` samples.
    """

    tokens: tuple[OutputToken, ...]
    finish: AttemptFinish | None = None
    usage: AttemptUsage | None = None
    """Set once, as soon as it is known: a router that ends an attempt gets no `finish`."""
    sample: int = 0
    """Which of the samples the tokens and the end belong to."""
    marks: AttemptMarks | None = None
    """Of the attempt so far, beside its usage and at its end; the last ones count."""
