"""Reads client messages so that one that cannot be read gets an error naming its field.

A protobuf parser refuses a string that is not UTF-8 without saying which one, and gRPC reports
a failing deserializer as INTERNAL. So handlers receive bytes and parse here. When that fails the
bytes are parsed again into a *mirror* of the message, in which every string field is a bytes
field (both have the same wire format), and the mirror is searched for the culprit.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator

_MessageT = TypeVar("_MessageT")
_Field = descriptor_pb2.FieldDescriptorProto


def parse_message(kind: type[_MessageT], data: bytes) -> _MessageT:
    """The message in `data`. Raises `InvalidInput` naming the field, as `chat.messages[1].role`."""
    generated: Any = kind
    try:
        message: _MessageT = generated.FromString(data)
    except DecodeError as error:
        raise _explain(generated.DESCRIPTOR, data) from error
    return message


def _explain(descriptor: Any, data: bytes) -> InvalidInput:
    try:
        mirror = _mirror_class(descriptor.full_name).FromString(data)
    except DecodeError:
        return InvalidInput("request", f"is not a valid {descriptor.name} message")
    broken = next(_broken_strings(mirror, descriptor, ""), None)
    if broken is None:
        return InvalidInput("request", f"is not a valid {descriptor.name} message")
    return InvalidInput(broken, "is not valid UTF-8")


def _broken_strings(mirror: Any, original: Any, prefix: str) -> Iterator[str]:
    """Paths of the fields that are strings in `original` and hold no UTF-8 in `mirror`."""
    for field, value in mirror.ListFields():
        known = original.fields_by_name[field.name]
        is_single = isinstance(value, (bytes, Message, int, float))
        for position, entry in enumerate([value] if is_single else value):
            path = f"{prefix}{field.name}" if is_single else f"{prefix}{field.name}[{position}]"
            if isinstance(entry, Message):
                yield from _broken_strings(entry, known.message_type, f"{path}.")
            elif known.type == known.TYPE_STRING and not _is_utf8(entry):
                yield path


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@cache
def _mirror_class(full_name: str) -> Any:
    """The mirror of a generated message type, made when it is first needed."""
    pool = descriptor_pool.DescriptorPool()
    _add_mirror(descriptor_pool.Default().FindMessageTypeByName(full_name).file, pool, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))


def _add_mirror(file: Any, pool: Any, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_mirror(dependency, pool, added)
    definition = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(definition)
    for message in definition.message_type:
        _strings_to_bytes(message)
    pool.AddSerializedFile(definition.SerializeToString())


def _strings_to_bytes(message: Any) -> None:
    # A map's key may not be bytes; on the wire a map is a repeated message of key and value.
    message.options.ClearField("map_entry")
    for field in message.field:
        if field.type == _Field.TYPE_STRING:
            field.type = _Field.TYPE_BYTES
    for nested in message.nested_type:
        _strings_to_bytes(nested)
