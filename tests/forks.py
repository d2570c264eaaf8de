"""os.fork() for a Python under GCC 12's AddressSanitizer: .ci/run puts this module into that environment, where each
Python imports it when it starts. There, but not with glibc alone, a lock of the allocator that another thread holds at
the fork is never released in the child, so a fork waits until this process's other threads sleep."""

from __future__ import annotations

import os
import threading
import time

fork = os.fork


def fork_at_rest() -> int:
    def works(thread: str) -> bool:
        try:
            with open(f"/proc/self/task/{thread}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "S"
        except OSError:  # it has ended
            return False

    def others_work() -> bool:
        own = str(threading.get_native_id())
        return any(works(thread) for thread in os.listdir("/proc/self/task") if thread != own)

    end = time.monotonic() + 60
    while others_work():
        if time.monotonic() > end:
            raise TimeoutError("other threads of this process have worked for a minute")
        time.sleep(0.001)
    return fork()


os.fork = fork_at_rest
