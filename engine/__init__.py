"""The model: from token ids and KV slots to the next token of every sequence.

May import: `mem_cache`, `kvferry`, torch, numba. Never `kv_transfer`, a role, or Ray.

Reading order: `model_directory` (which model) and `model_spec` (its shape), `forward_batch` (what
one step computes), `attention.metadata` (where its KV lies), `llama` (the computation),
`model_runner` (the one object the step loop calls), `sampler` (the choice of the token).
"""
