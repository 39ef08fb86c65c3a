"""The Llama decoder over paged KV: any model of the family, on whatever `Operators` it is given.

RMSNorm -> attention -> residual -> RMSNorm -> gated MLP -> residual, per layer. Projections of the
same input are one product (`qkv`, `gate_up`). Of several ranks each computes some heads and some
columns of the MLP (see `engine.tensor_parallel`); the residual is the same on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.rope import rope_table
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.attention.backend import AttentionBackend
    from engine.forward_batch import ForwardBatch
    from engine.model_spec import ModelSpec
    from engine.operators.interface import Operators
    from engine.tensor_parallel import Collective, Shard
    from engine.weights import Weights
    from mem_cache.kv_pool import KvPool


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """Weights of one layer, each [out, in]; norms [hidden]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class LlamaDecoder:
    """Computes logits of a step and writes the KV of its tokens. Holds no state between steps."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        operators: Operators,
        attention: AttentionBackend,
        collective: Collective,
    ) -> None:
        """`spec`: of this rank (`ModelSpec.of_rank`); `weights`: of the whole model."""
        self._spec = spec
        self._collective = collective
        self._operators = operators
        self._attention = attention
        self._embedding = weights.tensor("model.embed_tokens.weight")
        self._layers = [
            _load_layer(weights, layer, collective.shard) for layer in range(spec.num_layers)
        ]
        self._final_norm = weights.tensor("model.norm.weight")
        self._head = self._embedding if spec.tied_embeddings else weights.tensor("lm_head.weight")
        _check_shapes(spec, self._embedding, self._head)
        self._rope = rope_table(spec.rope, spec.head_dim, spec.context_length)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, kv_pool: KvPool, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Write K/V of every token to its slot; logits float32 [R, vocab] at `logits_at`.

        `on_layers(n)` is called as soon as the K/V of layers [0, n) is written by every rank, the
        last excepted: that is said by returning.
        """
        normed = self._run_layers(batch, kv_pool, on_layers)
        return self._operators.linear(normed[batch.logits_at], self._head).float()

    @torch.inference_mode()
    def follow(self, batch: ForwardBatch, kv_pool: KvPool) -> None:
        """As `forward`, on a rank whose logits nobody needs."""
        self._run_layers(batch, kv_pool, None)

    def _run_layers(
        self, batch: ForwardBatch, kv_pool: KvPool, on_layers: Callable[[int], None] | None
    ) -> torch.Tensor:
        """[T, hidden], normed for the head."""
        # Native kernels read the table without looking at its end.
        assert int(batch.positions.max()) < len(self._rope), "a position beyond the model's context"
        ops, eps, collective = self._operators, self._spec.rms_eps, self._collective
        plan = self._attention.plan(batch.attention)
        residual = self._embedding[batch.token_ids]
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            qkv = ops.linear(normed, layer.qkv)
            attended = plan.run(self._rope_and_write(qkv, batch, kv_pool, index), index)
            projected = ops.linear(attended, layer.output)
            collective.all_reduce(projected)
            # Only now: a rank takes part in this sum when it has written its heads of the layer,
            # so that its end is the first that this one knows of the K/V of all the others.
            if on_layers is not None and index + 1 < len(self._layers):
                on_layers(index + 1)
            normed = ops.add_rms_norm(residual, projected, layer.post_attention_norm, eps)
            gated = ops.silu_and_mul(ops.linear(normed, layer.gate_up))
            projected = ops.linear(gated, layer.down)
            collective.all_reduce(projected)
            normed = ops.add_rms_norm(residual, projected, self._norm_after(index), eps)
        return normed

    def _rope_and_write(
        self, qkv: torch.Tensor, batch: ForwardBatch, kv_pool: KvPool, layer: int
    ) -> torch.Tensor:
        """Rotate; K and V go to the pool, by way of its codec where it stores other elements."""
        rope, positions = self._rope, batch.positions
        if kv_pool.in_place_dtype == qkv.dtype:
            keys, values = kv_pool.layer(layer)
            return self._operators.rope_and_write(
                qkv, rope, positions, batch.out_slots, keys, values
            )
        tokens = len(qkv)
        shape = (2, tokens, self._spec.num_kv_heads, self._spec.head_dim)
        keys, values = qkv.new_empty(shape).unbind()
        queries = self._operators.rope_and_write(
            qkv, rope, positions, torch.arange(tokens), keys, values
        )
        kv_pool.write(layer, batch.out_slots, keys, values)
        return queries

    def _norm_after(self, layer: int) -> torch.Tensor:
        following = layer + 1
        if following == len(self._layers):
            return self._final_norm
        return self._layers[following].input_norm


def _check_shapes(spec: ModelSpec, embedding: torch.Tensor, head: torch.Tensor) -> None:
    """What token ids index must have a row for each: a missing one would end the engine."""
    expected = (spec.vocab_size, spec.hidden_size)
    for name, tensor in (("embedding", embedding), ("output head", head)):
        if tuple(tensor.shape) != expected:
            raise ConfigError(
                "model.path",
                f"the {name} has shape {tuple(tensor.shape)}; config.json says {expected}",
            )


def _load_layer(weights: Weights, index: int, shard: Shard) -> LlamaLayer:
    prefix = f"model.layers.{index}"
    attention = f"{prefix}.self_attn"
    mlp = f"{prefix}.mlp"
    return LlamaLayer(
        input_norm=weights.tensor(f"{prefix}.input_layernorm.weight"),
        qkv=weights.fused([f"{attention}.{part}_proj.weight" for part in "qkv"], shard),
        output=weights.columns(f"{attention}.o_proj.weight", shard),
        post_attention_norm=weights.tensor(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=weights.fused([f"{mlp}.{part}_proj.weight" for part in ("gate", "up")], shard),
        down=weights.columns(f"{mlp}.down_proj.weight", shard),
    )
