"""The table of metrics: names, units, labels, and how each is read from a snapshot. Needs no prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from kvswap import _C

if TYPE_CHECKING:
    from kvswap.metrics import DeviceMetrics, FileMetrics, PathMetrics, Snapshot

_TIMES, _SIZES = _C._metrics_bounds()
_Labels: TypeAlias = tuple[str, ...]
_REMOTE_EVENTS = (
    "stored", "loaded", "deleted", "missed", "failed", "late", "no_room",
    "no_header", "other_identity", "other_key", "other_length", "wrong_bytes", "wrong_mac",
)  # fmt: skip


class Family:
    """One metric. samples: by the values of its labels; a histogram's is a kvswap.metrics.Histogram.

    name: without a counter's suffix _total. Samples with equal labels (two stores on one directory) are added
    up; most: the largest counts.
    """

    def __init__(self, kind: str, name: str, help: str, labels: str, *, times: bool = True, most: bool = False) -> None:
        self.kind, self.help, self.labels, self.most = kind, help, ("rank", *labels.split()), most
        self.name, self.times = f"kvswap_{name}", times
        self.samples: dict[_Labels, Any] = {}

    @property
    def exported(self) -> str:
        """The name as Prometheus shows it."""
        return self.name + ("_total" if self.kind == "counter" else "")

    def add(self, labels: _Labels, value: Any) -> None:
        there = self.samples.get(labels)
        if there is None:
            self.samples[labels] = value
        elif self.kind == "histogram":
            buckets = [a + b for a, b in zip(there["buckets"], value["buckets"], strict=True)]
            self.samples[labels] = {"buckets": buckets, "sum": there["sum"] + value["sum"]}
        else:
            self.samples[labels] = max(there, value) if self.most else there + value

    def cumulative(self, histogram: Any) -> list[tuple[str, int]]:
        """(upper bound, number of values up to it), as Prometheus wants them."""
        found, total = [], 0
        for bound, count in zip((*(_TIMES if self.times else _SIZES), None), histogram["buckets"], strict=True):
            total += count
            found.append(("+Inf" if bound is None else str(float(bound)), total))
        return found


class _Table:
    """The families, filled from one snapshot."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}
        self.rank = ""

    def define(self, kind: str, name: str, help: str, labels: str = "", **options: bool) -> None:
        self.families[name] = Family(kind, name, help, labels, **options)

    def put(self, name: str, value: Any, *labels: str) -> None:
        self.families[name].add((self.rank, *labels), value)


def _define_transfers(table: _Table) -> None:
    by_path = "device direction path"
    table.define("histogram", "transfer_duration_seconds", "From the call until the end was seen", by_path)
    table.define("histogram", "transfer_queue_seconds", "The same without the time on the device", by_path)
    table.define("histogram", "transfer_size_bytes", "Bytes of a transfer", by_path, times=False)
    table.define("counter", "transfer_bytes", "Bytes of transfers done", by_path)
    table.define("counter", "transfer_link_bytes", "Bytes that they moved: fewer where blocks were coded", by_path)
    table.define("counter", "transfer_blocks", "Blocks of transfers done", by_path)
    table.define("counter", "transfer_device_seconds", "Seconds on the device of transfers done", by_path)
    table.define("counter", "transfer_failures", "Transfers that failed", by_path + " kind")
    table.define("counter", "transfer_failed_blocks", "Blocks of failed transfers that are lost", by_path)


def _define_devices(table: _Table) -> None:
    table.define("counter", "transfers_submitted", "Transfers that were queued", "device")
    table.define("counter", "copies", "Copies issued", "device")
    table.define("counter", "merged_blocks", "Blocks copied together with a neighbouring block", "device")
    table.define("counter", "queue_full", "Submissions refused since the lane was full", "device")
    table.define("counter", "second_attempts", "Transfers that took another path after the first failed", "device")
    table.define("counter", "hazard_waits", "Waits between transfers on the same slots", "device hazard")
    table.define("counter", "lent_bytes", "Bytes of other devices' transfers over this one's link", "device direction")
    table.define("counter", "borrowed_bytes", "Bytes of its transfers over other devices' links", "device direction")
    table.define("gauge", "device_lost", "1: the device is lost and every transfer fails", "device")
    table.define("gauge", "memory_bytes", "Memory that kvswap holds or has registered", "device kind")
    table.define("gauge", "pools", "Pools whose slots are tracked", "device")
    table.define("gauge", "pool_blocks", "Blocks of these pools", "device")
    by_lane = "device direction priority"
    table.define("gauge", "lanes", "Lanes", by_lane)
    table.define("gauge", "queue_transfers", "Unfinished transfers", by_lane)
    table.define("gauge", "queue_bytes", "Bytes of unfinished transfers", by_lane)
    table.define("gauge", "queue_fullest_transfers", "Unfinished transfers of the fullest lane", by_lane)
    table.define("gauge", "queue_limit_transfers", "Unfinished transfers that a lane takes", by_lane)
    table.define("gauge", "queue_oldest_seconds", "Age of the oldest unfinished transfer; 0: none", by_lane)


def _define_files(table: _Table) -> None:
    by_operation = "directory operation"
    table.define("histogram", "file_duration_seconds", "File transfers done, from the call to the end", by_operation)
    table.define("histogram", "file_size_bytes", "Bytes of a file transfer that was done", by_operation, times=False)
    table.define("counter", "file_bytes", "Bytes of blocks stored and loaded", by_operation)
    table.define("counter", "file_blocks", "Blocks: stored, kept, loaded, deleted, evicted", "directory event")
    table.define("counter", "file_failures", "File transfers that failed or were cancelled", by_operation + " state")
    table.define("counter", "file_failed_blocks", "Blocks that failed", by_operation + " kind")
    table.define("counter", "file_queue_full", "Calls refused since the store's queue was full", "directory")
    table.define("counter", "file_gds_bytes", "Bytes moved by GPUDirect Storage", by_operation)
    table.define("gauge", "file_stored_blocks", "Blocks in the store", "directory", most=True)
    table.define("gauge", "file_pinned_blocks", "Blocks that are not evicted", "directory", most=True)
    table.define("gauge", "file_disk_bytes", "Bytes of the segment files", "directory", most=True)
    table.define("gauge", "file_capacity_bytes", "Limit on these bytes", "directory", most=True)
    table.define("gauge", "file_lost_slots", "Slots that cannot be used until the next open", "directory", most=True)
    table.define("gauge", "file_queue_transfers", "Unfinished file transfers; deletes count as stores", by_operation)
    table.define("gauge", "file_queue_blocks", "Blocks of unfinished file transfers", by_operation)
    table.define(
        "gauge", "file_oldest_seconds", "Age of the oldest unfinished file transfer; 0: none", "directory", most=True
    )


def _define_rest(table: _Table) -> None:
    table.define("gauge", "host_pools", "Host pools", "device kind state")
    table.define("gauge", "host_pool_bytes", "Bytes of host pools", "device kind pinned")
    table.define("gauge", "host_pool_populated_bytes", "Bytes of host pools that have memory", "device kind")
    by_direction = "device direction"
    table.define("histogram", "offload_job_duration_seconds", "Jobs done, from submission to collection", by_direction)
    table.define("counter", "offload_bytes", "Bytes of jobs done", by_direction)
    table.define("counter", "offload_failures", "Jobs that failed", by_direction)
    table.define("counter", "not_stored", "Blocks that offloading jobs could not store", "device why")
    table.define("counter", "offload_device_seconds", "Seconds on the device of collected jobs", by_direction)
    table.define("counter", "offload_queued_seconds", "Seconds of collected jobs not on the device", by_direction)
    table.define("counter", "offload_stalls", "Waits of a submission since the queue was full", by_direction)
    table.define("gauge", "offload_handlers", "Handlers that are not shut down", by_direction)
    table.define("gauge", "offload_queue_jobs", "Jobs that are not collected", by_direction)
    table.define("counter", "remote_blocks", "Blocks of remote stores by what became of them", "event")
    table.define("counter", "remote_queue_full", "Calls refused since a remote store's queue was full")
    table.define("gauge", "remote_queue_transfers", "Unfinished transfers of remote stores")
    table.define("counter", "remote_clears", "Epochs that remote stores began")
    table.define("gauge", "remote_epoch_unreadable", "Remote stores whose epoch cannot be read: everything is a miss")
    table.define("gauge", "remote_nodes", "Nodes of remote stores: up, or without an answer", "state")
    table.define("gauge", "lenders", "Other processes whose links bring parts of its loads and stores", "device")
    table.define("gauge", "borrowers", "Other processes whose loads and stores its link brings parts of", "device")
    table.define("gauge", "info", "1; the label is kvswap's version", "version")


def _put_path(table: _Table, device: str, path: PathMetrics) -> None:
    labels = (device, path["direction"], path["path"])
    table.put("transfer_duration_seconds", path["duration"], *labels)
    table.put("transfer_queue_seconds", path["queue"], *labels)
    table.put("transfer_size_bytes", path["size"], *labels)
    table.put("transfer_bytes", path["size"]["sum"], *labels)
    table.put("transfer_link_bytes", path["link_bytes"], *labels)
    table.put("transfer_blocks", path["blocks"], *labels)
    table.put("transfer_device_seconds", path["device_seconds"], *labels)
    table.put("transfer_failed_blocks", path["failed_blocks"], *labels)
    for kind, count in path["failed"].items():
        table.put("transfer_failures", count, *labels, kind)


def _put_device(table: _Table, device: DeviceMetrics) -> None:
    name = device["device"]
    row: Any = device
    for metric, key in (("transfers_submitted", "submitted"), ("copies",) * 2, ("pools",) * 2, ("pool_blocks",) * 2):
        table.put(metric, row[key], name)
    table.put("merged_blocks", device["merged"], name)
    table.put("queue_full", device["refused_full"], name)
    table.put("second_attempts", device["second_attempts"], name)
    for direction in ("d2h", "h2d"):
        table.put("lent_bytes", row[f"lent_bytes_{direction}"], name, direction)
        table.put("borrowed_bytes", row[f"borrowed_bytes_{direction}"], name, direction)
    table.put("device_lost", int(device["lost"]), name)
    for hazard in ("raw", "war", "waw"):
        table.put("hazard_waits", row[f"waits_{hazard}"], name, hazard)
    for kind in ("staging", "slots", "allocated", "allocated_host", "registered", "imported"):
        table.put("memory_bytes", row[f"{kind}_bytes"], name, kind)
    for path in device["paths"]:
        _put_path(table, name, path)
    for lanes in device["lanes"]:
        labels = (name, lanes["direction"], lanes["priority"])
        table.put("lanes", lanes["lanes"], *labels)
        table.put("queue_transfers", lanes["unfinished"], *labels)
        table.put("queue_bytes", lanes["bytes"], *labels)
        table.put("queue_fullest_transfers", lanes["fullest"], *labels)
        table.put("queue_limit_transfers", lanes["limit"], *labels)
        table.put("queue_oldest_seconds", lanes["oldest_seconds"], *labels)


def _put_file(table: _Table, store: FileMetrics) -> None:
    directory = store["directory"]
    row: Any = store
    for event in ("stored", "kept", "loaded", "deleted", "evicted"):
        table.put("file_blocks", row[event], directory, event)
    for metric, key in (
        ("queue_full", "refused_full"),
        ("stored_blocks", "blocks"),
        ("pinned_blocks", "pinned"),
        ("disk_bytes", "file_bytes"),
        ("capacity_bytes", "capacity_bytes"),
        ("lost_slots", "lost_slots"),
        ("oldest_seconds", "oldest_seconds"),
    ):
        table.put(f"file_{metric}", row[key], directory)
    for operation, count, gds in (("store", "stored", "written"), ("load", "loaded", "read")):
        table.put("file_bytes", row[count] * store["block_bytes"], directory, operation)
        table.put("file_gds_bytes", row[f"gds_{gds}_bytes"], directory, operation)
        table.put("file_queue_transfers", row[f"unfinished_{operation}s"], directory, operation)
        table.put("file_queue_blocks", row[f"unfinished_{operation}_blocks"], directory, operation)
    for each in store["operations"]:
        labels = (directory, each["operation"])
        table.put("file_duration_seconds", each["duration"], *labels)
        table.put("file_size_bytes", each["size"], *labels)
        table.put("file_failures", each["failed"], *labels, "failed")
        table.put("file_failures", each["cancelled"], *labels, "cancelled")
        for kind, number in each["failed_blocks"].items():
            table.put("file_failed_blocks", number, *labels, kind)


def _put_rest(table: _Table, numbers: Snapshot) -> None:
    for pool in numbers["host_pools"]:
        device, kind = pool["device"], "shared" if pool["shared"] else "private"
        table.put("host_pools", 1, device, kind, pool["state"])
        table.put("host_pool_bytes", pool["bytes"], device, kind, "yes" if pool["pinned"] else "no")
        table.put("host_pool_populated_bytes", pool["populated_bytes"], device, kind)
    for jobs in numbers["handlers"]:
        labels = (jobs["device"], jobs["direction"])
        table.put("offload_job_duration_seconds", jobs["duration"], *labels)
        table.put("offload_bytes", jobs["bytes"], *labels)
        table.put("offload_failures", jobs["failed"], *labels)
        for why, blocks in jobs["not_stored"].items():
            table.put("not_stored", blocks, jobs["device"], why)
        table.put("offload_device_seconds", jobs["device_seconds"], *labels)
        table.put("offload_queued_seconds", jobs["queued_seconds"], *labels)
        table.put("offload_stalls", jobs["stalls"], *labels)
        table.put("offload_handlers", jobs["handlers"], *labels)
        table.put("offload_queue_jobs", jobs["unfinished"], *labels)
    for remote in numbers["remote"]:
        row: Any = remote
        for event in _REMOTE_EVENTS:
            table.put("remote_blocks", row[event], event)
        table.put("remote_clears", remote["cleared"])
        table.put("remote_epoch_unreadable", int(bool(remote["epoch"])))
        table.put("remote_queue_full", remote["refused_full"])
        table.put("remote_queue_transfers", remote["unfinished"])
        for why in remote["nodes"].values():
            table.put("remote_nodes", 1, "up" if why == "up" else "down")
    for share in numbers["share"]:
        table.put("lenders", share["lenders"], share["device"])
        table.put("borrowers", share["borrowers"], share["device"])
    table.put("info", 1, numbers["version"])


def families(numbers: Snapshot | None) -> Iterator[Family]:
    """All metrics, with the samples of a snapshot; None: without samples."""
    table = _Table()
    for define in (_define_transfers, _define_devices, _define_files, _define_rest):
        define(table)
    if numbers is not None:
        table.rank = numbers["rank"]
        for device in numbers["devices"]:
            _put_device(table, device)
        for store in numbers["files"]:
            _put_file(table, store)
        _put_rest(table, numbers)
    return iter(table.families.values())
