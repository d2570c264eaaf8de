"""What Mooncake's codes mean to this client: one row a code. A code that has no row is a miss.

The numbers are those of `enum class ErrorCode` in mooncake-store/include/types.h of 0.3.13. What Mooncake answers is
not what it did: 0 for a put means that the bytes are stored, or that older ones were kept, or that another writer of
the key has not finished. So no answer means more than that there may be a block: its header says what it is.
"""

from __future__ import annotations

from enum import Enum


class Meaning(Enum):
    HIT = "hit"  # done; there, accepted, removed
    MISS = "miss"  # it is not there, and asking again at once changes nothing
    RETRY = "retry"  # another client uses it now: the same call can succeed later
    DOWN = "down"  # a node or the master did not do its part


_HIT, _MISS, _RETRY, _DOWN = Meaning
LEASED = -706
ABSENT = -704
NO_ROOM = -200

CODES: dict[int, tuple[Meaning, str]] = {
    0: (_HIT, "done"),
    -1: (_DOWN, "an internal error of Mooncake"),
    -10: (_MISS, "a buffer of Mooncake is too small"),
    -100: (_MISS, "no such shard"),
    -101: (_DOWN, "no node lends memory"),
    -102: (_MISS, "the segment exists"),
    -103: (_DOWN, "the master does not know this client"),
    NO_ROOM: (_RETRY, "no node has room: what is looked up or loaded cannot be evicted until its lease has ended"),
    -300: (_MISS, "another version"),
    -400: (_MISS, "not a key"),
    -500: (_DOWN, "writing failed"),
    -600: (_MISS, "invalid arguments, or the object has another length"),
    -601: (_MISS, "another client began this"),
    -700: (_MISS, "not a write that Mooncake permits"),
    -701: (_MISS, "not a read that Mooncake permits"),
    -702: (_MISS, "no usable replica"),
    -703: (_RETRY, "its writer has not finished"),
    ABSENT: (_MISS, "not there"),
    -705: (_HIT, "there already"),
    LEASED: (_RETRY, "leased by a look-up or a load"),
    -707: (_MISS, "the lease ended before the bytes had arrived"),
    -708: (_RETRY, "being replicated"),
    -709: (_MISS, "not being replicated"),
    -710: (_MISS, "no such replica"),
    -711: (_MISS, "the replica exists"),
    -712: (_MISS, "the replica is gone"),
    -713: (_MISS, "the replica is on another node"),
    -714: (_RETRY, "the replica is in use"),
    -800: (_DOWN, "the transfer failed"),
    -801: (_MISS, "Mooncake's own checksum does not agree"),
    -900: (_DOWN, "the master does not answer"),
    -901: (_DOWN, "the master did not answer in time"),
    -1000: (_DOWN, "etcd failed"),
    -1001: (_MISS, "not in etcd"),
    -1002: (_DOWN, "etcd's transaction failed"),
    -1003: (_DOWN, "etcd's call was cancelled"),
    -1004: (_MISS, "no such entry of the log"),
    -1005: (_DOWN, "a lease of Kubernetes failed"),
    -1006: (_MISS, "no lease of Kubernetes"),
    -1007: (_DOWN, "the log is incomplete"),
    -1010: (_DOWN, "the master cannot do it now"),
    -1011: (_MISS, "the master cannot do it in this mode"),
    -1012: (_MISS, "not supported in this mode"),
    -1100: (_MISS, "no such file"),
    -1101: (_MISS, "a file cannot be opened"),
    -1102: (_MISS, "a file cannot be read"),
    -1103: (_MISS, "a file cannot be written"),
    -1104: (_MISS, "a file's buffer is wrong"),
    -1105: (_RETRY, "a file is locked"),
    -1106: (_MISS, "a file's handle is wrong"),
    -1200: (_MISS, "no such bucket"),
    -1201: (_HIT, "the bucket exists"),
    -1202: (_RETRY, "too many keys in a bucket"),
    -1203: (_RETRY, "too many keys"),
    -1300: (_MISS, "no files behind the memory"),
    -1301: (_RETRY, "files are busy"),
    -1400: (_MISS, "no such task"),
    -1401: (_RETRY, "too many tasks"),
    -1402: (_MISS, "no such job"),
    -1500: (_MISS, "cannot be serialised"),
    -1501: (_MISS, "serialising failed"),
    -1502: (_MISS, "deserialising failed"),
    -1503: (_MISS, "persisting failed"),
    -1600: (_DOWN, "the file system did not answer in time"),
    -1601: (_DOWN, "the file system is not available"),
    -1602: (_RETRY, "the file system's quota is used up"),
    -1603: (_MISS, "the file system does not permit it"),
    -1604: (_MISS, "the file's handle has expired"),
    -1605: (_MISS, "the file system wrote a part only"),
    -1700: (_RETRY, "the tenant's quota is used up"),
    -1701: (_MISS, "the master does not know the tenant"),
    -1702: (_MISS, "the tenant has objects"),
}


def meaning(code: int) -> Meaning:
    """Of an answer to put, remove and register. A look-up and a load succeed by other numbers than 0."""
    return CODES.get(code, (_MISS, ""))[0]


def exists(code: int) -> bool:
    """Of an answer to a look-up: 1 only. Every error is a negative number, which is true in Python."""
    return code == 1


def reason(code: int) -> str:
    known = CODES.get(code)
    return (
        f"{known[1]} ({code})" if known is not None else f"Mooncake's answer is {code}, which this kvswap does not know"
    )
