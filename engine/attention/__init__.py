"""Attention over paged KV: what a step reads (`metadata`) and how a CPU computes it (`cpu`).

May import: `engine.model_spec`, `kvferry`, `mem_cache.layout`, torch, numba. `metadata` knows no
backend. The CPU's, from above: `cpu`, `decode` and `chunks` cut a step into parts of work,
`decode_kernel` and `chunk_kernel` compute a part, out of `tiles`, which are made of `vectors`.
"""
