"""NCCL through the low-level bindings of nccl4py: no torch, no MPI.

Arrays are sent as bytes at their addresses, whatever their dtype: nccl4py's Communicator imports torch where it is
installed, takes a strided array as a contiguous one, and costs more than twice the host time of these calls. NCCL has
no time limit of its own. The communicator is nonblocking, so that this process can look at a clock while NCCL
connects, and abort.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from cutlass_py_attn import extras
from cutlass_py_attn.distributed.communicator import DEFAULT_TIMEOUT, Message, PeerLost, not_in_time, pause
from cutlass_py_attn.errors import DriverError, NoDevice, NotSupported
from cutlass_py_attn.refusals import refuse
from cutlass_py_attn.runtime import driver

MINIMUM_VERSION: Final = (2, 28)  # the oldest that was tried
ID_BYTES: Final = 128
# What this module uses of nccl4py's low-level module.
NAMES: Final = (
    "Comm",
    "Config",
    "NCCLError",
    "UniqueId",
    "comm_abort",
    "comm_destroy",
    "comm_finalize",
    "comm_get_async_error",
    "comm_init_rank_config",
    "get_error_string",
    "get_last_error",
    "get_unique_id",
    "get_version",
    "group_end",
    "group_start",
    "recv",
    "send",
)
_BYTES: Final = 0  # ncclInt8
_IN_PROGRESS: Final = 7  # ncclInProgress


@functools.cache
def bindings() -> Any:
    """Returns nccl4py's low-level module; NoDevice says what is missing, or too old."""
    try:
        low = importlib.import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise NoDevice(f"nccl4py is not installed ({error}): run {extras.remedy('nccl')}") from error
    if missing := [name for name in NAMES if not hasattr(low, name)]:
        raise NoDevice(f"nccl4py is another version, without {', '.join(missing)}: run {extras.remedy('nccl')}")
    try:
        number = int(low.get_version())
    except Exception as error:  # cuda.pathfinder's, or the loader's
        raise NoDevice(
            f"libnccl.so.2 was not found ({str(error).splitlines()[0]}): run {extras.remedy('nccl')}"
        ) from error
    version = number // 10000, number // 100 % 100
    if version < MINIMUM_VERSION:
        found, least = (".".join(map(str, each)) for each in (version, MINIMUM_VERSION))
        raise NoDevice(f"libnccl is version {found}: must be {least} or later; run {extras.remedy('nccl')}")
    return low


def unique_id() -> bytes:
    """Returns a new identifier of a communicator, ID_BYTES long, which all of its ranks need."""
    with _errors("ncclGetUniqueId"):
        return bytes(bindings().get_unique_id())


class NcclCommunicator:
    """One rank of an NCCL communicator. It ends with `close` or `abort`.

    handle: nccl4py's low-level `Comm`. timeout: seconds that `close` waits for the other ranks. owner: nccl4py's
    `Communicator` that this is a part of, and that ends the communicator; None if this does.
    """

    def __init__(
        self, handle: Any, rank: int, size: int, device: int, timeout: float = DEFAULT_TIMEOUT, owner: Any = None
    ) -> None:
        self._handle = handle
        self._timeout, self._owner = timeout, owner
        self.rank, self.size, self.device = rank, size, device

    @staticmethod
    def create(
        identifier: bytes, rank: int, size: int, device: int, timeout: float, connect_timeout: float | None = None
    ) -> NcclCommunicator:
        """Creates the communicator of an identifier, together with all other ranks.

        timeout: seconds that `close` waits. connect_timeout: seconds that this call does; None for as many.

        PeerLost: a rank did not come in time.
        """
        low = bindings()
        config = low.Config()
        config.blocking = 0
        with driver.device(device).current(), _errors("ncclCommInitRankConfig", lambda: _last_error(low.Comm(0))):
            name = low.UniqueId.from_buffer(identifier)
            handle = low.comm_init_rank_config(size, name, rank, config)
        found = NcclCommunicator(handle, rank, size, device, timeout)
        found._settle("ncclCommInitRankConfig", timeout if connect_timeout is None else connect_timeout)
        return found

    @staticmethod
    def of(communicator: Any) -> NcclCommunicator:
        """Returns the rank of a communicator that nccl4py's `Communicator` created; it stays the owner of it.

        `close` leaves the communicator open: destroy it afterwards. `abort`, also that of a group after an error, is
        the owner's. Create it with NCCLConfig(blocking=False): a call of a blocking communicator may wait for a rank
        without an end.
        """
        names = ("ptr", "rank", "nranks", "device", "abort")
        missing = [name for name in names if not hasattr(communicator, name)]
        if missing or not communicator.ptr:
            raise NotSupported(
                refuse("communicator", communicator, "must be an open nccl.core.Communicator", "create one with init")
            )
        handle = bindings().Comm(int(communicator.ptr))
        device = int(communicator.device.device_id)
        return NcclCommunicator(handle, int(communicator.rank), int(communicator.nranks), device, owner=communicator)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int, timeout: float) -> None:
        """Enqueues all sends and receives on `stream`, as one NCCL group."""
        low, handle = bindings(), self._handle
        if handle is None:
            raise PeerLost("the communicator was closed or aborted: create a new one on all ranks")
        with driver.device(self.device).current(), _errors("ncclGroupEnd", self._last_error):
            low.group_start()
            try:
                for peer, array in sends:
                    low.send(array.pointer, array.nbytes, _BYTES, peer, handle, stream)
                for peer, array in receives:
                    low.recv(array.pointer, array.nbytes, _BYTES, peer, handle, stream)
            finally:
                low.group_end()
        self._settle("ncclGroupEnd", timeout)

    def _settle(self, name: str, timeout: float) -> None:
        """Waits until NCCL has finished a call: connected to the other ranks and enqueued the work."""
        start = time.monotonic()
        while (state := self._state()) == _IN_PROGRESS:
            if time.monotonic() - start > timeout:
                self.abort()
                raise not_in_time(self, f"{timeout:g} s in {name}", "communicator")
            pause(start)
        if state:
            text = f"{name}: {self.failure()}"
            self.abort()
            raise PeerLost(f"{text}: the communicator is aborted; restart all ranks")

    def _state(self) -> int:
        if self._handle is None:
            return 0
        with _errors("ncclCommGetAsyncError"):
            return int(bindings().comm_get_async_error(self._handle))

    def failure(self) -> str:
        """Returns NCCL's error, "" if there is none."""
        state = self._state()
        if state in (0, _IN_PROGRESS):
            return ""
        return f"NCCL reports {bindings().get_error_string(state)} ({self._last_error()})"

    def _last_error(self) -> str:
        return _last_error(self._handle)

    def abort(self) -> None:
        """Ends all exchanges that wait for other ranks. An error of NCCL's is dropped: what led here is reported."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with contextlib.suppress(DriverError), driver.device(self.device).current(), _errors("ncclCommAbort"):
            if self._owner is not None:
                self._owner.abort()
            else:
                bindings().comm_abort(handle)

    def close(self) -> None:
        """Finishes the communicator, together with all other ranks, and releases it.

        PeerLost: a rank did not close its communicator in time; this one is aborted.
        """
        if self._handle is None or self._owner is not None:
            self._handle = None
            return
        with driver.device(self.device).current(), _errors("ncclCommFinalize", self._last_error):
            bindings().comm_finalize(self._handle)
        self._settle("ncclCommFinalize", self._timeout)
        handle, self._handle = self._handle, None
        with driver.device(self.device).current(), _errors("ncclCommDestroy"):
            bindings().comm_destroy(handle)


def _last_error(handle: Any) -> str:
    """Returns NCCL's last message about a communicator, or about any if the handle is 0."""
    return str(bindings().get_last_error(handle)).strip() or "run with NCCL_DEBUG=WARN for more"


class _errors:  # noqa: N801 - used like a function
    """Context manager that raises DriverError in place of nccl4py's errors. more: returns NCCL's last message."""

    def __init__(self, name: str, more: Callable[[], str] | None = None) -> None:
        self._name, self._more = name, more

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, bindings().NCCLError):
            more = f"; {self._more()}" if self._more is not None else ""
            raise DriverError(f"{self._name}: {error}{more}") from error
