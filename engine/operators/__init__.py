"""A decoder layer but its attention: one interface, an implementation per kind of device.

May import: torch, numba and its llvmlite. Reading order: `interface`, `torch_operators` (any device
and dtype; the meaning of each), `native_operators` (float32 on a CPU; the speed) over
`native_kernels` and `dot_tile`, the inner loop of a product.
"""
