"""The source side of a worker: computes prompts for others and holds their KV until taken.

May import: engine, kv_transfer, mem_cache, kvferry. Never decode_worker, router, cluster.

Reading order: `prompt_source`, `return_policy`, `return_sink`.
"""
