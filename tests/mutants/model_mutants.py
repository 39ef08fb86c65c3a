"""Bugs of how a model's parts are put together, and of what is taken for a model."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/integration/test_model_families.py"
_LOGITS = f"{_TESTS}::test_logits_equal_transformers"
_REFUSED = f"{_TESTS}::test_weights_of_another_model_are_refused"

MODEL_MUTANTS = (
    Mutant(
        "a-bias-on-every-rank",
        "The sum over ranks has the bias of an output once.",
        "engine/decoder_layer.py",
        "bias if self._shard.rank == 0 else None",
        "bias",
        (f"{_LOGITS}[llama with biases]",),
    ),
    Mutant(
        "one-window-for-all-layers",
        "Each layer attends as far back as it should.",
        "engine/attention/layered.py",
        "self._layers[layer].run(queries, layer)",
        "self._layers[0].run(queries, layer)",
        (f"{_LOGITS}[qwen2 mixed windows]",),
    ),
    Mutant(
        "one-rope-for-all-layers",
        "Layers with a window may rotate otherwise.",
        "engine/decoder.py",
        "tables[spec.rope if window is None else spec.local_rope]",
        "tables[spec.rope]",
        (f"{_LOGITS}[gemma3]",),
    ),
    Mutant(
        "shares-as-they-are",
        "The shares of a token's experts add up to one where the model says so.",
        "engine/mlp.py",
        "        if self.normalised:\n",
        "        if not self.normalised:\n",
        (f"{_LOGITS}[mixtral]",),
    ),
    Mutant(
        "tensors-left-over",
        "A tensor that nobody reads belongs to another model.",
        "engine/decoder.py",
        "        weights.refuse_unused()\n",
        "",
        (f"{_REFUSED}[left over]",),
    ),
    Mutant(
        "shapes-taken-for-granted",
        "Kernels get tensors of the shape that they were told of.",
        "engine/weights.py",
        "        if found != shape:\n",
        "        if len(found) != len(shape):\n",
        (f"{_REFUSED}[too few tokens]",),
    ),
    Mutant(
        "scale-of-the-largest-positive-element",
        "An element of an int8 weight moves by half a step of its group at most.",
        "engine/operators/quantized_weight.py",
        "grouped.abs().amax(dim=-1)",
        "grouped.amax(dim=-1)",
        ("tests/unit/engine/test_quantized_weight.py",),
    ),
    Mutant(
        "random-weights",
        "What a GGUF file lacks is not made up.",
        "engine/gguf_import.py",
        "    if missing:\n",
        "    if missing and not info:\n",
        ("tests/unit/engine/test_gguf_import.py::test_a_tensor_that_is_missing_is_named",),
    ),
)
