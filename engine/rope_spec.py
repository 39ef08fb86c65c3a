"""Rotary position embedding as `config.json` describes it. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvferry.errors import ConfigError

_THETA = 10_000.0
"""Where a config names no base frequency."""


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretching of low frequencies beyond the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Every position divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """YaRN (Peng et al., arXiv:2309.00071): stretched by frequency, and attention sharpened."""

    factor: float
    original_context_length: int
    magnitude: float
    """Cosines and sines are multiplied by it."""
    beta_fast: float = 32.0
    """Frequencies with more rotations than this in the original context stay as they are."""
    beta_slow: float = 1.0
    """Those with fewer are divided by `factor`."""
    whole_dimensions: bool = True
    """The range between the two is widened to whole dimensions."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Base frequency and how it is stretched, if at all."""

    theta: float
    scaling: Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | None = None


def read_rope(config: dict[str, Any], theta: float = _THETA) -> RopeSpec:
    """Of a whole `config.json`; `theta` where it has none.

    transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and `rope_scaling`.
    Raises `ConfigError` for a kind that is not supported, `KeyError` where a value is missing.
    """
    values: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return read_rope_values(values, config, theta)


def read_rope_values(values: dict[str, Any], config: dict[str, Any], theta: float) -> RopeSpec:
    """Of one entry of `config`: some models have one for each kind of layer."""
    theta = float(values.get("rope_theta") or config.get("rope_theta") or theta)
    rotated = values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if float(rotated) != 1.0:
        raise ConfigError("model.path", f"partial_rotary_factor {rotated} is not supported")
    match values.get("rope_type", values.get("type", "default")):
        # The dynamic kind changes with the length of a sequence, but not up to the model's context,
        # and none here is longer.
        case "default" | "dynamic":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, LinearRopeScaling(float(values["factor"])))
        case "llama3":
            scaling = Llama3RopeScaling(
                factor=float(values["factor"]),
                low_freq_factor=float(values["low_freq_factor"]),
                high_freq_factor=float(values["high_freq_factor"]),
                original_context_length=_original_context(values, config),
            )
            return RopeSpec(theta, scaling)
        case "yarn":
            return RopeSpec(theta, _yarn(values, config))
        case other:
            raise ConfigError("model.path", f"rope scaling {other!r} is not supported")


def _original_context(values: dict[str, Any], config: dict[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return int(config.get(name) or values.get(name) or config["max_position_embeddings"])


def _yarn(values: dict[str, Any], config: dict[str, Any]) -> YarnRopeScaling:
    original = _original_context(values, config)
    given = values["factor"]
    factor = float(config["max_position_embeddings"]) / original if given is None else float(given)
    return YarnRopeScaling(
        factor=factor,
        original_context_length=original,
        magnitude=_yarn_magnitude(values, factor),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        whole_dimensions=bool(values.get("truncate", True)),
    )


def _yarn_magnitude(values: dict[str, Any], factor: float) -> float:
    given = values.get("attention_factor")
    if given is not None:
        return float(given)

    def sharpened(by: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * by * math.log(factor) + 1.0

    part, whole = values.get("mscale"), values.get("mscale_all_dim")
    if part and whole:
        return sharpened(float(part)) / sharpened(float(whole))
    return sharpened(1.0)
