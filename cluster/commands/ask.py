"""`generate` and `chat`: ask a running cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cluster import console
from cluster.commands.flags import add_address, add_command, client_of
from kvferry.cache_key import Sharing
from kvferry.convert import sharing_to_wire
from kvferry.errors import InvalidInput
from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    import argparse

_SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "longest answer, bounded by the context; default: 128"),
    ("temperature", float, "randomness; 0, the default here, takes the likeliest token"),
    ("top_k", int, "choose among so many likeliest tokens; 0 among all"),
    ("top_p", float, "choose among the likeliest tokens that have this probability together"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest"),
    ("repetition_penalty", float, "above 1 makes tokens seen before less likely"),
    ("presence_penalty", float, "taken off tokens that the answer has"),
    ("frequency_penalty", float, "taken off for each time that the answer has a token"),
    ("seed", int, "the same seed gives the same answer; drawn by the server if not given"),
)
_TEMPERATURE = 0.0
"""The server's default is 1, as everywhere; a small model talks nonsense at that."""
_SHARING_NAMES = {sharing.value: sharing for sharing in Sharing}


def add(commands: Any) -> None:
    """Add the commands of this file."""
    generate = add_command(commands, "generate", _generate, "answer one prompt")
    generate.add_argument("prompt")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is")
    generate.add_argument("--usage", action="store_true", help="say what it cost, on stderr")
    generate.add_argument(
        "--n", type=int, default=1, help="answers to print; they differ if --temperature is set"
    )
    chat = add_command(commands, "chat", _chat, "a conversation, turn by turn")
    for command in (generate, chat):
        command.add_argument("--model", default="", help="name of an adapter; default: none")
        _add_cache_use(command)
        add_address(command)
        _add_sampling(command)


def ask_flags() -> list[str]:
    """Names of what the commands of this file add, for near misses."""
    names = [f"--{name.replace('_', '-')}" for name, _, _ in _SAMPLING_FLAGS]
    return [*names, "--cache-salt", "--sharing", "--priority", "--n", "--model"]


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    for name, kind, text in _SAMPLING_FLAGS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, dest=name, help=text)
    command.set_defaults(temperature=_TEMPERATURE)
    group.add_argument("--stop", action="append", default=[], help="may be given several times")


def _add_cache_use(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("cache")
    group.add_argument("--cache-salt", default="", help="share KV only with the same salt")
    group.add_argument(
        "--sharing",
        default=Sharing.SHARED.value,
        metavar="WAY",
        help="shared: use cached KV and leave some; recomputed: leave some; private: neither; "
        "default: %(default)s",
    )
    group.add_argument(
        "--priority", type=int, default=0, help="-100 to 100: how long to keep its KV; default: 0"
    )


def _generate(arguments: argparse.Namespace) -> None:
    if not arguments.prompt:
        raise InvalidInput("prompt", "must not be empty")
    request = _request_of(arguments)
    try:
        request.sampling.n = arguments.n
    except ValueError as error:
        raise InvalidInput("n", str(error)) from error
    with client_of(arguments) as client:
        console.generate(
            client,
            arguments.prompt,
            request,
            raw=arguments.raw,
            show_usage=arguments.usage,
        )


def _chat(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        console.chat(client, _request_of(arguments), sys.stdin)


def _request_of(arguments: argparse.Namespace) -> inference.GenerateRequest:
    """Everything but the prompt."""
    sharing = _SHARING_NAMES.get(arguments.sharing)
    if sharing is None:
        names = ", ".join(_SHARING_NAMES)
        raise InvalidInput("sharing", f"is {arguments.sharing!r}; must be one of {names}")
    try:
        return inference.GenerateRequest(
            model=arguments.model,
            sampling=_sampling_of(arguments),
            cache_salt=arguments.cache_salt,
            sharing=sharing_to_wire(sharing),
            priority=arguments.priority,
        )
    except ValueError as error:
        raise InvalidInput("priority", str(error)) from error


def _sampling_of(arguments: argparse.Namespace) -> inference.SamplingParams:
    given = {name: getattr(arguments, name) for name, _, _ in _SAMPLING_FLAGS}
    try:
        return inference.SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=arguments.stop,
        )
    except ValueError as error:
        raise InvalidInput("sampling", str(error)) from error
