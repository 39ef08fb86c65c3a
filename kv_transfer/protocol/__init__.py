"""The handoff protocol without any I/O: state in, event in, ordered effects out.

Nothing here knows a socket, thread, clock, torch or gRPC. Transition tables decide what is legal;
an illegal event raises and changes nothing. `docs/handoff.md` is generated from the tables.

May import: `kvferry` and numpy.

Reading order: `key`, `messages`, `states` (the tables), `deadlines`, `region`, `effects`, `errors`,
`source`, `sink`, `link`, `tombstones`; then `lanes`, `credits` and `coverage`, the arithmetic of
what is carried.
"""
