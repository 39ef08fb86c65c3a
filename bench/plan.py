"""What a run is asked to do, as data that travels to its client processes as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from bench.record import LoadMode
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping


class Door(Enum):
    """What is spoken with the server."""

    GRPC = "grpc"
    HTTP = "http"


class DatasetKind(Enum):
    """Where prompts come from."""

    TRACE = "trace"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    RANDOM = "random"
    PROMPTS = "prompts"
    SHAREGPT = "sharegpt"


class Arrivals(Enum):
    """How the gaps between the chains of an open loop are drawn."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """Lengths are in tokens."""

    kind: DatasetKind = DatasetKind.RANDOM
    path: str = ""
    """Of the file, for kinds that are read from one."""
    requests_max: int = 100
    prompt_tokens: int = 512
    """Of a generated prompt; of a turn, where there are turns."""
    answer_tokens: int = 64
    prefix_tokens: int = 512
    """Of what a group shares, or a conversation begins with."""
    groups: int = 8
    turns: int = 4
    length_spread: float = 0.0
    """Generated lengths are uniform within this part of theirs, both ways."""
    scale_tokens: float = 1.0
    """All lengths of a trace are multiplied by this."""
    context_max: int = 0
    """Prompts and answers are cut to fit into so much together; 0: not."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """When requests are sent."""

    mode: LoadMode = LoadMode.OPEN
    rate: float = 1.0
    """Chains per second, of all clients together."""
    arrivals: Arrivals = Arrivals.POISSON
    burstiness: float = 2.0
    """Coefficient of variation of the gaps, for gamma: 1 is Poisson."""
    concurrency: int = 1
    """Chains at a time in a closed loop, of all clients together."""
    think_s: float = 0.0
    """Of a user of a closed loop, before a chain."""
    time_scale: float = 1.0
    """Times of a trace are multiplied by this: .5 is twice the load."""
    warmup_s: float = 0.0
    """At the beginning, of which the record has nothing."""


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """Whom to ask. The API key, if one is needed, is not here: others could read it."""

    door: Door = Door.GRPC
    addresses: tuple[str, ...] = ()
    """host:port of routers, or base URLs that end with /v1; asked in turn."""
    model: str = ""
    vocab_size: int = 0
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that one client process needs to know."""

    endpoint: EndpointPlan
    dataset: DatasetPlan = field(default_factory=DatasetPlan)
    load: LoadPlan = field(default_factory=LoadPlan)
    seed: int = 0
    deadline_s: float = 600.0
    """Of each request, from when it is sent."""
    part: int = 0
    """Which of the parts of the workload this client sends."""
    parts: int = 1


def check_plan(plan: RunPlan) -> None:
    """Raises `InvalidInput` naming the flag at fault."""
    dataset, load = plan.dataset, plan.load
    counts = {
        "requests": dataset.requests_max,
        "prompt-tokens": dataset.prompt_tokens,
        "answer-tokens": dataset.answer_tokens,
        "groups": dataset.groups,
        "turns": dataset.turns,
        "concurrency": load.concurrency,
        "clients": plan.parts,
        "rate": load.rate,
        "burstiness": load.burstiness,
        "time-scale": load.time_scale,
        "scale-tokens": dataset.scale_tokens,
        "deadline-s": plan.deadline_s,
    }
    for name, value in counts.items():
        if not 0 < value < float("inf"):
            raise InvalidInput(name, f"is {value}; must be above 0")
    for name, value in (
        ("prefix-tokens", dataset.prefix_tokens),
        ("context-max", dataset.context_max),
        ("think-s", load.think_s),
        ("warmup-s", load.warmup_s),
        ("seed", plan.seed),
    ):
        if not 0 <= value < float("inf"):
            raise InvalidInput(name, f"is {value}; must be 0 or more")
    if not 0 <= dataset.length_spread < 1:
        raise InvalidInput("length-spread", f"is {dataset.length_spread}; must be in [0, 1)")
    if not plan.endpoint.addresses:
        raise InvalidInput("address", "names nobody to ask")


def plan_to_json(plan: RunPlan) -> str:
    """One line."""
    return json.dumps(plan_values(plan))


def plan_values(plan: Any) -> dict[str, Any]:
    """A plan or a part of it, as plain values."""
    return {entry.name: _plain(getattr(plan, entry.name)) for entry in dataclasses.fields(plan)}


def plan_of_json(text: str) -> RunPlan:
    """Of `plan_to_json`, from the process that started this one."""
    found: Mapping[str, Any] = json.loads(text)
    endpoint, dataset, load = found["endpoint"], found["dataset"], found["load"]
    return RunPlan(
        endpoint=EndpointPlan(
            **{
                **endpoint,
                "door": Door(endpoint["door"]),
                "addresses": tuple(endpoint["addresses"]),
            }
        ),
        dataset=DatasetPlan(**{**dataset, "kind": DatasetKind(dataset["kind"])}),
        load=LoadPlan(
            **{
                **load,
                "mode": LoadMode(load["mode"]),
                "arrivals": Arrivals(load["arrivals"]),
            }
        ),
        **{name: found[name] for name in ("seed", "deadline_s", "part", "parts")},
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return plan_values(value)
    return list(value) if isinstance(value, tuple) else value
