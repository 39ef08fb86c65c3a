"""How long things take, in seconds: what the simulator asks of a timing model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Straight lines, as steps of one worker are measured and fitted."""

    prompt_step_s: float = 0.005
    """Of a step that computes prompts, whatever else it computes."""
    prompt_token_s: float = 1.0 / 12000.0
    prompt_context_s: float = 0.0
    """Of each token of a prompt and each token before it."""
    decode_step_s: float = 0.012
    """Of a step that decodes."""
    sequence_s: float = 0.0001
    """Of each answer in it."""
    context_token_s: float = 1.5e-8
    """Of each token that answers read."""
    transfer_s: float = 0.001
    """Of a transfer, however small."""
    bytes_per_s: float = 12e9
    """Of a link."""
    kv_bytes_per_token: int = 131_072
    layers: int = 32
    request_s: float = 0.002
    """At the front door: what a request costs before it can be placed..."""
    tokenize_token_s: float = 0.0
    """...and each token of its prompt."""
    hop_s: float = 0.0005
    """A message from one process to another."""
    prompt_beside: float = 0.0
    """How much longer prompts take for each other worker of the host that computes: a share..."""
    decode_beside: float = 0.0
    """...and answers."""

    def beside(self, others: int) -> StepTimes:
        """Steps of a worker beside so many others of its host."""
        prompts, decodes = 1.0 + others * self.prompt_beside, 1.0 + others * self.decode_beside
        return dataclasses.replace(
            self,
            prompt_step_s=prompts * self.prompt_step_s,
            prompt_token_s=prompts * self.prompt_token_s,
            prompt_context_s=prompts * self.prompt_context_s,
            decode_step_s=decodes * self.decode_step_s,
            sequence_s=decodes * self.sequence_s,
            context_token_s=decodes * self.context_token_s,
        )

    def prompts_s(self, tokens: int, token_contexts: float) -> float:
        """The part of a step that its prompts take; `token_contexts` is the sum, over their tokens,
        of the tokens before each."""
        linear = self.prompt_step_s + self.prompt_token_s * tokens
        return linear + self.prompt_context_s * token_contexts

    def decode_s(self, sequences: int, context_tokens: int) -> float:
        """The part of a step that `sequences` answers take, which read `context_tokens`."""
        linear = self.decode_step_s + self.sequence_s * sequences
        return linear + self.context_token_s * context_tokens

    def decodes_s(self, steps: int, sequences: int, context_tokens: int) -> float:
        """So many steps of the same answers; each reads one token more of each of them."""
        grown = sequences * steps * (steps - 1) / 2
        alone = self.decode_s(sequences, context_tokens)
        return steps * alone + self.context_token_s * grown

    def steps_within(self, seconds: float, sequences: int, context_tokens: int) -> int:
        """How many such steps have ended after `seconds`."""
        alone = self.decode_s(sequences, context_tokens)
        more = self.context_token_s * sequences
        # seconds = steps * alone + more * steps * (steps - 1) / 2, solved for steps.
        if more <= 0.0:
            steps = int(seconds / alone)
        else:
            half = alone - more / 2.0
            steps = int(2.0 * seconds / (half + (half * half + 2.0 * more * seconds) ** 0.5))
        # Rounding: the number is exact by the same sum that said when steps end.
        while self.decodes_s(steps + 1, sequences, context_tokens) <= seconds:
            steps += 1
        while steps and self.decodes_s(steps, sequences, context_tokens) > seconds:
            steps -= 1
        return steps

    def transfer_bytes_s(self, tokens: int) -> float:
        """What a link takes for the KV of so many tokens, without its latency."""
        return tokens * self.kv_bytes_per_token / self.bytes_per_s
