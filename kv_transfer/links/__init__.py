"""Transports: how the payloads of one lane get from a source rank to a sink rank.

May import: `kv_transfer.{outgoing,incoming,chunk_header}`, the protocol, torch. Never a session.

Reading order: `interface`, `rendezvous`, `staging`, then the transports, `shared_memory`, `gloo`
and `nccl`, and `choice`, which picks one.
"""
