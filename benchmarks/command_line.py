"""What command lines of benchmarks have in common."""

from __future__ import annotations

import argparse


def setting(text: str) -> tuple[str, str]:
    """The type of an argument NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


def as_text(record: dict[str, object]) -> str:
    """A record for a reader, where a program would get JSON."""
    return "  ".join(f"{name} {value}" for name, value in record.items())
