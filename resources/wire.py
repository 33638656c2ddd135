"""Names of the messages between driver, scheduler plugin and workers, and what travels in them.

All travel on Dask's own ordered streams or as its RPCs, as msgpack (no pickle). Invariant: a message named here has one
sender and one receiver; its fields are listed beside it. Task results travel as the *metadata* of Dask's task-finished
message under `METADATA`, so a result is delivered if and only if the scheduler accepted that run of the task.
"""

from __future__ import annotations

from typing import Any

METADATA = "libra"
"""Key of ``TaskState.metadata`` under which a body leaves its result (a dict of plain values and bytes)."""

ANNOTATION = "libra"
"""Key of ``TaskState.annotations`` under which the plugin writes what it has decided for a task: ``trajectory``,
``turn``, ``version``, ``bucket``, and for a segment after a move ``kv``: ``sources`` ([[worker, node, address]] where
KV may lie), ``fetching`` and ``prefilling`` (seconds that bringing it and computing it should take, or None). Dask
sends it to the worker with the task."""

# driver → plugin, RPC (``client.scheduler.<name>(...)``); each but the claim takes ``token``.
CLAIM = "libra_claim"
"""``spec`` (RunSpec.to_wire), ``client`` (id), ``answers`` (``stream`` or ``topic``: how `RESULT` and `EVENT` come) →
``{"token", "roles", "notes"}``, or ``{"error"}`` that names the holder. (``reply`` is a keyword of Dask's own RPC.)"""
RELEASE = "libra_release"
"""→ ``{}`` once every role of the run has stopped (or ``stop_seconds`` have passed)."""
STATUS = "libra_status"
"""→ roles and states by worker, instances, weight versions, counters; for displays and for naming what a wait needs.
Without a token: the plugin's versions and who holds the cluster."""
SET_ROLE = "libra_set_role"
"""``worker`` (name or address), ``role`` (or None), ``tp`` → ``{}``; ``{"error"}`` if the worker cannot take it."""
SET_WEIGHTS = "libra_set_weights"
"""``version``, ``path``, ``digest`` → ``{}``: rollout workers load it; announced by `EVENT` ``weights``."""
REPORT_STEP = "libra_report_step"
"""``step``, ``seconds`` since the last one, ``train_seconds`` of its update, ``records`` (the step's batch as plain
`RequestRecord`s) → ``{}``: what replanning goes by; announced by `EVENT` ``replan``. Ignored in a run that does not
replan."""
AWAIT_BATCH = "libra_await_batch"
"""worker → plugin: ``run``, ``version`` → the batch's record once the driver has posted it (`POST_BATCH`)."""
POST_BATCH = "libra_post_batch"
"""``version``, ``record`` (plain dict): wakes `AWAIT_BATCH`."""

# driver → plugin, stream
OPEN = "libra-open"
"""``token``, ``opened``: {key: [context tokens, prompt]} of first rollouts and residences, sent before their graph."""
END = "libra-end"
"""``token``, ``ended``: [[trajectory, final context tokens | None]]: engines drop their KV, workers their sessions.
None: it failed or was given up."""

# plugin → driver, stream
RESULT = "libra-result"
"""``key``, ``value``: what the body left under `METADATA`. The plugin has released the key in the same tick."""
GROWN = "libra-grown"
"""``segments``: [[key, segment]]: those of `SEGMENT` that count, in order."""
EVENT = "libra-event"
"""``event`` and its fields: ``role`` (worker, role, state, version, error, given_up, and ``loads``, the version that a
starting engine will look for), ``weights`` (worker, version, error), ``unbound`` (key, reason), ``lost`` (worker,
role), ``residence`` (key, reason: its worker is lost, it was released and will not run again), ``alarm`` (where,
error), ``progress`` (fields), ``replan`` (action, reason, and figures), ``kv_refused``
(worker, reasons: {reason: how often more} KV was not loaded or not staged)."""

# worker → worker, RPC
KV_ENTRY = "libra_kv_entry"
"""``run``, ``trajectory``, ``version``, ``context`` (int32 bytes) → ``seq``, ``matched`` (tokens) and ``layout`` of the
KV that the worker has staged, or ``refused`` (why)."""
KV_CHUNK = "libra_kv_chunk"
"""The same, and ``seq``, ``first``, ``last`` (rows of the entry) → ``data`` and its CRC-32C ``checksum``, or
``refused``."""

# plugin → worker, stream
RETAG = "libra-retag"
"""``resources``: {tag: quantity}, ``stimulus_id``. Ordered before any task that relies on it."""
RECALL = "libra-recall"
"""``key``, ``stimulus_id``: give the task back if it has not started."""
START_ROLE = "libra-start-role"
"""``role``, ``epoch``, ``spec``, ``tp``, ``weights`` ({version, path, digest} or None)."""
STOP_ROLE = "libra-stop-role"
"""``epoch``, ``run_ends``: end the role's child processes, drop sessions; answered by `ROLE_STATE` ``stopped``. Staged
KV outlives a role that is changed or restarted; where ``run_ends``, the run's claim does, and the worker, with a role
or without one, frees all that it keeps for the run before it answers."""
DRAIN = "libra-drain"
"""``epoch``, ``drains``: whether a rollout role ends the requests that it has (their tokens so far are kept, their KV
is staged) and takes none, or takes requests again."""
LOAD_WEIGHTS = "libra-load-weights"
"""``epoch``, ``weights``: {version, path, digest}; answered by `WEIGHTS_LOADED`. Idempotent by version."""
FORGET = "libra-forget"
"""``trajectories``: drop their KV, that of an earlier role too, and their sessions."""
ANSWER = "libra-answer"
"""``answers``: [[number, stays, error]]: the policy's decision on an `ASK`: whether the trajectory goes on here, or why
there is none."""

# worker → plugin, stream
ROLE_STATE = "libra-role-state"
"""``role``, ``epoch``, ``state`` (``ready``, ``failed``, ``lost``, ``stopped``), ``version`` (loaded, or None),
``slots``, ``kv_room`` (the fields of a rollout role's `KVRoom`, or None), ``error`` (the child's own text). ``lost``: a
ready role's child has died."""
WEIGHTS_LOADED = "libra-weights-loaded"
"""``epoch``, ``version``, ``digest``, ``error`` (None, or the engine's own text)."""

SEGMENT = "libra-segment"
"""``segments``: [[key, run, segment]]: what residences have finished, as it ends. ``run``: Dask's run id of the task,
which tells a stale one; ``segment``: packed ``tool``, ``segment`` and ``action``, which only the driver opens."""
MOVED = "libra-moved"
"""``moves``: [[key, migration]]: the fields of the `Migration` of a segment that was the first after a move."""
ASK = "libra-ask"
"""``asks``: [[number, key, run, turn, [type, size, status], context]]: a residence's tool has returned; does the
trajectory go on here? Answered by `ANSWER`."""

PROGRESS = "libra-progress"
"""``fields``: plain values a person may want to see (cold start); the plugin passes it on as `EVENT` ``progress``."""

EXTENSION = "libra"
"""Name of the scheduler and worker extension: heartbeats carry the engine's stats."""


Message = dict[str, Any]


def topic(client: str) -> str:
    """The topic on which the plugin sends `RESULT` and `EVENT` to a client that claimed with ``answers="topic"``."""
    return f"libra-{client}"


def rpc(op: str) -> str:
    """The RPC that takes what the stream message ``op`` takes, for clients that use public API only."""
    return op.replace("-", "_")
