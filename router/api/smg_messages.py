"""Requests in the words of smg's vLLM engine protocol to the router's types.

smg tokenizes and detokenizes by itself: prompts come as token ids, answers go back as such.
A refusal names the field as that protocol does.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from kvferry.convert import token_ids_from_wire
from kvferry.errors import InvalidInput
from kvferry.sampling import Constraint, ConstraintKind, SamplingParams
from router.request import ClientRequest, TextInput, TokenInput

if TYPE_CHECKING:
    from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

    from kvferry.trace_context import TraceContext
    from router.request import PromptInput

_UNSERVED = (
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
    "kv_transfer_params",
    "kv_transfer_params_json",
)
_ANY_OBJECT = json.dumps({"type": "object"})
_SEEDS = 2**64

_OUR_NAMES = (
    ("sampling.", "sampling_params."),
    ("token_ids", "tokenized.input_ids"),
)
"""How the router names a field, and how this protocol does; the first that begins a name counts."""


def request_from_smg(
    message: vllm.GenerateRequest,
    *,
    seed: int,
    context_length: int,
    timeout_s: float | None,
    tenant: str,
    trace: TraceContext | None = None,
) -> ClientRequest:
    """`seed` is used where the gateway set none, `context_length` where it bounds no answer,
    `trace` is the caller's span.

    Raises `InvalidInput` for what this cluster does not serve.
    """
    given = {field.name for field, _ in message.ListFields()}
    for name in _UNSERVED:
        if name in given:
            raise InvalidInput(name, "is not served; this cluster takes text and answers it whole")
    if message.data_parallel_rank != 0:
        raise InvalidInput("data_parallel_rank", f"is {message.data_parallel_rank}; must be 0")
    return ClientRequest(
        request_id=message.request_id,
        model="",
        input=_input_from_smg(message),
        sampling=_sampling_from_smg(message.sampling_params, seed, context_length),
        tenant=tenant,
        timeout_s=timeout_s,
        trace=trace,
    )


def in_words_of_smg(error: InvalidInput) -> InvalidInput:
    """The same refusal, with the field's name in this protocol."""
    for ours, theirs in _OUR_NAMES:
        if error.field.startswith(ours):
            return InvalidInput(theirs + error.field.removeprefix(ours), error.problem)
    return error


def _input_from_smg(message: vllm.GenerateRequest) -> PromptInput:
    match message.WhichOneof("input"):
        case "tokenized":
            return TokenInput(token_ids_from_wire(message.tokenized.input_ids))
        case "text":
            return TextInput(message.text)
        case _:
            raise InvalidInput("input", "is missing; set tokenized or text")


def _sampling_from_smg(
    params: vllm.SamplingParams, seed: int, context_length: int
) -> SamplingParams:
    """Where this protocol's numbers cannot be absent, 0 means the default.

    What only concerns text, such as `skip_special_tokens`, is the gateway's own business.
    """
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if params.HasField(name):
            raise InvalidInput(f"sampling_params.{name}", "is not served")
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        # A signed number there; each still has a sequence of its own.
        seed=params.seed % _SEEDS if params.HasField("seed") else seed,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else context_length,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        n=params.n or 1,
        constraint=_constraint_from_smg(params),
    )


def _constraint_from_smg(params: vllm.SamplingParams) -> Constraint | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return Constraint(ConstraintKind.JSON_SCHEMA, params.json_schema)
        case "json_object":
            return Constraint(ConstraintKind.JSON_SCHEMA, _ANY_OBJECT)
        case "regex":
            return Constraint(ConstraintKind.REGEX, params.regex)
        case "grammar":
            return Constraint(ConstraintKind.GRAMMAR, params.grammar)
        case "choice":
            choices = params.choice.choices
            if not choices:
                raise InvalidInput("sampling_params.choice.choices", "must not be empty")
            return Constraint(ConstraintKind.REGEX, "|".join(map(re.escape, choices)))
        case unknown:
            raise InvalidInput(f"sampling_params.{unknown}", "is not served")
