"""What is said over the manager's socket: msgpack of these types, nothing else.

A client asks and gets an Answer by the number of its request; a Result comes for every task that was taken, once. The
ranks other than 0 connect to rank 0 in the same way. A message that is none of these is answered with code "malformed".
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, TypeAlias

import msgspec

MAX_MESSAGE_NBYTES = 8 << 20


class Kind(IntEnum):
    """What a task moves: FastDeploy's CacheStatus."""

    SWAP2CPU = 1
    SWAP2GPU = 2


class State(IntEnum):
    """Where the caches are: FastDeploy's KVCacheStatus."""

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
Handles: TypeAlias = dict[Text, Handle]  # of caches, by their names


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """All of them."""


class Task(msgspec.Struct, forbid_unknown_fields=True):
    """Copy GPU block gpu_block_ids[i] <-> host block cpu_block_ids[i], in all layers.

    transfer_task_id: the client's own name for it, of no other task that is under way. event_type: a Kind.
    swap_node_ids: the engine's, handed back as they are.
    events: for each rank an exported event, recorded on the engine's stream after the kernels that the copy must wait
      for, or None; None for all: the engine promises that those kernels are over.
    """

    transfer_task_id: Text
    event_type: int
    gpu_block_ids: list[BlockId]
    cpu_block_ids: list[BlockId]
    swap_node_ids: list[int | Text] = []
    events: list[Handle | None] | None = None


# -- from clients -----------------------------------------------------------------------------------------------------


class Submit(Message):
    """known: of Result.lost, the numbers that the caller was told of before it sent this, of blocks that it names."""

    request: Request
    task: Task
    known: list[Request] = []


class GetStatus(Message):
    request: Request


class Drain(Message):
    """Take no more tasks, and answer when those under way have ended. undo: take tasks again."""

    request: Request
    timeout: Seconds
    undo: bool = False


class Attach(Message):
    """The engine's caches are there: handles of each rank, or None for FastDeploy's segments by their names."""

    request: Request
    timeout: Seconds
    handles: list[Handles] | None = None


class Clear(Message):
    request: Request
    timeout: Seconds


class Restore(Message):
    request: Request
    timeout: Seconds
    handles: list[Handles] | None = None


class GetHandles(Message):
    """Of the caches that the managers created."""

    request: Request


class Bye(Message):
    """The client ends, so that results of its tasks go nowhere, or has read Closing."""


# -- to clients -------------------------------------------------------------------------------------------------------


class Answer(Message):
    """code: "ok", or why not: "full", "not_ready", "refused", "malformed", "busy", "timeout", "failed"."""

    request: Request
    code: str
    message: str = ""
    body: Any = None


class Result(Message):
    """How a task ended, on all ranks. rank, reason: the first rank that failed, and why.

    lost: of a task that failed, the GPU blocks that do not hold what they should: those that it should have written, or
      those that it should have read; with a number of the failure that it comes from.
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


class Closing(Message):
    """Rank 0 ends: this is the last that it says. It waits a little for Bye, because what is not read when a connection
    ends is lost."""


# -- between ranks ----------------------------------------------------------------------------------------------------


class Hello(Message):
    """A rank comes. shape: what all ranks of a model have in common, in words."""

    rank: Rank
    shape: str


class Welcome(Message):
    state: int


class Refuse(Message):
    """Rank 0 does not want this rank: it ends."""

    message: str


class Beat(Message):
    """A rank is alive. ready: it takes tasks. phase: what it does, in a word or two. busy: tasks that it has; orphans:
    of those, how many were given up."""

    rank: Rank
    ready: bool
    phase: str
    busy: int
    generation: int
    handles: Handles | None = None  # of caches that it created, when they are new
    orphans: int = 0


class Unknown(Message):
    """Rank 0 was started again, and asks for Hello."""


class Do(Message):
    number: int
    task: Task


class Done(Message):
    rank: Rank
    number: int
    ok: bool
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
    ok: bool
    reason: str


class Leave(Message):
    """A rank wants to end; rank 0 sends it no more tasks, and Left when it has none."""

    rank: Rank


class Left(Message):
    """A rank may end."""


FromClient: TypeAlias = Submit | GetStatus | Drain | Attach | Clear | Restore | GetHandles
FromRank: TypeAlias = Hello | Beat | Done | StepDone | Leave
ToRank: TypeAlias = Welcome | Refuse | Unknown | Do | Step | Left
ToClient: TypeAlias = Answer | Result | Closing

encode = msgspec.msgpack.Encoder().encode
to_server = msgspec.msgpack.Decoder(FromClient | FromRank | Bye)
to_rank = msgspec.msgpack.Decoder(ToRank)
to_client = msgspec.msgpack.Decoder(ToClient)
