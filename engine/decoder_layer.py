"""The weights of a decoder's layers, read as one rank needs them.

Every tensor has the shape that the model's config says: native kernels look at no bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.lora_weights import NO_ADAPTERS
from engine.mlp import GatedMlp, MixtureOfExperts, SharedExpert
from engine.projection import Projection

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from engine.layer_spec import Experts
    from engine.lora_weights import LoraAdapters
    from engine.mlp import Mlp
    from engine.model_spec import ModelSpec
    from engine.tensor_parallel import Shard
    from engine.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMSNorms of every query and key head, [D] each."""

    query: torch.Tensor
    key: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer; norms [hidden]. What is None the model has not."""

    attention_norm: torch.Tensor
    """Of attention's input."""
    qkv: Projection
    head_norms: HeadNorms | None
    output: Projection
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    """Of the MLP's input."""
    mlp: Mlp
    mlp_output_norm: torch.Tensor | None


class LayerLoader:
    """Reads layers of a model. Raises `ConfigError` for a tensor that is missing or misshapen."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        shard: Shard,
        adapters: LoraAdapters = NO_ADAPTERS,
    ) -> None:
        """`spec`: of the rank; `weights` and `adapters`: of the whole model."""
        self._spec = spec
        self._weights = weights
        self._shard = shard
        self._adapters = adapters

    def load(self, layer: int) -> DecoderLayer:
        """All of a layer."""
        spec, prefix = self._spec, f"model.layers.{layer}"
        attention, on_outputs = f"{prefix}.self_attn", spec.norms.on_outputs

        def norm(place: str) -> torch.Tensor:
            return self.norm(f"{prefix}.{place}_layernorm", spec.hidden_size)

        return DecoderLayer(
            attention_norm=norm("input"),
            qkv=self._qkv(attention),
            head_norms=self._head_norms(attention) if spec.norms.per_head else None,
            output=self._outward(
                f"{attention}.o_proj", spec.num_heads * spec.head_dim, biased=spec.biases.output
            ),
            # Where outputs have none, the norm after attention is that of the MLP's input.
            attention_output_norm=norm("post_attention") if on_outputs else None,
            mlp_norm=norm("pre_feedforward" if on_outputs else "post_attention"),
            mlp=self._mlp(layer, prefix),
            mlp_output_norm=norm("post_feedforward") if on_outputs else None,
        )

    def norm(self, module: str, width: int) -> torch.Tensor:
        """The weight of an RMSNorm, [width], as it is multiplied by."""
        name = f"{module}.weight"
        self._weights.require(name, (width,))
        weight = self._weights.tensor(name)
        offset = self._spec.norms.offset
        return (weight.float() + offset).to(weight.dtype) if offset else weight

    def whole(self, module: str, rows: int) -> Projection:
        """The same on every rank."""
        return Projection(self._matrix(module, rows))

    def vocabulary(self, module: str) -> Projection:
        """With a row for each token; the same on every rank."""
        return Projection(self._weights.held(self._matrix(module, self._spec.vocab_size)))

    def _matrix(self, module: str, rows: int) -> torch.Tensor:
        name = f"{module}.weight"
        self._weights.require(name, (rows, self._spec.hidden_size))
        return self._weights.tensor(name)

    def _qkv(self, attention: str) -> Projection:
        spec = self._spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        modules = [f"{attention}.{part}_proj" for part in "qkv"]
        qkv = self._inward(modules, [n * spec.head_dim for n in heads], biased=spec.biases.qkv)
        factor = self._query_factor()
        if factor == 1.0 or spec.norms.per_head:
            return qkv
        rows = qkv.weight.new_ones(len(qkv.weight))
        rows[: spec.num_heads * spec.head_dim] = factor
        bias = None if qkv.bias is None else qkv.bias * rows
        updates = {adapter: update.scaled(rows) for adapter, update in qkv.updates.items()}
        return Projection(qkv.weight * rows[:, None], bias, updates)

    def _query_factor(self) -> float:
        """That makes the scores right: attention scales them by 1 / sqrt(head_dim)."""
        score = self._spec.scales.score
        return 1.0 if score is None else score * self._spec.head_dim**0.5

    def _head_norms(self, attention: str) -> HeadNorms:
        width, factor = self._spec.head_dim, self._query_factor()
        query = self.norm(f"{attention}.q_norm", width)
        if factor != 1.0:
            query = query * factor
        return HeadNorms(query, self.norm(f"{attention}.k_norm", width))

    def _mlp(self, layer: int, prefix: str) -> Mlp:
        experts = self._spec.experts
        if experts is not None and layer in experts.layers:
            return self._mixture(prefix, experts)
        mlp = f"{prefix}.mlp"
        names = (f"{mlp}.gate_proj", f"{mlp}.up_proj", f"{mlp}.down_proj")
        return self._gated(names, self._spec.intermediate_size, biased=self._spec.biases.mlp)

    def _mixture(self, prefix: str, experts: Experts) -> MixtureOfExperts:
        names = experts.names
        parts = (names.gate, names.up, names.down)
        return MixtureOfExperts(
            router=self.whole(f"{prefix}.{names.router}", experts.count),
            experts=[
                self._gated(
                    [f"{prefix}.{names.experts}.{n}.{part}" for part in parts], experts.width
                )
                for n in range(experts.count)
            ],
            per_token=experts.per_token,
            normalised=experts.normalised,
            shared=self._shared(prefix, experts.shared_width) if experts.shared_width else None,
        )

    def _shared(self, prefix: str, width: int) -> SharedExpert:
        expert = f"{prefix}.mlp.shared_expert"
        names = [f"{expert}.{part}_proj" for part in ("gate", "up", "down")]
        return SharedExpert(self._gated(names, width), self.whole(f"{expert}_gate", 1))

    def _gated(self, modules: Sequence[str], width: int, *, biased: bool = False) -> GatedMlp:
        """`modules`: gate, up and down."""
        gate, up, down = modules
        return GatedMlp(
            gate_up=self._inward([gate, up], [width, width], biased=biased),
            down=self._outward(down, width, biased=biased),
            activation=self._spec.activation,
        )

    def _inward(self, modules: Sequence[str], rows: Sequence[int], *, biased: bool) -> Projection:
        """From the residual to this rank's `rows` of each module, as one product."""
        for module, count in zip(modules, rows, strict=True):
            whole = count * self._shard.ranks
            self._weights.require(f"{module}.weight", (whole, self._spec.hidden_size))
            if biased:
                self._weights.require(f"{module}.bias", (whole,))
        names = [f"{module}.weight" for module in modules]
        weight = self._weights.held(self._weights.fused(names, self._shard))
        updates = self._adapters.inward(modules, rows, self._shard)
        if not biased:
            return Projection(weight, updates=updates)
        biases = [f"{module}.bias" for module in modules]
        return Projection(weight, self._weights.fused(biases, self._shard), updates)

    def _outward(self, module: str, columns: int, *, biased: bool) -> Projection:
        """From this rank's `columns` to its summand of what is added to the residual."""
        hidden = self._spec.hidden_size
        self._weights.require(f"{module}.weight", (hidden, columns * self._shard.ranks))
        weight = self._weights.held(self._weights.columns(f"{module}.weight", self._shard))
        updates = self._adapters.outward(module, self._shard)
        if not biased:
            return Projection(weight, updates=updates)
        self._weights.require(f"{module}.bias", (hidden,))
        bias = self._weights.tensor(f"{module}.bias")
        # The summands' sum has it once.
        return Projection(weight, bias if self._shard.rank == 0 else None, updates)
