"""Transports: how the payloads of one lane get from a source rank to a sink rank.

May import: `kv_transfer.{outgoing,incoming,chunk_header}`, the protocol, torch. Never a session.

Reading order: `interface`, `rendezvous`, `staging` and `lane_thread`; `doorbell`, `unix_stream`,
`shared_ring` and `shared_memory`; `signalled_lane` with `gloo` and `nccl`; `choice`, which picks
one of them.
"""
