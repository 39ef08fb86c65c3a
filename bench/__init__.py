"""Load on a running cluster and what came of it: prompts, senders, run records and what they say.

May import `router` and what is below it, and never torch or Ray. Knows no cluster but by its front
doors, so that any server of OpenAI's API can be measured in the same way.

Reading order: `record` (the one file that a run leaves), `summary` (what the figures mean),
`prompt_tree` and `traces` (published traces in one form), `plan` (what is asked for), `workload`
with `datasets` and `trace_workload` (which prompts), `arrivals` and `sender` (when), `answer` with
`grpc_endpoint` and `http_endpoint` (how), `client_process`, `client_pool` and `parts` (by whom).

What reads records: `intervals` and `compare`, then `report`, which names those of its figures.
"""
