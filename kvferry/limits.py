"""Fixed limits of kvferry, each with where it comes from. Tunable ones are in `config`.

What concerns one module alone stands there: the deadlines of the protocol's states in
`kv_transfer.protocol.deadlines`, the outbox of a session in `kv_transfer.session`.
"""

from __future__ import annotations

# --- what a client may send -----------------------------------------------------------------

STOP_STRINGS_MAX = 16
"""Each is searched in the text of every step; OpenAI allows 4."""

STOP_STRING_CHARACTERS_MAX = 512
"""The router holds back up to this many characters that could begin a stop string."""

STOP_TOKEN_IDS_MAX = 128

LOGIT_BIAS_ENTRIES_MAX = 1024

LOGPROBS_MAX = 20
"""As OpenAI's `top_logprobs`."""

SAMPLES_MAX = 16
"""Answers to one prompt. Each takes a row and a place in the batch of one worker; half of the
default batch leaves room for others."""

CONSTRAINT_CHARACTERS_MAX = 65_536
"""Of a JSON schema, regex or grammar. The largest schemas that people publish for structured
answers are about this long."""

REQUEST_ID_CHARACTERS_MAX = 128

CACHE_SALT_CHARACTERS_MAX = 256

TENANT_CHARACTERS_MAX = 128

CACHE_PRIORITY_MAX = 100
"""Of a request's KV, and its negative the least: more levels than anybody can tell apart."""

CHAT_MESSAGES_MAX = 4096

PROMPT_CHARACTERS_PER_TOKEN_MAX = 128
"""Times the tokens of the context is the longest text that is tokenized at all. The longest tokens
of today's vocabularies are runs of as many spaces. Some texts without a space take a second of CPU
for each MiB."""

API_KEYS_MAX = 1024
"""Every call is compared with all of them: some 0.2 ms for so many."""

API_KEY_CHARACTERS_MIN = 16
"""Random ones of this length have 64 bits even in hexadecimal digits: none is found by trying."""

API_KEY_CHARACTERS_MAX = 512

CLIENT_MESSAGE_BYTES_MAX = 16 * 2**20
"""A 1 M-token prompt as token ids is at most 5 MB; as text about 5 MB. Three times that."""

WORKER_MESSAGE_BYTES_MAX = 64 * 2**20
"""Between our own processes: snapshots of KV events are the largest, 8 bytes per block."""

# --- bounded buffers ------------------------------------------------------------------------

KV_EVENT_BLOCK_TOKENS_MIN = 16
"""Events speak of blocks of at least this many tokens, so that page size 1 costs the router no
hash per token. 16 tokens is the block of most engines."""

KV_EVENTS_BUFFERED_MAX = 65_536
"""Blocks queued per subscriber. One that is further behind gets a snapshot instead."""

HANDOFF_TOMBSTONES_MAX = 65_536
"""Ended handoffs remembered per worker, to swallow late messages. At 100 handoffs a second
this is 10 minutes, about twice the longest that a handoff may take."""

AUDIT_VIOLATIONS_MAX = 100
"""Told of one audit. The first few show what is wrong; the rest mostly follows from them."""

# --- constrained answers ----------------------------------------------------------------------

GRAMMARS_KEPT_MAX = 64
"""Compiled constraints that a process remembers, by their text: mostly some 100 KB each."""

CONSTRAINT_COMPILE_CPU_S_MAX = 1.0
"""A constraint that takes longer to compile is refused. The schemas of ordinary requests take some
milliseconds, 64 KiB of nested objects with dates and ranges 0.2 s. A worker takes as long, beside
its engine thread."""

CONSTRAINT_COMPILE_BYTES_MAX = 3 * 2**30
"""Address space of the process that tries: most of it is reserved stack and the library's code.
Only what explodes comes near."""

CONSTRAINT_CHECK_TIMEOUT_S = 30.0
"""Longest wait of a request for the process that tries its constraint: a start of it, and some
constraints of others."""

CONSTRAINT_VERDICTS_KEPT_MAX = 1024
"""Constraints of which a router remembers whether they may pass: of 64 KiB at most."""

CONSTRAINT_FIRST_MASK_CPU_S_MAX = 0.05
"""A constraint whose first mask takes longer is refused. Those of ordinary ones take 0.1 to 5 ms,
the first one builds most of the lexer."""

CONSTRAINT_MASK_CPU_S_MAX = 0.25
"""An answer one of whose masks takes longer is given up. The library's own limits end most such
masks before; this is the bound of what one answer can cost the others in one step."""

CONSTRAINTS_STEP_CPU_S_MAX = 0.02
"""Masks of one step. Those that are left sit the step out, and come first in the next one: 400
answers of 50 microseconds, more than a batch has."""

# --- adapters ---------------------------------------------------------------------------------

ADAPTERS_MAX = 64
"""Each is in the memory of every worker: of rank 16, some 1 % of the model it adapts."""

ADAPTER_RANK_MAX = 512
"""As other engines allow. At 512 an adapter of a small model is as large as what it adapts."""

ADAPTER_NAME_CHARACTERS_MAX = 128
"""Clients send it as the name of a model."""

# --- speculation ------------------------------------------------------------------------------

DRAFT_TOKENS_MAX = 8
"""Tokens guessed per sequence and step: of nine in ten right guesses, 43 % are right to the eighth
in a row."""

# --- the console ----------------------------------------------------------------------------

CONSOLE_WORKERS_MAX = 256
"""Workers that one answer shows: some 150 KB of JSON. More would not fit a screen."""

CONSOLE_TREE_NODES_MAX = 1000
"""Of one view of an index: 100 bytes each on the wire, 200 as JSON, and as much as can be drawn."""

CONSOLE_TREE_DEPTH_MAX = 256

CONSOLE_TREE_TOKENS_MAX = 64
"""Shown of one edge: about two lines of text."""

TREE_NODES_LOOKED_AT_MAX = 20_000
"""For one view, out of however many there are: some 10 ms between two steps of the engine."""

TREE_PATH_NODES_MAX = 4096
"""Edges to the node where a view begins: a conversation of so many turns."""

HANDOFFS_SHOWN_MAX = 1000
"""Of one worker, oldest first: more than its rows by default."""

VIEW_TIMEOUT_S = 5.0
"""How long a worker may take to come to a view: a step, and the view itself."""

VIEW_CALL_GRACE_S = 1.0
"""More than that for the hop to the worker, so that its own answer comes first."""

CONSOLE_TREE_INTERVAL_S = 0.25
"""Between two views of one worker's index, whoever asks: at most some 4 % of its engine's time."""

CONSOLE_TREE_WAITING_MAX = 4
"""Who may wait for a view of one worker; further ones are told to come again."""

CONSOLE_HANDOFF_WORKERS_MAX = 64
"""Workers asked at a time for their handoffs, those with most of them."""

CONSOLE_SAMPLES_KEPT = 900
"""Of the load, one a second: a quarter of an hour, some 200 KB."""

CONSOLE_LATENCIES_KEPT = 2048
"""Of requests that ended lately, for percentiles of some seconds: of 130 requests a second."""

CONSOLE_EVENTS_KEPT = 100

CONSOLE_DEPARTED_S = 60.0
"""So long a worker that left is shown where it was."""

CONSOLE_REQUESTS_MAX = 200
"""Requests that one answer tells of: some 1 KB each."""

CONSOLE_ANSWER_KEPT_S = 0.5
"""For so long an answer is given to everybody who asks the same: ten pages cost what one does."""

# --- deadlines, in seconds ------------------------------------------------------------------

SESSION_CONNECT_TIMEOUT_S = 5.0
WORKER_STATUS_TIMEOUT_S = 2.0
WORKER_START_TIMEOUT_S = 300.0
"""Loading a converted model takes seconds, a first import of torch on a cold disk up to 60. Kernels
that no process of the machine has compiled yet take 20 on two idle cores; on a machine with a load
of 15 a start was not done after 120."""

AUDIT_TIMEOUT_S = 20.0
"""How long a worker may take to come to an audit and run it: a step, seconds at most on a busy
machine, and the checks, which take some 10 ms for 10^5 slots."""

AUDIT_CALL_GRACE_S = 2.0
"""More than that for each hop to the worker, so that its own answer comes first."""

STOP_TIMEOUT_S = 10.0
"""For a process to end that has nothing left to do; routers have `router.stop_grace_s` before."""

STOP_GRACE_S_MAX = 3600.0
"""Longer is no stop."""

IDLE_AUDIT_INTERVAL_S = 10.0
"""An idle worker that has computed something runs all ledger checks, no more often than this: a
full audit of 10^5 slots takes about 10 ms."""
FULL_COLLECTION_IDLE_S = 60.0
"""An idle worker looks for garbage in cycles no more often: about 1 us per node of the index."""
FULL_COLLECTION_INTERVAL_S = 600.0
"""A busy one no less often. Cycles are what failed requests leave behind: some kilobytes each."""
ENGINE_IDLE_WAIT_S = 0.25
"""Longest sleep of an idle engine thread; deadlines are looked at no less often."""

WRITER_CHECK_INTERVAL_S = 1.0
"""How often a call that waits for the engine's next token asks whether there still is one."""

ATTEMPTS_MAX = 3
"""Tries of one request in a row that bring no token, before its client sees the error."""

ATTEMPT_FAILURES_MAX = 16
"""Failed tries of one request in all, however far each of them came. An answer of ten minutes
outlives a worker a minute; a request that brings workers down does not do so for ever."""

RESUME_PATIENCE_S = 30.0
"""How long an answer that broke off waits for a worker with room for it: a process that takes the
place of another one has its model after some seconds, on a busy machine some tens of them."""

# --- supervision, in seconds ----------------------------------------------------------------

HEALTH_INTERVAL_S = 1.0
"""Between two questions whether a process makes progress. Its death is noticed without asking."""

ENGINE_TURN_MAX_S = 60.0
"""An engine thread that has not come round for so long hangs. The longest step computes one chunk
of `scheduler.chunk_tokens`: 128 tokens of a 135M model are 0.45 s of one core, a few seconds of a
slow or busy one. Ten times that, because a replaced worker loses its cache."""

RANK_TIMEOUT_S = ENGINE_TURN_MAX_S / 2
"""Longest wait of a tensor-parallel rank for another one: well below the limit of the whole step.
Between two sums a rank computes half a layer."""

HEALTH_SILENCE_MAX_S = 60.0
"""A running process that shows no progress for so long is replaced. Far above the longest engine
step (512 prompt tokens take seconds on a busy core), because a replaced worker loses its cache."""

UNREACHED_MAX_S = 30.0
"""A running process to which there is no connection is replaced after so long. A network that is
cut for 20 s and comes back costs nobody a cache; routers send such a worker nothing new meanwhile.
A process that died, or whose node has, is replaced as soon as Ray says so."""

TAKEOVER_ANSWER_S = 15.0
"""For a process to tell a new supervisor what it is. There is no hurry, since everybody serves
meanwhile; one that says nothing for so long is watched as if it were being started."""

SUPERVISION_GAP_MAX_S = 10.0
"""A supervisor that did not come round for so long has heard nobody, for which nobody is to blame:
silence is counted anew. A head that restarts keeps its callers waiting for about as long."""

SUPERVISOR_AWAY_MAX_S = 120.0
"""For a supervisor to be started again by Ray: some seconds, and as long as a head is away."""

SUPERVISOR_FIND_S = 10.0
"""For Ray's head to say where the supervisor is. Without a head it says nothing."""

RECORD_SAVE_TIMEOUT_S = 10.0
"""For an order to be on record before its caller is told that it is carried out."""

ROLLOUT_CHECK_INTERVAL_S = 1.0
"""Between two looks at a rollout of which nothing has been reported."""

RESTART_BACKOFF_MAX_S = 30.0
RESTART_BACKOFF_RESET_S = 60.0
"""A process that ran for so long did not die of its start: the next backoff is short again."""

DRAIN_S = 600.0
"""For a worker that is taken out to do what it has: the longest life of a request by default."""

WORKERS_MAX = 4096
"""Of one role, as an operator may order: more is a slip of a finger."""

DRAIN_S_MAX = 86_400.0
"""Longer is no drain."""

# --- the planner ------------------------------------------------------------------------------

PLANNER_ATTAINMENT_MAX = 0.999
"""More cannot be told from the requests of a minute: fewer than a thousand mostly."""

PLANNER_INTERVAL_S_MAX = 60.0
"""A load that changes in longer than that needs no planner."""

PLANS_KEPT_MAX = 256
"""Remembered for `kvferry plan`: some minutes of the default interval, about 1 kB each."""

# --- Ray --------------------------------------------------------------------------------------

SUPERVISOR_ABSENCE_MAX_S = 90.0
"""Of a supervisor that is being started again, seen by who stays with its cluster: as long as a
worker's start, without the disk being cold. Then the cluster counts as gone."""

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's shared memory. No request data passes through it; this is about the least it accepts."""

# --- the router -----------------------------------------------------------------------------

ROUTERS_MAX = 64
"""Every router keeps a stream of events and one of status to every worker, 64 times what one costs
a worker; one router passes the tokens of some thousand streams."""

INDEXED_BLOCKS_MAX = 2**22
"""Different blocks the router remembers of one pool: 67 M tokens at blocks of 16, the KV of 64
workers with 10^6 tokens each. Each takes 24 to 64 bytes, at most 128 MiB together, and half of
that more for each further 64 workers. What is beyond is stored but not found."""

INDEXED_BLOCKS_PER_WORKER_MAX = 2**20
"""Of one worker, so that the largest one leaves room for others: 16.8 M tokens at blocks of 16,
more than the KV of a worker with 1 TB."""

INDEXED_BLOCKS_APPLIED_AT_ONCE = 512
"""Blocks of a snapshot that the router takes before it looks at something else: 0.2 milliseconds.
A router that starts takes the snapshots of all workers at the same time."""

WORKER_STATUS_FAILURES_MAX = 3
"""Unanswered status calls in a row after which a worker's streams are given up. One is enough
to send it no new requests; on a busy machine a call may be late without anything being wrong."""

TENANTS_REMEMBERED_MAX = 4096
"""Idle ones are forgotten beyond this many, about 1 kB each. Those with requests never are: there
are no more of them than requests."""

RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 60.0
"""Bounds of the hint to refused clients: none asks again at once, none gives up for good."""

REQUESTS_KEPT_MAX = 100_000
"""In the log of a router: at about 3 kB each, and as many refused ones, 600 MB."""

TRACES_TOLD_MAX = 500
"""In one answer: at most 20 kB each, with every attempt that may be remembered."""

ATTEMPTS_REMEMBERED_MAX = 16
"""Of one request, in the router's log: an answer that has begun asks full workers again."""

ERROR_TEXT_CHARACTERS_KEPT = 400
"""Of an error in that log; longer ones list what was expected."""

KV_EVENTS_RETRY_S = 0.5
"""Pause before a broken stream of KV events is opened again."""

KV_EVENTS_MARK_INTERVAL_S = 1.0
"""How often a worker tells the number of its last batch of KV events: so long may a router believe
what is not so because the last batch was lost."""

KV_EVENTS_SILENCE_MAX_S = 15.0
"""A stream of KV events without even a mark for so long is opened again: fifteen marks, and longer
than all but the worst steps of an engine on a busy machine."""

CALLS_AT_ONCE_MAX = 1000
"""Of the supervisor's and a router's actor: watchers pend for as long as a process lives, a few for
each member, and must not block other calls."""
