"""A tiny random checkpoint of each family, written by `transformers` itself.

Drawn as `tiny_llama` does it, so that rounding does not decide a greedy choice: logits have a
spread of tens, and layers outweigh the embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 211
"""As `small_tokenizer` has."""
_GAIN = 1.3
_OUTPUT_GAIN = 8 * _GAIN
_SPREAD = 10.0
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXED: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 1,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen2 mixed windows": ("qwen2", _MIXED),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3 with biases": ("qwen3", {"head_dim": 24, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2 moe": (
        "qwen2_moe",
        _EXPERTS | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [1]},
    ),
    "qwen3 moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True, "head_dim": 24}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            # Low enough to matter.
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 40.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
            },
            "final_logit_softcapping": 40.0,
        },
    ),
}


def make_family(
    directory: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    **changes: Any,
) -> Path:
    """`config.json`, `generation_config.json` and weights; in several files of `shard_bytes`."""
    import transformers

    kind, settings = FAMILIES[family]
    config = transformers.AutoConfig.for_model(kind, **_SHAPE | settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    _draw(model)
    sizes = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(dtype).save_pretrained(directory, **sizes)
    return directory


def _draw(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    # Where outputs are normed, only the norms' weights can outweigh the embedding, which is scaled.
    normed = {name for name, _ in model.named_parameters() if "feedforward" in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain, center = _law(name, normed=bool(normed))
            if parameter.ndim > 1:
                gain /= parameter.shape[-1] ** 0.5
            parameter.copy_(center + gain * noise)


def _law(name: str, *, normed: bool) -> tuple[float, float]:
    """Gain and center of a parameter's elements; of a matrix, gain over the root of its width."""
    if "embed_tokens" in name or "lm_head" in name:
        return _SPREAD, 0.0
    if name.endswith(".bias"):
        return 0.3, 0.0
    if "norm" in name:
        on_output = normed and ("post_attention" in name or "post_feedforward" in name)
        return (5.0, 40.0) if on_output else (0.1, 0.0 if normed else 1.0)
    is_output = any(part in name for part in ("o_proj", "down_proj", "w2"))
    return (_OUTPUT_GAIN if is_output else _GAIN), 0.0
