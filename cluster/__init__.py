"""Everything that knows Ray, and the composition of all the rest into running processes.

May import every other package; nothing imports this one. Ray itself is imported by
`ray_*` alone, so that what decides is tested without it.

Reading order: `members` (what shall run), `cluster_state` (desired against observed, pure),
`launcher` (what a process can be asked), `supervisor` (drives the state), `ray_launcher` and
`ray_runtime` (Ray's side of it), `worker_actor` and `router_actor` (what the processes host),
`local_cluster` (all of it on one machine), then `cli` with `commands`, `console` and `demo`.
"""
