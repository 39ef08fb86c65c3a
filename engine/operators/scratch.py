"""Memory that a part of shared work needs for itself, by its address.

Not an array: Numba frees one after its last use, which taking its address may well be.
"""

from __future__ import annotations

from numba import types

from engine.native_memory import library_function

take = library_function("malloc", types.intp(types.uintp))
"""So many bytes; their address."""
give_back = library_function("free", types.void(types.intp))
"""What `take` gave."""
