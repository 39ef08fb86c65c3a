"""A cluster in simulated time: the product's decisions, with models of what takes time.

Real are the router's choice, load book, prefix index and admission, the workers' radix trees,
allocators, rows and ledgers, and the events between them. Modelled are steps (`step_times`), what a
step contains (`worker`, as `engine.scheduler` plans it), links, and delays of messages.
docs/simulate.md says what that is good for.

May import `bench`, `router`, `mem_cache` and `kvferry`. What is above is given to it.

Reading order: `settings`, `step_times`, `timing` with `fit` and `profile_fit`, `host`, `workload`,
`event_queue`, `simulation`, `sim_router`,
`handoffs`, `cache_news`, `worker`, `answers`, `worker_kv`, `page_ids`, `page_cache`, `run_columns`.
"""
