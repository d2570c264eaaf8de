"""The control messages between a client and a node of the remote tier: these types, as msgpack arrays.

A client sends requests; each gets one answer with the request's number. Abort, Release and Suspect get none. Lists of
keys are one string with 16 bytes a key; lists of numbers are little-endian int64. Bulk bytes never travel here.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from ._names import KEY_NBYTES as KEY_NBYTES

VERSION = 1
MOST_KEYS = 16384  # of one message
MAX_NBYTES = 1 << 20

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_NBYTES)]
Numbers = Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * 8)]


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


# -- from clients -----------------------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of a connection. block_nbytes 0: the client moves no blocks."""

    request: Number
    version: Number
    block_nbytes: Number


class Contains(Message):
    request: Number
    keys: Keys


class Locate(Message):
    """Where blocks are in the node's memory. Blocks of its files are brought there first."""

    request: Number
    keys: Keys


class Claim(Message):
    """Slots to write blocks to. replace False: none for a key that has a block."""

    request: Number
    keys: Keys
    replace: bool


class Commit(Message):
    """The slots of these claims have been written: check and publish them."""

    request: Number
    generations: Numbers


class Abort(Message):
    """The client will not commit these claims. idle: none of its transfers can still write to their slots."""

    generations: Numbers
    idle: bool


class Release(Message):
    """These places, of a Locate, are not read any more."""

    keys: Keys
    generations: Numbers


class Suspect(Message):
    """What a reader found at these places was wrong. The node checks the blocks itself."""

    keys: Keys
    generations: Numbers


class Delete(Message):
    request: Number
    keys: Keys


class GetStats(Message):
    request: Number


# -- answers ----------------------------------------------------------------------------------------------------------


class Welcome(Message):
    """agent, metadata: of the node's NIXL agent, for this run of the node. Slot i is at base + i * stride."""

    request: Number
    version: Number
    block_nbytes: Number
    agent: str
    metadata: bytes
    base: int
    stride: Number
    slots: Number


class Places(Message):
    """Of Locate and Claim: a slot for each key, or a negative number: why there is none. generations: of the slots."""

    request: Number
    slots: Numbers
    generations: Numbers


class Flags(Message):
    """Of Contains, Commit and Delete: a byte for each key; 0: no."""

    request: Number
    flags: bytes


class Stats(Message):
    request: Number
    numbers: dict[str, Any]


class Refused(Message):
    """code: "version", "size", "hello", "busy", "failed", "malformed"."""

    request: Number
    code: str
    message: str


NONE, KEPT, FULL = -1, -2, -3  # in Places.slots: no such block; it exists; no slot is free

FromClient: TypeAlias = "Hello | Contains | Locate | Claim | Commit | Abort | Release | Suspect | Delete | GetStats"
ToClient: TypeAlias = "Welcome | Places | Flags | Stats | Refused"

encode = msgspec.msgpack.Encoder().encode
from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(
    Hello | Contains | Locate | Claim | Commit | Abort | Release | Suspect | Delete | GetStats
)
to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(Welcome | Places | Flags | Stats | Refused)
