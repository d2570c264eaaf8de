"""SGLang's L2TransferEngine (sglang/srt/mem_cache/l2_transfer.py), with kvswap's transfers for its pools of K and V.

SGLang's own submission stays around each call: start and finish events, leases of shared layouts, translation of ids,
streams recorded for the allocator. What changes is between them. A load is one transfer for each list of ids, instead
of a call a layer; SGLang's stream waits for its layers one after the other, and on_layer_done() records SGLang's event
behind each. A write-back is one transfer. Pools that kvswap does not know are copied by SGLang's own methods.

SGLang's acknowledgements cannot say that a copy failed. A failure therefore raises where SGLang asks for the end of the
copy, or submits the next one, and SGLang ends the engine.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from sglang.srt.environ import envs
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvswap import _C
from kvswap._log import logger
from kvswap.sglang._places import NotOurs, blocks_of, device_blocks_of, places_of

_log = logger("kvswap.sglang")
IS_MLA = {MHATokenToKVPoolHost: False, MLATokenToKVPoolHost: True}  # the host pools that kvswap copies
_WAIT_TIMEOUT = 300.0  # seconds, of any wait for copies


def queue_of(stream: Any) -> Any:
    """The stream, for kvswap; None: it has no work of its own, as torch's on a CPU, so that copies are waited for."""
    return stream if hasattr(stream, "cuda_stream") or hasattr(stream, "__cuda_stream__") else None


class _Failed(_C.Error):
    """A copy failed, and the engine has to end."""


def _failed(transfer: _C.Transfer, error: BaseException) -> _Failed:
    return _Failed(
        f"a copy of SGLang's HiCache failed ({transfer.nbytes} bytes, transfer {transfer.number}): {error}. SGLang's "
        "acknowledgement of a copy cannot report a failure, so the engine has to end"
    )


def _has_ended(transfer: _C.Transfer, wait: bool = False) -> bool:
    """Whether it has. kvswap.Error: it failed. TimeoutError: it was waited for in vain."""
    if wait and not transfer.done():
        with suppress(_C.Error):
            transfer.wait(_WAIT_TIMEOUT)
    if not transfer.done():
        return False
    if transfer.error is not None:
        raise _failed(transfer, transfer.error) from transfer.error
    return True


class _Begun:
    """SGLang's event of the begin of a submission."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def elapsed_time(self, end: Any) -> Any:
        """Milliseconds to the event of the end."""
        return self.event.elapsed_time(getattr(end, "event", end))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


class _Ended:
    """SGLang's event of the end of a submission. Asking for it raises if a copy failed."""

    def __init__(self, event: Any, transfers: Sequence[_C.Transfer]) -> None:
        self.event, self.transfers = event, transfers

    def query(self) -> bool:
        """Whether the submission has ended. kvswap.Error: it failed."""
        return bool(self.event.query()) and all(map(_has_ended, self.transfers))

    def synchronize(self) -> None:
        """Wait for the end. kvswap.Error: it failed."""
        self.event.synchronize()
        for transfer in self.transfers:
            _has_ended(transfer, wait=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


def _told(completion: Any, transfers: Sequence[_C.Transfer]) -> Any:
    """SGLang's completion, whose end is that of the transfers."""
    start, finish = _Begun(completion.start_event), _Ended(completion.finish_event, transfers)
    timed = completion.timing_enabled and not any(getattr(each, "joint", False) for each in transfers)
    return completion._replace(start_event=start, finish_event=finish, timing_enabled=timed)


@contextmanager
def _settled(transfers: Sequence[_C.Transfer]) -> Iterator[None]:
    """After an error, as SGLang does with its streams: nothing runs any more."""
    try:
        yield
    except BaseException:
        for transfer in transfers:
            with suppress(Exception):
                transfer.wait(_WAIT_TIMEOUT)
        raise


class CopyEngine(l2_transfer.L2TransferEngine):  # type: ignore[misc]  # SGLang may be missing when types are checked
    """SGLang's engine of copies between device and host pools, on kvswap. One thread calls, SGLang's scheduler."""

    def __init__(self, io_backend: str) -> None:
        super().__init__(io_backend)
        self._places: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._streams: dict[_C.Device, _C.Stream] = {}  # on which loads are queued
        self._unfinished: deque[Any] = deque()
        self._takes_device_ids = True  # as far as is known
        stream = self.host_to_device_stream
        if hasattr(stream, "cuda_stream"):  # opened before requests run: it takes memory
            self._opened = _C.Device(stream.device)

    # -- which pools and ids -------------------------------------------------------------------------------------------

    def places(self, pool: Any) -> Any:
        """Where the pool's layers lie, Places or CodedPlaces; None: SGLang copies this pool."""
        coded = getattr(pool, "places", None)  # CodedPages'
        if coded is None and type(pool) not in IS_MLA:
            return None
        known = self._places.get(pool)
        if pool in self._places and (known is None or known.begin == pool.kv_buffer.data_ptr()):
            return known
        found: Any = None
        try:
            found = places_of(pool, IS_MLA[type(pool)]) if coded is None else coded()
        except (NotOurs, AttributeError) as error:
            _log.warning("host pool %s stays with SGLang's own copies: %s", getattr(pool, "pool_label", "?"), error)
        if found is not None:
            _log.info("host pool %s: kvswap copies blocks of %d tokens%s", pool.pool_label, found.tokens, found.how)
        self._places[pool] = found
        return found

    def keeps_ids(self, pool: Any) -> bool:
        """Whether ids of this pool are not moved by SGLang."""
        places = self.places(pool)
        return places is not None and (places.shared or self._takes_device_ids)

    def device_ids(self, pool: Any, ids: Any) -> Any:
        """Ids of the device for a copy of a pool that keeps them. Those of copies over several links come to the CPU
        here, as SGLang does it for some of its own copies: the stream of a write-back waits for the model."""
        places = self.places(pool)
        return ids.cpu() if ids.device.type != "cpu" and places.joins(len(ids) // places.tokens) else ids

    def _ids(self, transfer: Any, places: Any) -> tuple[Any, Any] | None:
        """(device blocks, host blocks); None: SGLang copies them."""
        host, device = transfer.host_indices, transfer.device_indices
        if host.device.type != "cpu":
            return None
        cpu: Any = blocks_of(host, places.tokens)
        gpu: Any = None
        if device.device.type == "cpu":
            gpu = blocks_of(device, places.tokens)
        elif self._takes_device_ids and transfer.host_pool.pin_memory:  # kernels read them, and reach no other memory
            gpu = device_blocks_of(device, places.tokens)
        return None if cpu is None or gpu is None else (gpu, cpu)

    def _moved(self, transfer: Any, write: bool) -> Any:
        """The transfer with its ids where SGLang's own copies want them."""
        pool = transfer.host_pool
        if write and self.io_backend == "kernel" and pool.can_use_write_back_jit:
            return transfer
        move = inspect.unwrap(cache_controller.HiCacheController.move_indices)
        device = transfer.device_indices.device
        controller = SimpleNamespace(io_backend=self.io_backend, device=device, mem_pool_host=pool)
        host, device = move(controller, transfer.host_indices, transfer.device_indices)
        return transfer._replace(host_indices=host, device_indices=device)

    # -- SGLang's calls ------------------------------------------------------------------------------------------------

    def submit_device_to_host(self, transfers: list[Any]) -> Any:
        """Write back, in one submission."""
        self._look()
        if not any(self.places(transfer.host_pool) for transfer in transfers):
            return super().submit_device_to_host(transfers)
        stream, made = self.device_to_host_stream, list[_C.Transfer]()
        with _settled(made), self._submission(transfers, stream, "device_to_host") as (prepared, completion):
            for transfer in prepared:
                places = self.places(transfer.host_pool)
                if places is not None:
                    gpu, cpu = places.everything()
                    if self._copy(transfer, places, gpu, cpu, "D2H", stream, made):
                        continue
                    transfer = self._moved(transfer, True)
                transfer.host_pool.backup_from_device_all_layer_physical(
                    transfer.device_pool, transfer.host_indices, transfer.device_indices, self.io_backend
                )
            _join(made, stream)
        return _told(completion, made)

    def submit_host_to_device(
        self, transfers: list[Any], *, transfer_layer_id_max: int, start_event: Any = None, on_layer_done: Any = None
    ) -> Any:
        """Load, in one submission, layer by layer."""
        self._look()
        slowed = envs.SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES.get()
        if slowed or not any(self.places(transfer.host_pool) for transfer in transfers):
            options = {"start_event": start_event, "on_layer_done": on_layer_done}
            return super().submit_host_to_device(transfers, transfer_layer_id_max=transfer_layer_id_max, **options)
        stream, made = self.host_to_device_stream, list[_C.Transfer]()
        submission = self._submission(transfers, stream, "host_to_device", start_event)
        with _settled(made), submission as (prepared, completion):
            numbers = _layers(prepared, transfer_layer_id_max)
            waits = dict[int, list[tuple[_C.Transfer, int]]]()  # for the transfer's position, by layer
            theirs = [each for each in zip(prepared, numbers, strict=True) if self.places(each[0].host_pool) is None]
            for group in self._groups(prepared, numbers):
                if not self._load(group, stream, made, waits):
                    theirs += [(self._moved(transfer, False), layers) for transfer, layers in group]
            for layer in range(transfer_layer_id_max):
                for transfer, layers in theirs:
                    if layers[layer] is not None:
                        transfer.host_pool.load_to_device_per_layer_physical(
                            *(transfer.device_pool, transfer.host_indices, transfer.device_indices),
                            *(layers[layer], self.io_backend),
                            is_draft=transfer.is_draft,
                        )
                for copy, position in waits.get(layer, ()):
                    _join([copy], stream, position)
                if on_layer_done is not None:
                    on_layer_done(layer)
            _join(made, stream)
        return _told(completion, made)

    # -- kvswap's ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Raise if a transfer of an earlier submission failed."""
        while self._unfinished and _has_ended(self._unfinished[0]):
            self._unfinished.popleft()

    def _groups(self, prepared: list[Any], numbers: list[list[int | None]]) -> list[list[Any]]:
        """kvswap's transfers: what has one host pool and the same ids, as a model and its drafts have."""
        groups: dict[tuple[int, ...], list[Any]] = {}
        for transfer, layers in zip(prepared, numbers, strict=True):
            if self.places(transfer.host_pool) is not None:
                key = tuple(map(id, (transfer.host_pool, transfer.host_indices, transfer.device_indices)))
                groups.setdefault(key, []).append((transfer, layers))
        return list(groups.values())

    def _load(
        self, group: list[Any], stream: Any, made: list[_C.Transfer], waits: dict[int, list[tuple[_C.Transfer, int]]]
    ) -> bool:
        """Queue the loads of a group; whether kvswap takes them."""
        transfer = group[0][0]
        places = self.places(transfer.host_pool)
        assert places is not None
        wanted = [
            (layer, places.rows[number])
            for layer in range(len(group[0][1]))
            for each, layers in group
            if (number := layers[layer]) is not None and (each.is_draft or number in places.targets)
        ]
        if not wanted:
            return True
        gpu, cpu, ends = places.order([row for _, row in wanted])
        before = len(made)
        if not self._copy(transfer, places, gpu, cpu, "H2D", stream, made):
            return False
        last = {layer: end for (layer, _), end in zip(wanted, ends, strict=True)}
        for copy in made[before:]:
            for layer, end in last.items():
                waits.setdefault(layer, []).append((copy, end))
        return True

    def _copy(
        self, transfer: Any, places: Any, gpu: Any, cpu: Any, direction: Any, stream: Any, made: list[Any]
    ) -> bool:
        """Queue a copy between these tensors, and append it to `made`; whether kvswap takes it."""
        ids = self._ids(transfer, places)
        if ids is None:
            return False
        if not len(ids[1]):
            return True
        queue, options = queue_of(stream), dict[str, Any]()
        on_cpu = isinstance(ids[0], np.ndarray)
        if on_cpu and places.joins(len(ids[1]), direction) and len(gpu) == places.gpu.size:
            joint = self._submit(places.submit, (ids, direction, queue), {})
            made.append(joint)
            self._unfinished.append(joint)
            if direction == "H2D":  # SGLang's events of the layers are recorded when it has ended
                _has_ended(joint, wait=True)
            return True
        if direction == "H2D":  # SGLang's stream waits layer by layer, and the steps of other requests behind it
            own = self._streams.get(places.device)
            if own is None:
                own = self._streams[places.device] = _C.Stream(places.device)
            options = {
                "stream": own,
                "after": queue if queue is not None else (),
                "layer_events": True,
                "priority": "high",
            }
        elif queue is not None:
            options = {"stream": queue}
        name, given, own = places.call(gpu, cpu, ids, direction)
        try:
            copy = places.made(self._submit(getattr(_C, name), given, options | own), ids, direction)
        except (TypeError, ValueError, _C.Error) as error:
            kept = transfer.device_indices.device.type == "cpu" or places.coded
            if kept or isinstance(error, (_C.QueueFull, _C.DeviceError, _Failed)):
                raise
            _log.warning("SGLang's own copies are used: ids in device memory are not taken: %s", error)
            self._takes_device_ids = False
            return False
        made.append(copy)
        self._unfinished.append(copy)
        if queue is None:
            _has_ended(copy, wait=True)
        return True

    def _submit(self, function: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return function(*given, **options)
        except _C.QueueFull:  # SGLang knows no limit
            for transfer in self._unfinished:
                _has_ended(transfer, wait=True)
            return function(*given, **options)


def _layers(transfers: list[Any], count: int) -> list[list[int | None]]:
    """For each transfer, its own number of each layer, or None, as SGLang's engine goes through them."""

    def number_of(transfer: Any, layer: int) -> int | None:
        if transfer.layer_mapper is not None:
            number: int | None = transfer.layer_mapper(layer)
            return number
        return layer if transfer is transfers[0] or layer < transfer.host_pool.layer_num else None

    return [[number_of(transfer, layer) for layer in range(count)] for transfer in transfers]


def _join(transfers: Sequence[_C.Transfer], stream: Any, position: int | None = None) -> None:
    """SGLang's stream waits for the transfers, or for one's tensors up to this position. kvswap.Error: one has failed,
    as far as is known."""
    queue = queue_of(stream)
    if queue is None:
        return
    for transfer in transfers:
        try:
            if position is None:
                transfer.make_wait(queue)
            else:
                transfer.make_wait_layer(position, queue)
        except _C.Error as error:
            raise _failed(transfer, error) from error
