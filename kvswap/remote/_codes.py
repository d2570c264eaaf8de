"""What Mooncake's codes mean to this client. A code that the table lacks is a miss.

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


THERE = 1  # a look-up's only hit: every error is a negative number, which is true in Python
ABSENT = -704
NO_ROOM = -200
CODES = {
    int(code): Meaning(line.split()[0])
    for line in """
        hit 0 -705 -1201
        retry -200 -703 -706 -708 -714 -1105 -1202 -1203 -1301 -1401 -1602 -1700
        down -1 -101 -103 -500 -800 -900 -901 -1000 -1002 -1003 -1005 -1007 -1010 -1600 -1601
        miss -10 -100 -102 -300 -400 -600 -601
        miss -700 -701 -702 -704 -707 -709 -710 -711 -712 -713 -801
        miss -1001 -1004 -1006 -1011 -1012 -1100 -1101 -1102 -1103 -1104 -1106 -1200 -1300 -1400 -1402
        miss -1500 -1501 -1502 -1503 -1603 -1604 -1605 -1701 -1702
    """.strip().splitlines()
    for code in line.split()[1:]
}
_REASONS = {
    0: "done",
    -101: "no node lends memory",
    NO_ROOM: "no node lends memory, or has room: what was looked up or loaded stays until its lease ends",
    -600: "invalid arguments, or the object has another length",
    -702: "no usable replica",
    -703: "its writer has not finished",
    ABSENT: "not there",
    -706: "leased by a look-up or a load",
    -707: "the lease ended before the bytes had arrived",
    -800: "the transfer failed",
    -801: "Mooncake's own checksum does not agree",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
}


def meaning(code: int) -> Meaning:
    """Of an answer to put, remove and register. A look-up and a load succeed by other numbers than 0."""
    return CODES.get(code, Meaning.MISS)


def reason(code: int) -> str:
    if code not in CODES:
        return f"Mooncake's answer is {code}, which this kvswap does not know"
    return f"{_REASONS.get(code, f'an error of Mooncake: {CODES[code].value}')} ({code})"
