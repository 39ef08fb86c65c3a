"""Going on with an answer that broke off, by asking for it again and leaving out what is known.

An answer is a function of its request, once that has a seed: another router's answer begins with
the very tokens that came before. Each is compared; one that differs ends the answer with an error.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from collections.abc import Iterator


class AnswerChanged(Exception):
    """The answer that was asked for again is another one."""


@dataclass(slots=True)
class _Sample:
    """What has come of one sample, and how far the present answer has come in it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: int = 0
    has_ended: bool = False
    tokens_again: int = 0
    characters_again: int = 0
    logprobs_again: int = 0


class Replay:
    """One answer, from however many routers. Every response passes through `fresh`."""

    def __init__(self, samples: int) -> None:
        self._expected = samples
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)
        self._last: inference.GenerateResponse | None = None
        """Of the sample that ended last, held back until it has the usage of all of them."""
        self.progress = 0
        """Responses that brought something."""

    def begin_again(self) -> None:
        """The next responses are from the beginning."""
        for sample in self._samples.values():
            sample.tokens_again = sample.characters_again = sample.logprobs_again = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is to come."""
        ended = sum(sample.has_ended for sample in self._samples.values())
        return ended == self._expected and self._last is None

    def rest(self) -> Iterator[inference.GenerateResponse]:
        """What was held back, when an answer has come to its end."""
        if self._last is not None:
            yield self._last

    def fresh(self, response: inference.GenerateResponse) -> Iterator[inference.GenerateResponse]:
        """What this response brings that was not there before. Raises `AnswerChanged`."""
        sample = self._samples[response.index]
        new = inference.GenerateResponse(
            request_id=response.request_id,
            index=response.index,
            token_ids=_new_tokens(sample, response),
            text=_new_text(sample, response),
            logprobs=_new_logprobs(sample, response),
        )
        finish = response.finish if response.HasField("finish") else None
        if finish is not None and not sample.has_ended:
            sample.has_ended = True
            new.finish.CopyFrom(finish)
        elif finish is not None and self._last is not None and finish.HasField("usage"):
            # Samples may end in another order than before; the usage comes with the last of them.
            new, self._last = self._last, None
            new.finish.usage.CopyFrom(finish.usage)
        if self._lacks_usage(new):
            self._last = new
        elif new.token_ids or new.text or new.logprobs or new.HasField("finish"):
            self.progress += 1
            yield new

    def _lacks_usage(self, new: inference.GenerateResponse) -> bool:
        if not new.HasField("finish") or new.finish.HasField("usage"):
            return False
        return sum(sample.has_ended for sample in self._samples.values()) == self._expected


def _new_tokens(sample: _Sample, response: inference.GenerateResponse) -> list[int]:
    known = sample.token_ids[sample.tokens_again :][: len(response.token_ids)]
    if list(response.token_ids[: len(known)]) != known:
        raise AnswerChanged(f"token {sample.tokens_again} and those after it")
    new = list(response.token_ids[len(known) :])
    sample.token_ids += new
    sample.tokens_again += len(response.token_ids)
    return new


def _new_text(sample: _Sample, response: inference.GenerateResponse) -> str:
    known = sample.text[sample.characters_again :][: len(response.text)]
    if not response.text.startswith(known):
        raise AnswerChanged(f"character {sample.characters_again} and those after it")
    new = response.text[len(known) :]
    sample.text += new
    sample.characters_again += len(response.text)
    return new


def _new_logprobs(
    sample: _Sample, response: inference.GenerateResponse
) -> list[inference.TokenLogprobs]:
    """One per token: those of known tokens are known."""
    known = min(sample.logprobs - sample.logprobs_again, len(response.logprobs))
    new = list(response.logprobs[known:])
    sample.logprobs += len(new)
    sample.logprobs_again += len(response.logprobs)
    return new
