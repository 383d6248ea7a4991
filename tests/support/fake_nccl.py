"""A fake of nccl4py's low-level module, `nccl.bindings.nccl`: ranks are threads, device memory is host memory.

It has the functions that the package calls, with nccl4py's arguments. A communicator is nonblocking: a call returns at
once, and `comm_get_async_error` says InProgress until all ranks have come, or until the received bytes are there.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict, deque
from types import ModuleType
from typing import Any

import pytest

SUCCESS, IN_PROGRESS, REMOTE_ERROR = 0, 7, 6


class NCCLError(Exception):
    """An error of a call."""


class UniqueId:
    """128 bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    @staticmethod
    def from_buffer(content: bytes) -> UniqueId:
        assert len(content) == 128
        return UniqueId(content)

    def __bytes__(self) -> bytes:
        return self.content


class Config:
    """Options of a communicator."""

    blocking = -(2**31)


class Comm:
    """A handle; Comm(handle) is another object for the same communicator."""

    def __init__(self, handle: int = 0) -> None:
        self.handle = handle


class _Rank:
    """State of one rank. waiting: receives that are not there yet, (source, address, bytes)."""

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.waiting: deque[tuple[int, int, int]] = deque()
        self.ended = ""


class _World:
    """The ranks with one identifier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.came: set[int] = set()
        self.finalized: set[int] = set()
        self.failed = False
        self.sent: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)


class FakeNccl(ModuleType):
    """The module. calls: names of all calls, in order. version: that get_version returns."""

    NCCLError, UniqueId, Config, Comm = NCCLError, UniqueId, Config, Comm

    def __init__(self) -> None:
        super().__init__("nccl.bindings.nccl")
        self.version = 22809
        self.calls: list[str] = []
        self._worlds: dict[bytes, _World] = {}
        self._ranks: dict[int, _Rank] = {}
        self._lock = threading.Lock()
        self._group = threading.local()
        self._ids = 0

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> UniqueId:
        self._ids += 1
        return UniqueId(self._ids.to_bytes(128, "little"))

    def comm_init_rank_config(self, nranks: int, comm_id: UniqueId, rank: int, config: Config) -> Comm:
        assert config.blocking == 0
        if not 0 <= rank < nranks:
            raise NCCLError("InvalidArgument (4): invalid argument")
        with self._lock:
            world = self._worlds.setdefault(bytes(comm_id), _World(nranks))
            world.came.add(rank)
            handle = 0x1000 * (len(self._ranks) + 1)
            self._ranks[handle] = _Rank(world, rank)
        self.calls.append("init")
        return Comm(handle)

    def group_start(self) -> None:
        self._group.messages = []

    def send(self, buffer: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._group.messages.append(("send", buffer, count * 1 if datatype == 0 else -1, peer, comm))

    def recv(self, buffer: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._group.messages.append(("recv", buffer, count * 1 if datatype == 0 else -1, peer, comm))

    def group_end(self) -> None:
        with self._lock:
            for kind, buffer, count, peer, comm in self._group.messages:
                state = self._ranks[comm.handle]
                if not 0 <= peer < state.world.size or peer == state.rank:
                    raise NCCLError("InvalidArgument (4): invalid argument")
                if kind == "send":
                    state.world.sent[state.rank, peer].append(ctypes.string_at(buffer, count))
                else:
                    state.waiting.append((peer, buffer, count))
        self.calls.append("group")

    def comm_get_async_error(self, comm: Comm) -> int:
        with self._lock:
            state = self._ranks[comm.handle]
            world = state.world
            if world.failed:
                return REMOTE_ERROR
            if len(world.came) < world.size or (state.rank in world.finalized and len(world.finalized) < world.size):
                return IN_PROGRESS
            while state.waiting:
                source, address, count = state.waiting[0]
                box = world.sent[source, state.rank]
                if not box:
                    return IN_PROGRESS
                assert len(box[0]) == count
                ctypes.memmove(address, box.popleft(), count)
                state.waiting.popleft()
            return SUCCESS

    def fail(self) -> None:
        """Makes every communicator report an error of another rank."""
        for world in self._worlds.values():
            world.failed = True

    def get_error_string(self, result: int) -> str:
        return "remote process exited or there was a network error"

    def get_last_error(self, comm: Comm) -> str:
        return ""

    def comm_abort(self, comm: Comm) -> None:
        self._end(comm, "abort")

    def comm_finalize(self, comm: Comm) -> None:
        state = self._ranks[comm.handle]
        state.world.finalized.add(state.rank)
        self.calls.append("finalize")

    def comm_destroy(self, comm: Comm) -> None:
        self._end(comm, "destroy")

    def _end(self, comm: Comm, how: str) -> None:
        assert not self._ranks[comm.handle].ended, "a communicator ends once"
        self._ranks[comm.handle].ended = how
        self.calls.append(how)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """Installs the fake for one test."""
    from cutlass_py_attn.distributed import nccl

    fake: Any = FakeNccl()
    packages = {name: ModuleType(name) for name in ("nccl", "nccl.bindings")}
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", fake)
    packages["nccl.bindings"].nccl = fake
    nccl.bindings.cache_clear()
    found: FakeNccl = fake
    return found
