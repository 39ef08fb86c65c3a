"""The kernels that a model's steps need, compiled by several processes before the first step.

    python -m engine.kernel_set START FORM IS_FLOAT32 IS_QUANTIZED GELU HEAD_NORMS

is such a process: it compiles from number START on what nobody compiles yet, see `compile_all`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from engine.attention.chunk_kernel import chunk_part
from engine.attention.decode_kernel import decode_part
from engine.operators import native_kernels, panel_kernels, token_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.native_math import Task

_log = logging.getLogger(__name__)

_PROCESSES_MAX = 4
"""Beyond it, one kernel alone takes as long as the others for each."""
_HELP_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class KernelSet:
    """What of a model and its KV decides which kernels there are."""

    form: int
    """Of KV, see `attention.vectors.FORMS`."""
    is_float32: bool
    """The model; others are computed by torch but for attention."""
    is_quantized: bool
    """Its weights."""
    gelu: bool
    """Instead of silu."""
    head_norms: bool

    def tasks(self) -> list[Task]:
        """The kernels."""
        attention = [decode_part(self.form), chunk_part(self.form)]
        if not self.is_float32:
            return attention
        token = token_kernels
        linear = native_kernels.linear_part, panel_kernels.linear_part
        if self.is_quantized:
            # What holds such a weight is torch's; a process that only compiles does without.
            from engine.operators import quantized_kernels

            linear = quantized_kernels.linear_part, quantized_kernels.packed_part
        return [
            attention[0],
            *linear,
            token.rms_norm_part,
            token.add_rms_norm_part,
            *([token.norm_heads_part] if self.head_norms else []),
            token.rope_part,
            token.gelu_part if self.gelu else token.silu_part,
            attention[1],
        ]

    def compile_all(self) -> None:
        """Compile what no process of this machine has compiled yet, on all cores that we may use.

        Each process takes what no other has begun. Afterwards machine code is only loaded.
        """
        tasks = self.tasks()
        missing = sum(not task.is_compiled for task in tasks)
        cores = len(os.sched_getaffinity(0))
        with contextlib.ExitStack() as helpers:
            for number in range(1, min(cores, missing, _PROCESSES_MAX)):
                start = number * len(tasks) // min(cores, _PROCESSES_MAX)
                helpers.enter_context(_helper(self, start))
            for task in tasks:
                task.compile_if_free()
            for task in tasks:
                task.address  # noqa: B018 - asking for it is what compiles it


@contextlib.contextmanager
def _helper(kernels: KernelSet, start: int) -> Iterator[None]:
    numbers = [str(int(number)) for number in (start, *astuple(kernels))]
    command = [sys.executable, "-m", "engine.kernel_set", *numbers]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        try:
            code = process.wait(_HELP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            # Nothing is lost but time: whoever needs a kernel compiles it.
            _log.warning("a process that compiles kernels ended with %d", code)


def main() -> None:
    """See the module."""
    start, form, *flags = map(int, sys.argv[1:])
    tasks = KernelSet(form, *map(bool, flags)).tasks()
    for task in tasks[start:] + tasks[:start]:
        if not task.is_compiled:
            task.compile_if_free()


if __name__ == "__main__":
    main()
