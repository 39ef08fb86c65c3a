"""What every layer of kvferry shares: ids, errors, limits, configuration, time, wire types.

May import: the standard library, numpy, grpc and protobuf. Never torch, never Ray.

Reading order: `ids`, `errors`, `limits`, `clock`, `config`, `config_checks`, `membership`,
`sampling`, `attempt_marks`, `generation`, `kv_events`, `accounts`, `telemetry`, `trace_context`,
`model_files`, then `convert`, the one place where protobuf messages become these types.
"""
