"""Moves the KV of a prompt from the worker that computed it to the worker that decodes.

A *handoff* has a source and a sink. Control messages travel on a *session* (one gRPC stream per
pair of workers), payloads on the lanes of a *link* (one lane per pair of ranks that share heads).

May import: `mem_cache`, `kvferry`, torch, grpc. Never `engine`, never a role, never Ray.

Reading order: `protocol` (pure: who may say what, when), `hosts` (what a worker implements);
`chunk_header`, `outgoing` and `incoming` (what link threads do, and when they may), `links` (the
transports); `wire`, `events`, `session`, `session_links` and `session_hub`; then `endpoint`,
`trace`, `outgoing_link`, `prompt_times`, `source_side`, `transfer_rate`, `fetch_failure`,
`sink_side`, `handoff_views` and `driver`, which connect the protocol to sessions, links and pools.
"""
