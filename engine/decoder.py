"""A decoder over paged KV: any model that a `ModelSpec` describes, on the `Operators` it is given.

Per layer: RMSNorm -> attention -> residual -> RMSNorm -> MLP or experts -> residual. Projections of
the same input are one product (`qkv`, `gate_up`). Of several ranks each computes some heads and
some columns of the MLP (see `engine.tensor_parallel`); the residual is the same on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.decoder_layer import LayerLoader
from engine.lora_weights import NO_ADAPTERS
from engine.operators.quantized_weight import are_equal
from engine.rope import rope_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.attention.backend import AttentionBackend
    from engine.forward_batch import ForwardBatch
    from engine.lora_weights import LoraAdapters
    from engine.model_spec import ModelSpec
    from engine.operators.interface import Operators
    from engine.projection import Projection
    from engine.tensor_parallel import Collective
    from engine.weights import Weights
    from mem_cache.kv_pool import KvPool


class Decoder:
    """Computes logits of a step and writes the KV of its tokens. Holds no state between steps."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        operators: Operators,
        attention: AttentionBackend,
        collective: Collective,
        adapters: LoraAdapters = NO_ADAPTERS,
    ) -> None:
        """`spec`: of this rank (`ModelSpec.of_rank`); `weights`, `adapters`: of the whole model.

        Raises `ConfigError` naming a tensor that is missing, misshapen, or of no use to the model.
        """
        self._spec = spec
        self._collective = collective
        self._operators = operators
        self._attention = attention
        loader = LayerLoader(spec, weights, collective.shard, adapters)
        self._layers = [loader.load(layer) for layer in range(spec.num_layers)]
        self._final_norm = loader.norm("model.norm", spec.hidden_size)
        # What token ids index must have a row for each: a missing one would end the engine.
        self._embedding = loader.vocabulary("model.embed_tokens")
        self._head = _load_head(spec, weights, loader, self._embedding)
        weights.refuse_unused()
        self._ropes = _rope_tables(spec, self._embedding.weight.device)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, kv_pool: KvPool, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Write K/V of every token to its slot; logits float32 [R, vocab] at `logits_at`.

        `on_layers(n)` is called as soon as the K/V of layers [0, n) is written by every rank, the
        last excepted: that is said by returning.
        """
        normed = self._run_layers(batch, kv_pool, on_layers)
        logits = self._head.apply(self._operators, normed[batch.logits_at]).float()
        cap = self._spec.scales.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @torch.inference_mode()
    def follow(self, batch: ForwardBatch, kv_pool: KvPool) -> None:
        """As `forward`, on a rank whose logits nobody needs."""
        self._run_layers(batch, kv_pool, None)

    def _run_layers(
        self, batch: ForwardBatch, kv_pool: KvPool, on_layers: Callable[[int], None] | None
    ) -> torch.Tensor:
        """[T, hidden], normed for the head."""
        # Kernels read the table without looking at its end.
        longest = int(batch.attention.kv_lengths.max())
        assert longest <= len(self._ropes[0]), "a position beyond the model's context"
        ops, eps, collective = self._operators, self._spec.rms_eps, self._collective
        adapted = batch.adapted
        plan = self._attention.plan(batch.attention)
        residual = self._embed(batch.token_ids)
        normed = ops.rms_norm(residual, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.apply(ops, normed, adapted)
            attended = plan.run(self._rotate_and_write(qkv, batch, kv_pool, index), index)
            projected = layer.output.apply(ops, attended, adapted)
            collective.all_reduce(projected)
            # Only now: a rank takes part in this sum when it has written its heads of the layer,
            # so that its end is the first that this one knows of the K/V of all the others.
            if on_layers is not None and index + 1 < len(self._layers):
                on_layers(index + 1)
            if layer.attention_output_norm is not None:
                projected = ops.rms_norm(projected, layer.attention_output_norm, eps)
            normed = ops.add_rms_norm(residual, projected, layer.mlp_norm, eps)
            projected = layer.mlp.forward(ops, normed, adapted)
            collective.all_reduce(projected)
            if layer.mlp_output_norm is not None:
                projected = ops.rms_norm(projected, layer.mlp_output_norm, eps)
            normed = ops.add_rms_norm(residual, projected, self._norm_after(index), eps)
        return normed

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden], a new tensor."""
        embedded = self._embedding.weight[token_ids]
        scale = self._spec.scales.embedding
        # Rounded as the embeddings are: models were trained with it so.
        return embedded if scale == 1.0 else embedded.mul_(embedded.new_full((), scale))

    def _rotate_and_write(
        self, qkv: torch.Tensor, batch: ForwardBatch, kv_pool: KvPool, layer: int
    ) -> torch.Tensor:
        """Queries [T, H, D]; K and V go to the pool, by way of its codec where it stores other
        elements."""
        spec, norms = self._spec, self._layers[layer].head_norms
        if norms is not None:
            self._operators.norm_heads(qkv, norms.query, norms.key, spec.num_kv_heads, spec.rms_eps)
        rope, positions = self._ropes[layer], batch.positions
        if kv_pool.in_place_dtype == qkv.dtype:
            keys, values = kv_pool.layer(layer)
            return self._operators.rope_and_write(
                qkv, rope, positions, batch.out_slots, keys, values
            )
        tokens = len(qkv)
        shape = (2, tokens, spec.num_kv_heads, spec.head_dim)
        keys, values = qkv.new_empty(shape).unbind()
        queries = self._operators.rope_and_write(
            qkv, rope, positions, torch.arange(tokens, device=qkv.device), keys, values
        )
        kv_pool.write(layer, batch.out_slots, keys, values)
        return queries

    def _norm_after(self, layer: int) -> torch.Tensor:
        following = layer + 1
        if following == len(self._layers):
            return self._final_norm
        return self._layers[following].attention_norm


def _load_head(
    spec: ModelSpec, weights: Weights, loader: LayerLoader, embedding: Projection
) -> Projection:
    """A head that is stored counts, even if the config says that the embedding is the head."""
    if spec.tied_embeddings and "lm_head.weight" not in weights:
        return embedding
    head = loader.vocabulary("lm_head")
    # A mere copy would be held in memory twice.
    return embedding if are_equal(head.weight, embedding.weight) else head


def _rope_tables(spec: ModelSpec, device: torch.device) -> list[torch.Tensor]:
    """Of each layer; those that rotate alike share one."""
    tables = {
        rope: rope_table(rope, spec.head_dim, spec.context_length).to(device)
        for rope in {spec.rope, spec.local_rope}
    }
    return [tables[spec.rope if window is None else spec.local_rope] for window in spec.windows]
