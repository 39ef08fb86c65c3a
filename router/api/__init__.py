"""The protocols that clients speak to the router.

Reading order: `grpc_server` (what is served), `inference_service`, `admin_service`, then
`message_parsing` (how a message that cannot be read gets an error naming its field). HTTP:
`http_server`, `openai_service`, then `openai_body`, `openai_requests` and `openai_answers`.
`security` says who may call, for gRPC (`security_guard`) and HTTP alike; `smg_service` speaks the
gateway smg's engine protocol.
"""
