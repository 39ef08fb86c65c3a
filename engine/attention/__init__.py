"""Attention over paged KV: what a step reads (`metadata`) and how a CPU computes it (`cpu`).

May import: `engine.model_spec`, `kvferry`, torch, numba. `metadata` knows no backend.
"""
