"""Another engine as a contender: a child process in an environment of its own, asked line by line.

See `benchmarks.peers.line_protocol`. The child stands still while it is nobody's turn, because
threads of its pools that spin for work would take a core from the others.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[1]
_ANSWER_WITHIN_S = 1200.0
"""vLLM compiles for minutes, on a busy machine for many."""
_STOP_WITHIN_S = 20.0
_TAIL_CHARACTERS = 3000


class PeerUnavailable(Exception):
    """A peer that is not installed, does not start, or is not what it should be. For the user."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """How a peer is started."""

    name: str
    environment: str
    """Directory of its virtual environment, in the repository; complete once `.ready` is in it."""
    module: str
    """Its arguments are the model and the number of threads."""
    variables: Mapping[str, str] = field(default_factory=dict)
    compiled: Path | None = None
    """Where it keeps what it compiles. None: it compiles nothing."""

    @property
    def is_installed(self) -> bool:
        """Whether its environment is complete."""
        return (ROOT / self.environment / ".ready").is_file()

    def python(self) -> Path:
        """Raises `PeerUnavailable` if it is not installed."""
        if not self.is_installed:
            raise PeerUnavailable(f"{self.name} is not installed: `make bench-peers-setup`")
        return ROOT / self.environment / "bin" / "python"


class PeerProcess:
    """Implements `Contender`. `close` it.

    `report`: what it said of itself. `ready_s`: from its start to its first token;
    `compiled_before`: with what it had compiled in an earlier process.
    """

    def __init__(self, kind: PeerKind, model: Path, threads: int) -> None:
        """Returns when the peer has made its first token. Raises `PeerUnavailable`."""
        command = [str(kind.python()), "-m", kind.module, str(model), str(threads)]
        self.name = kind.name
        self.compiled_before = kind.compiled is not None and kind.compiled.is_dir()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        clock = MonotonicClock()
        began = clock.now()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(os.environ) | {"OMP_NUM_THREADS": str(threads)} | dict(kind.variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            # A group of its own, which can be stopped, but in our session: the system ends it
            # when we are gone while it stands still.
            process_group=0,
        )
        try:
            self.report = self._answer()
            self.ready_s = clock.now() - began
            self._check(threads)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def prefill(self, tokens: int) -> Callable[[], float]:
        """See `Contender.prefill`."""
        return self._prepare(f"prefill {tokens}")

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """See `Contender.decode`."""
        return self._prepare(f"decode {batch} {context}")

    def close(self) -> None:
        """End the process. May be called again."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait(_STOP_WITHIN_S)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()

    def _prepare(self, what: str) -> Callable[[], float]:
        self._ask(what)
        return lambda: float(self._ask("step")["seconds"])

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(_ANSWER_WITHIN_S)
        # A line is written at once and is far shorter than a pipe holds: it is here as a whole.
        line = self._process.stdout.readline() if ready else b""
        if not line:
            problem = "has ended" if ready else f"says nothing for {_ANSWER_WITHIN_S:g} s"
            raise PeerUnavailable(f"{self.name} {problem}:\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _check(self, threads: int) -> None:
        """By what the peer says of itself."""
        for what, wanted in (("dtype", "float32"), ("threads", threads)):
            if self.report[what] != wanted:
                found = self.report[what]
                raise PeerUnavailable(f"{self.name}: {what} is {found!r}, not {wanted!r}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_TAIL_CHARACTERS:]
