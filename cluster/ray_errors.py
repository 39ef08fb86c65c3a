"""Ray's errors in one line."""

from __future__ import annotations


def short_text(error: Exception) -> str:
    """Ray's messages run over a dozen lines; the one that says how an actor died is enough."""
    text = str(error)
    for line in text.splitlines():
        if line.startswith("The actor is dead because"):
            return line.partition("Some common causes")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__
