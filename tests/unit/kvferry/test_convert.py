"""Each type survives the way over the wire."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry import convert
from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
from kvferry.attempt_marks import AttemptMarks, PromptMarks
from kvferry.audit_report import AuditReport
from kvferry.cache_key import CacheUse, Sharing
from kvferry.errors import InvalidInput
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptRequest,
    AttemptUsage,
    FinishReason,
    OutputToken,
    PrefillSource,
    TokenLogprobs,
)
from kvferry.ids import (
    AdapterId,
    Attempt,
    AttemptId,
    ExtraKey,
    Incarnation,
    RequestId,
    WorkerId,
)
from kvferry.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
)
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import worker_pb2 as worker
from kvferry.sampling import SamplingParams

# Values that float32 holds exactly, as the wire does.
SAMPLING = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.75,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={5: -1.0},
    seed=2**64 - 1,
    max_tokens=7,
    min_tokens=2,
    stop=("a", "ü"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    logprobs=0,
    n=3,
)


@pytest.mark.parametrize("params", [SAMPLING, SamplingParams()])
def test_sampling(params):
    assert convert.sampling_from_wire(convert.sampling_to_wire(params), seed=99) == params


def test_a_seed_that_is_not_set_is_the_servers():
    assert convert.sampling_from_wire(inference.SamplingParams(), seed=99).seed == 99


def test_zero_is_a_value_and_not_a_default():
    message = inference.SamplingParams(temperature=0.0, seed=0, top_p=0.0)
    params = convert.sampling_from_wire(message, seed=99)
    assert (params.temperature, params.seed, params.top_p) == (0.0, 0, 0.0)


@pytest.mark.parametrize(
    "source", [None, PrefillSource(WorkerId("prefill-0"), "127.0.0.1:1", Incarnation(2**63 - 1))]
)
def test_attempt_request(source):
    request = AttemptRequest(
        id=AttemptId(RequestId("r"), Attempt(2)),
        prompt=np.array([1, 2, 2**31 - 1], dtype=np.int32),
        sampling=SAMPLING,
        cache_use=CacheUse(ExtraKey("tenant"), Sharing.RECOMPUTED, -7, AdapterId("5a1e")),
        source=source,
        goes_first=source is not None,
    )
    message = convert.attempt_request_to_wire(request, Incarnation(5))
    back = convert.attempt_request_from_wire(
        worker.AttemptRequest.FromString(bytes(message.SerializeToString()))
    )
    assert message.incarnation == 5
    assert back.prompt.dtype == np.int32
    assert back.prompt.tolist() == request.prompt.tolist()
    assert back.goes_first is request.goes_first
    assert (back.id, back.sampling, back.cache_use, back.source) == (
        request.id,
        request.sampling,
        request.cache_use,
        request.source,
    )


def test_token_ids_that_no_int32_holds_are_refused():
    with pytest.raises(InvalidInput, match="4294967295 is not a token id"):
        convert.token_ids_from_wire([0, 2**32 - 1])
    assert convert.token_ids_from_wire([]).tolist() == []


@pytest.mark.parametrize("reason", list(FinishReason))
def test_attempt_output(reason):
    logprobs = TokenLogprobs(7, -0.5, ((7, -0.5), (8, -1.5)))
    usage = AttemptUsage(1, 2, 3, 4, 5.5)
    output = AttemptOutput((OutputToken(7, logprobs),), AttemptFinish(reason, usage), sample=5)
    assert convert.attempt_output_from_wire(convert.attempt_output_to_wire(output, 4)) == output


def test_attempt_output_without_finish_and_logprobs():
    output = AttemptOutput((OutputToken(1), OutputToken(2)))
    assert convert.attempt_output_from_wire(convert.attempt_output_to_wire(output, 4)) == output


def test_marks_survive_the_wire_and_what_was_not_reached_is_none():
    source = PromptMarks(0.25, 0.5, 0.0, 1.0)
    for marks in (AttemptMarks(), AttemptMarks(fetched_s=0.0, ended_s=2.5, source=source)):
        sent = AttemptOutput((), marks=marks)
        data = convert.attempt_output_to_wire(sent, 7).SerializeToString()
        assert convert.attempt_output_from_wire(worker.AttemptOutput.FromString(data)) == sent


def test_kv_events_keep_their_order():
    batch = KvEventBatch(
        WorkerId("decode-0"),
        Incarnation(3),
        sequence=9,
        snapshot=True,
        events=(
            AllBlocksCleared(),
            BlocksStored((BlockHash(2**64 - 1), BlockHash(0))),
            BlocksRemoved((BlockHash(1),)),
        ),
    )
    assert convert.kv_batch_from_wire(convert.kv_batch_to_wire(batch)) == batch


def test_expected_prompts_are_whole_hashes():
    expected = (bytes(range(16)), bytes(range(8)))
    batch = KvEventBatch(WorkerId("w"), Incarnation(3), 9, False, (), expected)
    message = convert.kv_batch_to_wire(batch)
    assert convert.kv_batch_from_wire(message) == batch
    message.expected.append(bytes(7))
    with pytest.raises(InvalidInput, match="expected"):
        convert.kv_batch_from_wire(message)


def test_an_event_of_no_known_kind_is_refused():
    message = worker.KvEventBatch(events=[worker.KvEvent()])
    with pytest.raises(InvalidInput, match="kind None is not known"):
        convert.kv_batch_from_wire(message)


def test_accounts_and_load():
    accounts = KvAccounts(*range(1, 10))
    load = WorkerLoad(1, 2, 3, 4, 5.5, 6.5)
    assert convert.accounts_from_wire(convert.accounts_to_wire(accounts)) == accounts
    assert convert.load_from_wire(convert.load_to_wire(load)) == load


def test_accounts_know_when_they_add_up_and_when_they_are_idle():
    idle = KvAccounts(6, 4, 0, 0, 0, 10, 0, 0, 8)
    assert idle.is_conserved
    assert idle.is_idle
    assert not KvAccounts(6, 4, 0, 0, 0, 11, 0, 0, 8).is_conserved
    assert not KvAccounts(5, 4, 1, 0, 0, 10, 0, 1, 8).is_idle
    assert not KvAccounts(6, 4, 0, 0, 0, 10, 0, 1, 8).is_idle, "a live row is not idle"


@pytest.mark.parametrize("host_accounts", [None, HostAccounts(1, 2, 3, 4, 5, 15)])
def test_audit_report(host_accounts):
    accounts = KvAccounts(1, 2, 3, 4, 5, 25, 3, 1, 8, loading=10)
    report = AuditReport(("check 8: no", "check 1: b"), accounts, 2.5, 9, host_accounts)
    data = convert.audit_report_to_wire(report).SerializeToString()
    assert convert.audit_report_from_wire(inference.AuditReport.FromString(data)) == report


def test_every_way_of_sharing_is_on_the_wire():
    assert {convert.sharing_from_wire(convert.sharing_to_wire(way)) for way in Sharing} == set(
        Sharing
    )
    assert convert.sharing_from_wire(inference.GenerateRequest().sharing) is Sharing.SHARED
    with pytest.raises(InvalidInput, match=r"^sharing: is 9; must be one of SHARING_SHARED, "):
        convert.sharing_from_wire(9)
