"""The messages on the manager's socket: these types, encoded as msgpack.

A client sends requests; each gets an Answer with the request's number. Every taken task gets one Result. The other
ranks connect to rank 0 in the same way. Any other message is answered with code "malformed".
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

MAX_MESSAGE_NBYTES = 8 << 20


class Kind(IntEnum):
    """The direction of a task: FastDeploy's CacheStatus (fastdeploy/cache_manager/cache_data.py, releases 2.0 to
    2.6)."""

    SWAP2CPU = 1
    SWAP2GPU = 2


class State(IntEnum):
    """The state of the caches: FastDeploy's KVCacheStatus."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


Text = Annotated[str, msgspec.Meta(max_length=256)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Request = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 10)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Handle = Annotated[bytes, msgspec.Meta(max_length=4096)]
Handles: TypeAlias = dict[Text, Handle]  # by the caches' names


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Task(msgspec.Struct, forbid_unknown_fields=True):
    """Copy GPU block gpu_block_ids[i] <-> host block cpu_block_ids[i], in all layers.

    transfer_task_id: the client's name for the task; unique among tasks under way.
    swap_node_ids: the engine's, returned unchanged.
    events: for each rank an exported event, recorded on the engine's stream after the kernels that the copy must wait
      for, or None. None instead of the list: the engine has synchronised with those kernels.
    """

    transfer_task_id: Text
    event_type: Kind
    gpu_block_ids: list[BlockId]
    cpu_block_ids: list[BlockId]
    swap_node_ids: list[int | Text] = []
    events: list[Handle | None] | None = None

    @property
    def sources(self) -> list[int]:
        """The blocks that the task reads."""
        return self.gpu_block_ids if self.event_type == Kind.SWAP2CPU else self.cpu_block_ids

    @property
    def targets(self) -> list[int]:
        """The blocks that the task writes."""
        return self.cpu_block_ids if self.event_type == Kind.SWAP2CPU else self.gpu_block_ids


# -- from clients -----------------------------------------------------------------------------------------------------


class Submit(Message):
    """known: for the task's blocks, the numbers from Result.lost that the client had received before it sent the
    task."""

    request: Request
    task: Task
    known: list[Request] = []


class Ask(Message):
    """what: "status" and "handles" (of the caches that the managers created) are answered with a body; "attach",
    "clear", "restore" and "drain" when all ranks have done so; "undo" undoes "drain".

    handles: of the engine's caches, by rank, for "attach" and "restore"; None: FastDeploy's segments.
    """

    request: Request
    what: Literal["status", "handles", "attach", "clear", "restore", "drain", "undo"]
    timeout: Seconds = 0.0
    handles: list[Handles] | None = None


class Bye(Message):
    """The client ends and reads no more results, or it has received Closing."""


# -- to clients -------------------------------------------------------------------------------------------------------


class Answer(Message):
    """code: "ok", or the reason of refusal: "full", "not_ready", "refused", "malformed", "busy", "timeout",
    "failed"."""

    request: Request
    code: str
    message: str = ""
    body: Any = None


class Result(Message):
    """The outcome of a task on all ranks. rank, reason: the first rank that failed, and why.

    lost: the lost GPU blocks of a failed task, with the number of the failure: those that a SWAP2GPU was to write, or
      those that a SWAP2CPU was to read.
    """

    transfer_task_id: str
    event_type: int
    swap_node_ids: list[int | str]
    gpu_block_ids: list[int]
    cpu_block_ids: list[int]
    ok: bool
    rank: int | None = None
    reason: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    lost: dict[int, int] = {}


def result_of(task: Task, ok: bool, rank: int | None, reason: str, **more: Any) -> Result:
    """The outcome of this task; more: further fields of Result."""
    names = (task.transfer_task_id, task.event_type, task.swap_node_ids, task.gpu_block_ids, task.cpu_block_ids)
    return Result(*names, ok, rank, reason, **more)


class Closing(Message):
    """Rank 0 ends; its last message. Rank 0 waits a bounded time for Bye, because unread messages are lost with the
    connection."""


# -- between ranks ----------------------------------------------------------------------------------------------------


class Hello(Message):
    """A rank connects. shape: its layout as text, which must equal that of rank 0."""

    rank: Rank
    shape: str


class Welcome(Message):
    state: State


class Refuse(Message):
    """Rank 0 refuses this rank, which then ends."""

    message: str


class Beat(Message):
    """A rank is alive. ready: it takes tasks. phase: what it does now, as text. abandoned: how many of its
    tasks are abandoned, that is reported failed while they still run. leaving: it is to end, and waits for Left."""

    rank: Rank
    ready: bool
    phase: str
    generation: int
    handles: Handles | None = None  # of the caches that the rank created; sent once
    abandoned: int = 0
    leaving: bool = False


class Unknown(Message):
    """Rank 0 was restarted and asks for Hello."""


class Do(Message):
    number: int
    task: Task


class Done(Message):
    """A rank has ended its part of a task. reason: why it failed, or empty; so in StepDone."""

    rank: Rank
    number: int
    reason: str
    nbytes: int
    seconds: float


class Step(Message):
    """what: "attach", "clear" or "restore"."""

    number: int
    what: str
    handles: Handles | None = None


class StepDone(Message):
    rank: Rank
    number: int
    reason: str


class Left(Message):
    """A leaving rank may end: no task of it is under way."""


class Number(msgspec.Struct):
    """What a malformed message may hold in spite of all."""

    request: Request = 0


# -- options in JSON --------------------------------------------------------------------------------------------------


class Speculative(msgspec.Struct):
    """--speculative_config, as far as it is used."""

    num_extra_cache_layer: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_gpu_block_expand_ratio: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0


class RoutingReplay(msgspec.Struct):
    """--routing_replay_config, as far as it is used."""

    enable_routing_replay: bool = False


FromClient: TypeAlias = Submit | Ask
FromRank: TypeAlias = Hello | Beat | Done | StepDone
ToRank: TypeAlias = Welcome | Refuse | Unknown | Do | Step | Left
ToClient: TypeAlias = Answer | Result | Closing

encode = msgspec.msgpack.Encoder().encode
to_server: msgspec.msgpack.Decoder[FromClient | FromRank | Bye] = msgspec.msgpack.Decoder(FromClient | FromRank | Bye)
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
