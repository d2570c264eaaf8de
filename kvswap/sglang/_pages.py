"""The pages of one of SGLang's host pools, and the store in which they are.

A page is some pieces of host memory, as the pool's get_page_buffer_meta() lists them: K and V of all layers in the
layouts page_first and page_first_direct, one latent of MLA there, K and V of each layer in layer_first. One or two
pieces of equal size are stored in place, a key each. Of other pages the pieces are parts of one block, which the store
copies together. A page of a coded pool is one piece. The store's layout says how it is coded, and the store looks at
its heads: what does not fit its coded size is not stored, which the host pool logs once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvswap import Error
from kvswap._log import logger
from kvswap.files import FileTransfer
from kvswap.identity import Identity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvswap.remote import RemoteTransfer

    PageTransfer = FileTransfer | RemoteTransfer

_log = logger("kvswap.sglang")
_LOG_SECONDS = 10.0
_PAGE = 4096  # of the files
_MARK = np.zeros(1, np.uint8)


class PageStore(Protocol):
    """Where blocks go: kvswap._shared_files.SharedFiles, or nodes."""

    def find(self, keys: list[bytes]) -> list[bool]: ...

    def touch(self, keys: list[bytes]) -> None: ...

    def load(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> PageTransfer | None: ...

    def store(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> PageTransfer | None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class Pages:
    """The pages of the host pool of that name.

    pool: SGLang's. identify: what its pages mean, by the bytes of the pieces of one.
    """

    def __init__(self, name: str, pool: Any, identify: Callable[[list[int]], Identity]) -> None:
        import torch

        self.name, self.pool = name, pool
        page = getattr(pool, "logical_page_size", getattr(pool, "page_size", 1))
        try:
            self.sizes = self._pieces(torch.arange(page, dtype=torch.int64), 1)[1]
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"pages of host pool {name} cannot be stored as they are: {error}") from error
        self.page_nbytes = sum(self.sizes)
        self.in_place = len(self.sizes) <= 2 and len(set(self.sizes)) == 1
        self.identity = identify(self.sizes)
        coding = getattr(pool, "page_coding", None)  # of host pools whose pages are coded
        self.layout = self.identity.layout(self.sizes[0] if self.in_place else self.page_nbytes, coding)
        block = -(-self.layout.block_nbytes // _PAGE) * _PAGE + _PAGE
        on_disk = block * (len(self.sizes) if self.in_place else 1)
        self.disk_nbytes = on_disk * max(1, getattr(pool, "size", page) // page)  # of as many pages as the pool has
        self.store: PageStore | None = None

    # -- the calls, on pages ------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page is stored, whole."""
        assert self.store is not None
        stored = self._keys(keys)
        each = len(stored) // max(1, len(keys))
        try:
            found = self.store.find(stored)
        except Exception as error:
            _log.warning("looking up %d pages of %s: %s", len(keys), self.name, error)
            return [False] * len(keys)
        pages = [all(found[i : i + each]) for i in range(0, len(found), each or 1)]
        self.store.touch([key for i, key in enumerate(stored) if pages[i // each]])
        return pages

    def load(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Load pages; returns whether each arrived. Of one that did not, the host memory is undefined."""
        return self._move(keys, host_indices, load=True)

    def save(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Store pages, unless they are; returns whether each is stored."""
        return self._move(keys, host_indices, load=False)

    def clear(self) -> None:
        """Remove all pages, those of all engines."""
        assert self.store is not None
        self.store.clear()

    # -- moving -------------------------------------------------------------------------------------------------------

    def _move(self, keys: Sequence[str], host_indices: Any, *, load: bool) -> list[bool]:
        if not keys:
            return []
        assert self.store is not None
        addresses, _ = self._pieces(host_indices, len(keys))
        stored, parts = self._keys(keys), None if self.in_place else self.sizes
        each, what = len(stored) // len(keys), "loading" if load else "storing"
        try:
            transfer = (self.store.load if load else self.store.store)(stored, addresses.reshape(-1), parts)
        except Exception as error:  # QueueFull, or what the store refuses: it would end SGLang's storage thread
            _log.warning("%s %d pages of %s: %s", what, len(keys), self.name, error)
            transfer = None
        if transfer is None:  # full, another process writes, or there is no store yet
            return [False] * len(keys)
        wait(transfer, what, self.name)
        failed = {int(i) // each for i in transfer.failed_positions}
        if failed and not (self.layout.codings and type(transfer.error) is Error):
            _log.warning("%s: %d of %d pages of %s failed: %s", what, len(failed), len(keys), self.name, transfer.error)
        return [i not in failed for i in range(len(keys))]

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        if self.in_place and len(self.sizes) == 2:
            return [key.encode() + part for key in keys for part in (b".k", b".v")]
        return [key.encode() for key in keys]

    def _pieces(self, host_indices: Any, pages: int) -> tuple[NDArray[np.int64], list[int]]:
        """Addresses of the pieces, a row a page, and the sizes of a page's pieces."""
        meta = self.pool.get_page_buffer_meta(host_indices)
        if meta is None:  # pages without bytes of their own: SGLang's other pools have them, and these are only marks
            return np.full((pages, 1), _MARK.ctypes.data, np.int64), [1]
        addresses, sizes = meta
        each = len(addresses) // pages
        if len(addresses) != pages * each or len(sizes) != len(addresses) or not each or sizes != sizes[:each] * pages:
            raise ValueError(
                f"host pool {self.name}: {len(addresses)} pieces of {sorted(set(sizes))} bytes are not {pages} equal "
                f"pages; {len(host_indices)} host indices were given"
            )
        known = getattr(self, "sizes", None)
        if known is not None and sizes[:each] != known:
            raise ValueError(
                f"host pool {self.name}: pages are pieces of {sizes[:each]} bytes now, and were of {known}"
            )
        return np.asarray(addresses, np.int64).reshape(pages, each), list(sizes[:each])


def wait(transfer: PageTransfer, what: str, name: str) -> None:
    """Until the transfer has ended, whatever it does: SGLang uses its host pages for something else afterwards, so that
    a transfer cannot be left behind. A disk that does not answer stops SGLang's storage thread, not its scheduler."""
    begin = time.monotonic()
    while True:
        try:
            transfer.wait(_LOG_SECONDS)
        except Exception:  # told block by block
            if not transfer.done():
                seconds = time.monotonic() - begin
                _log.warning("%s %d blocks of %s has taken %.0f s so far", what, transfer.num_blocks, name, seconds)
        if transfer.done():
            return
