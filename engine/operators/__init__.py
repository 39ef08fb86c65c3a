"""A decoder layer but its attention: one interface, an implementation per kind of device.

May import: torch, numba and its llvmlite. Reading order: `interface`, `torch_operators` (any device
and dtype; the meaning of each), `quantized_weight` (what a product takes besides a tensor),
`native_operators` (float32 on a CPU; the speed) over `native_kernels` and `dot_tile`, the inner
loop of a product; `panel_kernels` and `panel_tile` for many inputs, `quantized_kernels` and
`group_tile` for int8 weights, `token_kernels` for the rest.
"""
