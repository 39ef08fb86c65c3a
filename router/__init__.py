"""The front door and the brain: which workers serve a request, and the client's one stream.

A request's way through this package: `api` (bytes to types) -> `router` (limits, cancelling) ->
`validation` + `constraint_gate` + `tokenizer` -> `attempts` (choose workers, call, retry) ->
`response_stream` (tokens to text, stop strings, figures) -> `api` again.

What decides is pure and runs without a network: `prefix_index` (who holds which prefix), `load`
(who has how much to do), `policy` and `policies` (whom to choose), `detokenizer`, `stop_strings`,
`validation`, `text_cuts` (where a text may be cut), `fair_queue` (who is served next; `turns`: one
at a time). What talks to workers: `worker_client` (one worker), `grpc_worker_client` and
`attempt_exchange` (over gRPC), `worker_monitor` (its status and KV events), `fleet` (all of them),
`draining` (whether one that leaves is done). What became of requests: `request_log`, and
`timeline`, which makes spans of it.

May import `kvferry`, and never torch or Ray.

Reading order: `request`, `router`, `attempts`, `route_chooser`, `policy`, `policies`,
`prefix_index`, `load`, `fleet`, `response_stream`, `api`.
"""
