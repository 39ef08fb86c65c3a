"""What the decode side tells of an answer that its constraint lets go no further."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import InvalidInput
from kvferry.sampling import Constraint, ConstraintKind
from tests.support.intake_bench import IntakeBench
from tests.support.small_tokenizer import SmallVocabulary

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dead_end_of_one_sample_ends_the_attempt_with_the_reason(tmp_path: Path) -> None:
    words = SmallVocabulary(tmp_path)
    grammar = 'start: "no" | "yes" never\nnever: "c" never'
    constraint = Constraint(ConstraintKind.GRAMMAR, grammar)
    words.compiler.compile(constraint).result(timeout=60)
    bench = IntakeBench(compiler=words.compiler)
    stream = bench.start(
        source=None, constraint=constraint, n=3, max_tokens=9, temperature=1.0, seed=1,
        logit_bias={words.ids("y")[0]: 90.0},
    )  # fmt: skip
    bench.engine_bench.run()
    outputs, error = bench.outputs_of(stream)
    assert isinstance(error, InvalidInput)
    assert error.field == "sampling.grammar"
    assert outputs
    bench.engine_bench.assert_idle()
    words.compiler.close()
    bench.loop.close()
