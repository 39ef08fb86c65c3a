"""The KV of one worker as a closed loop: who owns which slot, and who may free it.

May import: `kvferry`, numpy and torch; the tree and the allocators not even torch. No I/O, no
threads, no clock: every object here belongs to one thread, the worker's engine thread. Only
`copier` has threads of its own, and only `file_tier`, which runs there, does I/O.

Reading order: `layout`, `req_to_token_pool`, `slot_allocator` (rows, slots); `kv_pool`, and the
bytes behind it: `element_codec`, `paged_pool`, `mha_pool`, `mla_pool`, `pool_choice`;
`tree_node`, `eviction`, `radix_cache`, `chunk_cache` (the prefix index); `attention_window` and
`window_radix_cache` (of a model that attends to the last tokens only); `request_kv` and
`kv_cache`, the only object that others call; `host_pool`, `copier`, `tiered_radix_cache` and
`host_tier` (what is evicted lives on in host memory); `page_file`, `file_tier`, `host_files`;
`ledger`, the checks that hold it all together; `factory`, where implementations are chosen.
"""
