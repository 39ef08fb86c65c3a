"""How the worker that computes a prompt is chosen.

Each policy is a pure function from a snapshot (`pool.PoolView`) and the prompt to one cost per
worker; the least is taken, equal ones are drawn at random. What a policy remembers of its own
decisions is in `history` (`pending_prompts`, `prefix_uses`, `sent_prefixes`). Imports numpy and
compiled loops (`router.compiled`), no network, no clock. Reading order: pool, history, priced_time
(the default), then the others, catalogue.
"""
