"""Rank 0's coordinator: takes tasks from clients, sends each to all ranks, and reports its result.

A task is done when all ranks have done their part. If a rank fails or dies, the task is reported failed once, with that
rank and its reason, as soon as the other ranks have ended their parts or died. Every wait for a rank has a time limit.

States of a task on rank 0. No lock: only the thread of the process's loop calls the Coordinator.

                    Submit
                      | ask()
         refused <----+  _refusal(): Answer with a code, no Result
                      | _take()
                      +---- it reads a block known as lost --------+
                      v                                            |
       on ranks: in _pending, .waiting names the ranks             |
                      | done() or lost() for each rank,            |
                      |   both through _part_ended()               |
                      v                                            |
       on others: .waiting empty, but a task that writes           |
                  one of its blocks is in _pending                 |
                      | _report() of the last such task            |
                      v                                            v
       ended: _report_one() sends the Result, done or failed; out of _pending

_look() (after --task_timeout) and abandon() (the manager stops) move a task from any state to ended, as failed. A rank
that still works on such a task holds its number in _Rank.tasks until the rank reports Done or is lost. worker.py draws
a rank's part of a task.

A task reads what the last task before it wrote, in the order in which rank 0 took them. Of each block the last writer
is kept while it is under way, and after it has failed: the block is then lost, and every task that reads it fails too.

The Coordinator uses no sockets: `to_client` and `to_rank` send its messages. Answers that cannot be sent are dropped,
and results are kept; their client is not served until it has read them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvswap.fastdeploy.manager import messages
from kvswap.fastdeploy.manager.arguments import Settings
from kvswap.fastdeploy.manager.messages import Answer, Ask, Beat, Do, Done, Handles, Kind, State, Step, StepDone, Task
from kvswap.fastdeploy.manager.metrics import Metrics

__all__ = ["MOST_CLIENTS", "Coordinator", "most_tasks"]

_log = logging.getLogger("kvswap.manager")

_LOOK_EVERY = 0.05  # seconds
MOST_CLIENTS = 256
_MOST_ASKED = 16  # requests of one client that wait for the same operation
_AWAY = 1.0  # seconds between two looks: this process itself was stopped, so no rank counts as silent


def _own_tasks(queue_limit: int) -> int:
    """How many tasks a client may have under way however many other clients have."""
    return max(1, queue_limit // MOST_CLIENTS)


def most_tasks(queue_limit: int) -> int:
    """Upper bound of tasks under way: the queue's limit plus each client's reserved tasks."""
    return queue_limit + MOST_CLIENTS * _own_tasks(queue_limit)


@dataclass
class _Rank:
    """What rank 0 knows of a rank."""

    number: int
    here: bool = False
    pid: int = 0
    ready: bool = False
    phase: str = "not started"
    generation: int = 0
    handles: Handles | None = None
    leaving: bool = False
    seen: float = 0.0
    abandoned: int = 0  # abandoned swaps: their tasks were reported failed, but they may still run
    tasks: set[int] = field(default_factory=set)  # sent to the rank and unended there


@dataclass(eq=False)
class _Task:
    """A task under way, or a failed one of which a block is lost.

    reads: the blocks that it reads and whose last writer was under way or had failed when the task was taken.
    failed: rank and reason of the first failure. began: the rank and the failure of the task that this one began with,
      which may have failed because of another's block.
    """

    number: int
    client: bytes
    task: Task
    begun: float
    reads: dict[int, _Task]
    readers: list[int] = field(default_factory=list)  # later tasks that read one of its blocks
    waiting: set[int] = field(default_factory=set)  # ranks whose part has not ended
    failed: tuple[int, str] | None = None
    began: tuple[int, str] | None = None
    nbytes: int = 0
    seconds: float = 0.0
    client_gone: bool = False

    def lost(self) -> dict[int, _Task]:
        """The blocks that it reads whose last writer failed."""
        return {block: writer for block, writer in self.reads.items() if writer.began is not None}


@dataclass
class _Operation:
    """Clearing, restoring, attaching or draining. At most one runs."""

    what: str
    deadline: float
    handles: list[Handles] | None
    asked: list[tuple[bytes, int]]  # client, request
    number: int = 0
    waiting: set[int] | None = None  # ranks whose step has not ended; None: still waiting for tasks to end


class Coordinator:
    """See the module. `to_client` returns whether the message could be sent now."""

    def __init__(
        self,
        settings: Settings,
        state: State,
        to_client: Callable[[bytes, messages.ToClient], bool],
        to_rank: Callable[[int, messages.ToRank], None],
        keep_state: Callable[[State], None],
        metrics: Metrics,
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._to_client, self._to_rank, self._keep_state = to_client, to_rank, keep_state
        self._unsent: dict[bytes, deque[messages.Result]] = {}  # results that could not be sent, by client
        self.state = state
        self.ranks = [_Rank(i) for i in range(settings.ranks)]
        self._pending: dict[int, _Task] = {}
        self._ids: set[str] = set()
        # The last writer of each block, under way or failed. SWAP2CPU writes host blocks, SWAP2GPU writes GPU blocks.
        self._writers: dict[Kind, dict[int, _Task]] = {kind: {} for kind in Kind}
        self._next = time.time_ns()  # numbers tasks and steps; larger than any number of an earlier process
        self._operation: _Operation | None = None
        self._reason = ""  # why the last operation failed
        self._attached: list[Handles] | None = None
        self._attached_once = False
        self._opened: dict[int, int] = {}  # rank -> generation of its created caches that the engine has opened
        self._draining = False
        self.stopping = False
        self._ended: Counter[str] = Counter()
        self._looked = 0.0

    # -- ranks --------------------------------------------------------------------------------------------------------

    def hello(self, rank: int, pid: int) -> None:
        """A rank has connected. If it was connected before, its part of every task has failed."""
        before = self.ranks[rank]
        same = before.pid == pid
        if before.here:
            why = f"(process {pid}) was away" if same else f"was started again as process {pid}"
            self.lost(rank, why, gone=not same)
        abandoned = self.ranks[rank].abandoned if same else 0
        self.ranks[rank] = _Rank(rank, True, pid, seen=time.monotonic(), phase="starting", abandoned=abandoned)
        _log.info("rank=%d pid=%d is here", rank, pid)

    def _all_opened(self) -> None:
        """The engine has opened the present caches, with whatever bytes they hold: the losses of clients that have
        ended concern nobody any more."""
        writers = self._writers[Kind.SWAP2GPU]
        for block in [block for block, each in writers.items() if each.client_gone and each.began is not None]:
            del writers[block]
        self._opened = {rank.number: rank.generation for rank in self.ranks}

    def beat(self, beat: Beat) -> None:
        rank = self.ranks[beat.rank]
        rank.seen = time.monotonic()
        rank.ready, rank.phase = beat.ready, beat.phase
        rank.generation, rank.abandoned, rank.leaving = beat.generation, beat.abandoned, beat.leaving
        if beat.handles is not None:
            rank.handles = beat.handles
        if rank.phase == "waits for attach()" and self._attached_once and self._operation is None:
            # A rank that was started again gets the handles of the caches that the other ranks use.
            rank.phase = "attaching"
            handles = self._attached[rank.number] if self._attached else None
            self._to_rank(rank.number, Step(self._number(), "attach", handles))

    def lost(self, number: int, why: str, *, gone: bool = True) -> None:
        """A rank is dead or silent: its part of every task has failed. gone: the process has ended, so that it writes
        nothing any more."""
        rank = self.ranks[number]
        if gone:
            rank.abandoned = 0
        if not rank.here:
            return
        _log.warning("rank=%d pid=%d is lost: %s", number, rank.pid, why)
        self._metrics.count("ranks_lost", str(number))
        abandoned = 0 if gone else rank.abandoned + len(rank.tasks)
        self.ranks[number] = _Rank(number, pid=rank.pid, phase=f"lost: {why}"[:500], abandoned=abandoned)
        for task in sorted(rank.tasks):
            self._part_ended(number, task, f"rank {number} {why}")
        operation = self._operation
        if operation is not None and operation.waiting is not None and number in operation.waiting:
            self._end_operation("failed", f"rank {number} {why} while it was {operation.what}")

    def _overdue(self, rank: _Rank) -> set[int]:
        """The tasks that were reported failed while the rank still works on them."""
        return rank.tasks - self._pending.keys()

    def _not_ready(self) -> str:
        """Why no task can be taken; empty if tasks are taken."""
        if self.stopping:
            return "the manager is stopping"
        if self._draining:
            return "the manager is draining; kvswap manager drain --undo, or client.drain(undo=True), takes tasks again"
        if self.state != State.NORMAL:
            return f"the caches are {self.state.name}"
        for rank in self.ranks:
            if not rank.here:
                return f"rank {rank.number} of {len(self.ranks)} is not there ({rank.phase})"
            if rank.leaving:
                return f"rank {rank.number} is stopping"
            if not rank.ready:
                return f"rank {rank.number} is not ready: {rank.phase}"
            if self._overdue(rank):
                return f"rank {rank.number} still works on a task that was reported as too slow"
        if self._operation is not None:
            return f"the manager is busy with {self._operation.what}"
        for rank in self.ranks if self._settings.create else ():
            if self._opened.get(rank.number) != rank.generation:  # it may still use those of the rank's predecessor
                return (
                    f"rank {rank.number} has created caches that the engine has not opened yet: it does by handles(), "
                    "or by their segments and says so by attach()"
                )
        return ""

    # -- clients ------------------------------------------------------------------------------------------------------

    def ask(self, client: bytes, message: messages.FromClient) -> None:
        """A client's request. The answer is sent now, or when the operation ends."""
        if client in self._unsent:
            return
        if isinstance(message, messages.Submit):
            code, why = self._refusal(client, message.task)
            if self._answer(client, message.request, code, why) and code == "ok":
                self._take(client, message.task, set(message.known))
        elif message.what == "status":
            self._answer(client, message.request, "ok", "", self.status())
        elif message.what == "handles":
            self._answer_handles(client, message.request)
        else:
            self._operate(client, message)

    def _answer(self, client: bytes, request: int, code: str, message: str = "", body: Any = None) -> bool:
        return self._to_client(client, Answer(request, code, message, body))

    def flush(self) -> None:
        """Send the results that could not be sent before. A client that does not read costs one attempt."""
        for client in list(self._unsent):
            while (unsent := self._unsent.get(client)) and self._to_client(client, unsent[0]):
                unsent.popleft()
                if not unsent:
                    self._unsent.pop(client, None)

    def keeps(self, client: bytes) -> bool:
        """Whether results for this client could not be sent yet."""
        return client in self._unsent

    @property
    def undelivered(self) -> int:
        return sum(len(unsent) for unsent in self._unsent.values())

    @property
    def under_way(self) -> int:
        return len(self._pending)

    def _refusal(self, client: bytes, task: Task) -> tuple[str, str]:
        if why := self._not_ready():
            return "not_ready", why
        limit = self._settings.queue_limit
        if len(self._pending) >= limit:
            own = sum(pending.client == client for pending in self._pending.values())
            if own >= _own_tasks(limit):
                return "full", f"{len(self._pending)} tasks are under way, as many as --queue_limit allows"
        if why := self._wrong(task):
            self._metrics.count("refused")
            return "refused", why
        return "ok", ""

    def _take(self, client: bytes, task: Task, known: set[int]) -> None:
        number, kind = self._number(), task.event_type
        writers = self._writers[Kind.SWAP2GPU if kind == Kind.SWAP2CPU else Kind.SWAP2CPU]
        reads = {block: writers[block] for block in task.sources if block in writers}
        if kind == Kind.SWAP2CPU:
            # A client that knows of a lost block and still sends it has recomputed it with its own kernels.
            reads = {block: writer for block, writer in reads.items() if writer.number not in known}
        pending = self._pending[number] = _Task(number, client, task, time.monotonic(), reads)
        self._writers[kind].update(dict.fromkeys(task.targets, pending))
        self._ids.add(task.transfer_task_id)
        self._metrics.queue_depth(len(self._pending))
        if pending.lost():
            self._report(pending)  # no rank is asked
            return
        for writer in set(reads.values()):
            writer.readers.append(number)
        pending.waiting.update(rank.number for rank in self.ranks)
        for rank in self.ranks:
            rank.tasks.add(number)
        for rank in self.ranks:
            self._to_rank(rank.number, Do(number, task))

    def _wrong(self, task: Task) -> str:
        """What is wrong with a task; empty if nothing is. The ranks check the rest."""
        if task.transfer_task_id in self._ids:
            return f"transfer_task_id {task.transfer_task_id!r} is under way already"
        gpu, cpu = task.gpu_block_ids, task.cpu_block_ids
        if len(gpu) != len(cpu):
            return f"gpu_block_ids has {len(gpu)} ids and cpu_block_ids has {len(cpu)}: they are pairs"
        limits = self._settings.layout.num_gpu_blocks, self._settings.layout.num_cpu_blocks
        for name, ids, limit in zip(("gpu_block_ids", "cpu_block_ids"), (gpu, cpu), limits, strict=True):
            for i, block in enumerate(ids):
                if block >= limit:
                    return f"{name}[{i}] is {block}: must be in [0, {limit})"
        if len(set(task.targets)) != len(task.targets):
            name = "cpu_block_ids" if task.event_type == Kind.SWAP2CPU else "gpu_block_ids"
            return f"{name} names block {Counter(task.targets).most_common(1)[0][0]} twice: each target has one source"
        if task.events is not None and len(task.events) != len(self.ranks):
            return f"events has {len(task.events)} items: one for each of {len(self.ranks)} ranks"
        return ""

    def _number(self) -> int:
        self._next += 1
        return self._next

    # -- tasks that end -----------------------------------------------------------------------------------------------

    def done(self, done: Done) -> None:
        """A rank has ended its part."""
        rank = self.ranks[done.rank]
        rank.tasks.discard(done.number)
        pending = self._pending.get(done.number)
        if pending is None:
            return  # already reported as too slow
        pending.nbytes += done.nbytes
        pending.seconds = max(pending.seconds, done.seconds)
        self._part_ended(done.rank, done.number, done.reason)

    def _part_ended(self, rank: int, number: int, reason: str) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return
        pending.waiting.discard(rank)
        if reason and pending.failed is None:
            pending.failed = (rank, reason)
        if self._has_ended(pending):
            self._report(pending)

    def _has_ended(self, pending: _Task) -> bool:
        """Whether all ranks have ended their parts, and every task has ended that writes one of its source blocks."""
        return not pending.waiting and not any(writer.number in self._pending for writer in pending.reads.values())

    def _report(self, pending: _Task) -> None:
        """Report this task, and then the tasks that waited only for its outcome."""
        numbers = deque([pending.number])
        while numbers:
            each = self._pending.get(numbers.popleft())
            if each is not None and (each is pending or self._has_ended(each)):
                self._report_one(each)
                numbers.extend(each.readers)
                each.readers.clear()

    def _report_one(self, pending: _Task) -> None:
        """Report a task, exactly once: it leaves _pending."""
        del self._pending[pending.number]
        task, lost = pending.task, pending.lost()
        self._ids.discard(task.transfer_task_id)
        if lost:
            pending.failed, pending.began = _blame(task, lost)
        elif pending.failed is not None:
            rank, reason = pending.failed
            pending.began = rank, f"task {task.transfer_task_id!r} failed: {reason}"
        else:
            writers = self._writers[task.event_type]
            for block in task.targets:
                if writers.get(block) is pending:
                    del writers[block]
        pending.reads = {}
        losses: dict[int, int] = {}
        if pending.failed is not None and task.event_type == Kind.SWAP2GPU:
            losses = dict.fromkeys(task.gpu_block_ids, pending.number)
        elif pending.failed is not None:
            losses = {block: writer.number for block, writer in lost.items()}
        self._send_result(pending, losses)

    def _send_result(self, pending: _Task, losses: dict[int, int]) -> None:
        task, ok, kind = pending.task, pending.failed is None, pending.task.event_type.name
        rank, reason = pending.failed or (None, "")
        seconds = time.monotonic() - pending.begun
        self._ended["done" if ok else "failed"] += 1
        self._metrics.queue_depth(len(self._pending))
        self._metrics.task_ended(kind, ok, pending.nbytes, seconds, pending.seconds)
        facts = {"task": task.transfer_task_id, "type": kind, "ok": ok, "blocks": len(task.gpu_block_ids),
                 "bytes": pending.nbytes, "seconds": round(seconds, 6), "rank": rank, "reason": reason}  # fmt: skip
        text = " ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
        _log.log(logging.INFO if ok else logging.WARNING, "%s", text, extra={"task": facts})
        result = messages.result_of(task, ok, rank, reason, nbytes=pending.nbytes, seconds=seconds, lost=losses)
        if pending.client_gone:
            return
        if pending.client in self._unsent or not self._to_client(pending.client, result):
            self._unsent.setdefault(pending.client, deque()).append(result)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Handle silent ranks, and tasks and operations that take too long."""
        now = time.monotonic()
        if now - self._looked > _LOOK_EVERY:
            if now - self._looked > _AWAY:
                for rank in self.ranks:
                    rank.seen = now
            self._looked = now
            self._look(now)
        self._go_on(now)
        self.flush()

    def _look(self, now: float) -> None:
        for rank in self.ranks[1:]:
            if rank.here and now - rank.seen > self._settings.rank_timeout:
                silent = f"was silent for {self._settings.rank_timeout:g} s"
                why = f"(process {rank.pid}) {silent}, and may still write the blocks"
                self.lost(rank.number, why, gone=False)
            elif rank.leaving and rank.here and not rank.tasks:
                self._to_rank(rank.number, messages.Left())
        limit = self._settings.task_timeout
        late = [pending for pending in self._pending.values() if now - pending.begun > limit]
        why = f"took longer than {limit:g} s, and may still write the blocks: no task is taken until it has ended"
        self._fail(late, why)

    def abandon(self, why: str) -> None:
        """Report all tasks under way as failed: the manager ends."""
        self._fail(list(self._pending.values()), why)

    def _fail(self, tasks: list[_Task], why: str) -> None:
        """Report tasks as failed, in the order in which they were taken, though ranks still work on them."""
        for pending in tasks:
            if pending.waiting and pending.failed is None:
                pending.failed = (min(pending.waiting), why)
            self._report(pending)

    # -- operations: clear, restore, attach, drain --------------------------------------------------------------------

    def _operate(self, client: bytes, message: Ask) -> None:
        what, asked = message.what, (client, message.request)
        code, why = self._answer_at_once(what, message.handles)
        if code == "busy" and self._joins(what, asked):
            return
        if code:
            self._answer(*asked, code, why, self.status())
            return
        self._operation = _Operation(what, time.monotonic() + message.timeout, message.handles, [asked])
        self._reason = ""
        if what == "drain":
            self._draining = True
        elif what == "clear":
            self._set_state(State.CLEARING)
        elif what == "restore":
            self._set_state(State.UPDATING)
        self._go_on(time.monotonic())

    def _joins(self, what: str, asked: tuple[bytes, int]) -> bool:
        """Whether the request is answered with the running operation, which is the same."""
        running = self._operation
        if running is None or running.what != what or sum(who == asked[0] for who, _ in running.asked) >= _MOST_ASKED:
            return False
        running.asked.append(asked)
        return True

    def _answer_at_once(self, what: str, handles: list[Handles] | None) -> tuple[str, str]:
        """Code and message of the answer, if the operation need not or cannot begin; else empty."""
        if what == "undo":
            self._draining = False
            return "ok", ""
        if self._operation is not None:
            return "busy", f"the manager is busy with {self._operation.what}"
        if what == "restore" and self.state == State.CLEARING:
            return "refused", "the caches are CLEARING: that did not end, clear again first"
        if what == "attach" and self.state != State.NORMAL:
            return "refused", f"the caches are {self.state.name}: restore them with the new handles"
        if what == "attach" and self._settings.create:
            self._all_opened()
            missing = [f"rank {rank.number}: {rank.phase}" for rank in self.ranks if not rank.ready]
            return ("not_ready", missing[0]) if missing else ("ok", "")
        if (what, self.state) in (("clear", State.CLEARED), ("restore", State.NORMAL)):
            return "ok", f"the caches are {self.state.name} already"
        if handles is not None and len(handles) != len(self.ranks):
            return "refused", f"handles has {len(handles)} items: one for each of {len(self.ranks)} ranks"
        return "", ""

    def _set_state(self, state: State) -> None:
        if state != self.state:
            _log.info("state=%s was=%s", state.name, self.state.name)
            self.state = state
            self._keep_state(state)

    def _go_on(self, now: float) -> None:
        """Take the operation's next step, if no task is under way."""
        operation = self._operation
        if operation is None:
            return
        if now > operation.deadline:
            self._end_operation("timeout", f"{operation.what} did not end in time: {self._held_up(operation)}")
        elif operation.waiting is None and not self._pending and not any(r.tasks or r.abandoned for r in self.ranks):
            if operation.what == "drain":
                self._end_operation("ok", "")
            else:
                self._begin_steps(operation)

    def _held_up(self, operation: _Operation) -> str:
        if operation.waiting is None:
            missing = [f"rank {rank.number} is not there ({rank.phase})" for rank in self.ranks if not rank.here]
            busy = [f"rank {rank.number} has {len(rank.tasks)} tasks under way" for rank in self.ranks if rank.tasks]
            late = [f"rank {rank.number} may still be at {rank.abandoned} swaps of tasks that were reported failed"
                    for rank in self.ranks if rank.abandoned]  # fmt: skip
            return "; ".join(missing + busy + late)
        return "; ".join(f"rank {i} is {self.ranks[i].phase}" for i in sorted(operation.waiting))

    def _begin_steps(self, operation: _Operation) -> None:
        if not all(rank.here for rank in self.ranks):
            return  # wait for the rank to be restarted, until the operation's deadline
        operation.number = self._number()
        operation.waiting = {rank.number for rank in self.ranks}
        for rank in self.ranks:
            rank.ready = False
            rank.phase = {"clear": "clearing", "attach": "attaching"}.get(operation.what, "restoring")
        for i in range(len(self.ranks)):
            handles = operation.handles[i] if operation.handles is not None else None
            self._to_rank(i, Step(operation.number, operation.what, handles))

    def step_done(self, done: StepDone) -> None:
        operation = self._operation
        if operation is None or operation.waiting is None or operation.number != done.number:
            return
        operation.waiting.discard(done.rank)
        if done.reason:
            self._end_operation("failed", f"rank {done.rank}: {done.reason}")
        elif not operation.waiting:
            self._end_operation("ok", "")

    def _end_operation(self, code: str, message: str) -> None:
        """Answer the operation's clients. The state changes only if all ranks succeeded; otherwise repeating the
        request continues."""
        operation, self._operation = self._operation, None
        assert operation is not None
        what = operation.what
        if code != "ok":
            self._reason = message
            _log.warning("%s: %s", what, message)
        elif what != "drain":
            self._writers[Kind.SWAP2GPU].clear()  # the blocks are other memory
            if what == "clear":
                self._writers[Kind.SWAP2CPU].clear()
                self._set_state(State.CLEARED)
                for rank in self.ranks:
                    rank.handles = None
            elif what == "restore":
                self._all_opened()  # the engine has just asked for these caches
                self._set_state(State.NORMAL)
            if what != "clear" and not self._settings.create:
                self._attached, self._attached_once = operation.handles, True
        for client, request in operation.asked:
            self._answer(client, request, code, message, self.status())

    def _answer_handles(self, client: bytes, request: int) -> None:
        missing = [f"rank {rank.number}: {rank.phase}" for rank in self.ranks if rank.handles is None]
        if not self._settings.create:
            self._answer(client, request, "refused", "the engine created the caches")
        elif self.state != State.NORMAL:
            self._answer(client, request, "not_ready", f"the caches are {self.state.name}")
        elif missing:
            self._answer(client, request, "not_ready", f"there are no handles yet of {missing[0]}")
        else:
            self._all_opened()
            body = [{"generation": rank.generation, "handles": rank.handles} for rank in self.ranks]
            self._answer(client, request, "ok", "", body)

    # -- status -------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        now, why_not = time.monotonic(), self._not_ready()
        return {
            "state": self.state.name,
            "ready": not why_not,
            "why_not": why_not,
            "draining": self._draining,
            "operation": self._operation.what if self._operation else None,
            "last_failure": self._reason,
            "under_way": len(self._pending),
            "undelivered": self.undelivered,
            "queue_limit": self._settings.queue_limit,
            "done": self._ended["done"],
            "failed": self._ended["failed"],
            "layout": self._settings.layout.describe(),
            "ranks": [self._status_of(rank, now) for rank in self.ranks],
        }

    def _status_of(self, rank: _Rank, now: float) -> dict[str, Any]:
        return {
            "rank": rank.number,
            "here": rank.here,
            "pid": rank.pid,
            "ready": rank.ready,
            "phase": rank.phase,
            "tasks": len(rank.tasks),
            "overdue": len(self._overdue(rank)),
            "abandoned": rank.abandoned,
            "generation": rank.generation,
            "silent": round(now - rank.seen, 3) if rank.here and rank.number else 0.0,
        }

    def gone(self, client: bytes) -> None:
        """A client has ended: drop its results."""
        for pending in {*self._pending.values(), *self._writers[Kind.SWAP2GPU].values()}:
            pending.client_gone |= pending.client == client
        if unsent := self._unsent.pop(client, None):
            _log.warning("a client is gone: %d messages for it are dropped", len(unsent))


def _blame(task: Task, lost: dict[int, _Task]) -> tuple[tuple[int, str], tuple[int, str]]:
    """For a task that read a lost block: its failure, and the failure that it began with; each a rank and a reason."""
    block, writer = next(iter(lost.items()))
    assert writer.began is not None
    rank, began = writer.began
    if task.event_type == Kind.SWAP2CPU:
        where, what = f"gpu_block_ids[{task.gpu_block_ids.index(block)}]", "GPU block does not hold what it should"
    else:
        where, what = f"cpu_block_ids[{task.cpu_block_ids.index(block)}]", "host block holds nothing"
    return (rank, f"{where} is {block}: that {what}, since {began}"), (rank, began)
