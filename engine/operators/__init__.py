"""Everything of a decoder layer but attention: one interface, one implementation per kind of device.

May import: torch, numba. Reading order: `interface`, `torch_operators` (any device and dtype; the
meaning of each), `native_operators` (float32 on a CPU; the speed) over `native_kernels`.
"""
