"""The generating side of a worker: takes attempts, fetches their KV or computes it, streams.

May import: engine, kv_transfer, mem_cache, kvferry. Never prefill_worker, router, cluster.

Reading order: `attempt_stream`, `attempt_times`, `intake`, `attempt_exchange`, `return_source`.
"""
