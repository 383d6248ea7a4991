"""Tests of NCCL's part: connecting, exchanging, and every way in which ranks are lost. NCCL is a fake."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.distributed import (
    Group,
    NcclCommunicator,
    PeerLost,
    attention_forward,
    bootstrap,
    connect,
    gpu,
    nccl,
)
from cutlass_py_attn.distributed import group as group_module
from cutlass_py_attn.errors import DriverError, NoDevice, NotSupported
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.runtime import driver
from tests.support import fake_nccl
from tests.support.fake_driver import FakeDriver
from tests.support.split_cases import HEADS, Case
from tests.unit.distributed.test_gpu import Reference


@pytest.fixture
def fake(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_nccl.FakeNccl]:
    monkeypatch.setattr(gpu, "Gpu", Reference)
    driver.call("cuCtxSetCurrent", 0xC0)
    yield fake_nccl.install(monkeypatch)
    nccl.bindings.cache_clear()


def together(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Returns the result, or the error, of `function(rank)` of each rank."""

    def of_rank(rank: int) -> Any:
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of_rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_over_nccl(size: int, fake: fake_nccl.FakeNccl, tmp_path: Path) -> None:
    """From the file to the gradients: the results are those of one device."""
    case = Case(Causal(), {"sinks": (HEADS,)})

    def of_rank(rank: int) -> Any:
        with connect(rank, size, str(tmp_path / "id"), device=0, timeout=20.0) as group:
            return case.rank(group, "ring", "zigzag", backend="gpu")

    found = together(size, of_rank)
    case.expect(found, "zigzag")
    assert fake.calls.count("destroy") == size
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("strategy", "groups"), [("all_gather", 5), ("ulysses", 6), ("ring", 5)])
def test_exchanges_of_a_forward_and_a_backward(strategy: str, groups: int, fake: fake_nccl.FakeNccl) -> None:
    """One that compares the calls in each of them; keys and values, and their gradients, share one."""
    pairs = pair()

    def of_rank(rank: int) -> Any:
        group = Group(pairs[rank])
        case.rank(group, strategy, "zigzag", backend="gpu")
        group.close()

    case = Case()
    assert together(2, of_rank) == [None, None]
    assert fake.calls.count("group") == 2 * groups


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring"])
def test_ranks_that_differ_exchange_no_array(strategy: str, fake: fake_nccl.FakeNccl) -> None:
    """Every rank refuses the call, whatever it has computed by then, and the group can be used afterwards."""
    pairs = pair()
    given = [np.zeros((1, 8, 4, 16), np.float32) for _ in range(3)]

    def of_rank(rank: int) -> Any:
        group = Group(pairs[rank], timeout=20.0)
        call = functools.partial(attention_forward, *given, group=group, context_strategy=strategy, mask=Causal())
        with pytest.raises(NotSupported, match=r"the ranks make different calls, rank 0: .*; rank 1: "):
            call(scale=1.0 + rank)
        before = fake.calls.count("group")
        output, _ = call()
        assert group.is_open
        return before, np.asarray(output).shape

    found = together(2, of_rank)
    assert [shape for _, shape in found] == [given[0].shape] * 2
    assert min(before for before, _ in found) <= 2  # a rank may be ahead of the other


@pytest.mark.parametrize("fails", [False, True])
def test_a_communicator_of_nccl4py(fails: bool, fake: fake_nccl.FakeNccl) -> None:
    """nccl4py's object ends it, so that it does not end twice."""
    own = NcclCommunicator.create(nccl.unique_id(), 0, 1, 0, 1.0)
    given = SimpleNamespace(
        ptr=own._handle.handle,
        rank=0,
        nranks=1,
        device=SimpleNamespace(device_id=0),
        abort=lambda: fake.comm_abort(own._handle),
    )
    group = Group(NcclCommunicator.of(given))
    assert (group.rank, group.size, group.device) == (0, 1, 0)
    group.abort() if fails else group.close()
    assert fake.calls == (["init", "abort"] if fails else ["init"])
    if not fails:
        fake.comm_destroy(own._handle)
    with pytest.raises(NotSupported, match=r"communicator = None: must be an open nccl.core.Communicator"):
        NcclCommunicator.of(None)


def test_the_fake_has_the_functions_of_nccl4py() -> None:
    """With nccl4py's arguments, where it is installed."""
    real = pytest.importorskip("nccl.bindings.nccl", exc_type=ImportError)
    for name in nccl.NAMES:
        one, other = getattr(real, name), getattr(fake_nccl.FakeNccl, name)
        if not isinstance(other, type):
            names = [*inspect.signature(other).parameters][1:]
            assert len(inspect.signature(one).parameters) == len(names), name
    assert bytes(real.UniqueId.from_buffer(bytes(range(nccl.ID_BYTES)))) == bytes(range(nccl.ID_BYTES))
    config = real.Config()
    config.blocking = 0
    assert (config.blocking, real.Comm(7).handle, int(real.Result.InProgress)) == (0, 7, nccl._IN_PROGRESS)
    assert int(real.DataType.Int8) == nccl._BYTES


def test_a_closed_communicator(fake: fake_nccl.FakeNccl) -> None:
    one = NcclCommunicator.create(nccl.unique_id(), 0, 1, 0, 1.0)
    one.close()
    with pytest.raises(PeerLost, match=r"the communicator was closed or aborted: create a new one on all ranks"):
        one.exchange([], [], 0, 1.0)


def test_errors_of_every_call_are_this_packages(fake: fake_nccl.FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise fake_nccl.NCCLError("SystemError (2): unhandled system error")

    one = NcclCommunicator.create(nccl.unique_id(), 0, 1, 0, 1.0)
    monkeypatch.setattr(fake, "get_unique_id", fails)
    with pytest.raises(DriverError, match=r"ncclGetUniqueId: SystemError \(2\)"):
        nccl.unique_id()
    monkeypatch.setattr(fake, "comm_get_async_error", fails)
    with pytest.raises(DriverError, match=r"ncclCommGetAsyncError: SystemError \(2\)"):
        one.failure()


def test_the_time_limit_of_closing_is_the_groups(
    fake: fake_nccl.FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the ranks needed to find each other."""
    found = connect(0, 1, str(tmp_path / "id"), device=0, timeout=33.0)
    assert isinstance(found.communicator, NcclCommunicator)
    assert found.communicator._timeout == 33.0
    found.close()


def test_a_rank_that_never_connects(fake: fake_nccl.FakeNccl) -> None:
    """The identifier is there, but a rank has ended since: the time limit, and an abort."""
    with pytest.raises(PeerLost, match=r"rank 0 waited 0.1 s in ncclCommInitRankConfig for the other 1: one of them"):
        NcclCommunicator.create(nccl.unique_id(), 0, 2, 0, 0.1)
    assert fake.calls == ["init", "abort"]


def pair() -> list[NcclCommunicator]:
    name = nccl.unique_id()
    found = together(2, lambda rank: NcclCommunicator.create(name, rank, 2, 0, 5.0))
    assert all(isinstance(each, NcclCommunicator) for each in found), found
    return found


def test_a_rank_that_makes_no_call(fake: fake_nccl.FakeNccl) -> None:
    """Every other rank gets an error in time, and the group is of no use any more."""
    group = Group(pair()[0], timeout=0.1)
    case = Case()
    with pytest.raises(PeerLost, match=r"rank 0 waited 0.1 s in ncclGroupEnd for the other 1"):
        case.rank(group, "all_gather", None, backend="gpu")
    assert fake.calls.count("abort") == 1
    with pytest.raises(PeerLost, match=r"the group was aborted: create a new one on all ranks"):
        case.rank(group, "all_gather", None, backend="gpu")


def test_work_that_does_not_end(
    fake: fake_nccl.FakeNccl, driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL has taken the calls, but its kernels wait for a rank; not even the abort ends them here."""
    monkeypatch.setattr(group_module, "_DRAIN_SECONDS", 0.05)
    group = Group(NcclCommunicator.create(nccl.unique_id(), 0, 1, 0, 1.0), timeout=0.1)
    with driver.device(0).current():
        driver_log.busy(True)
        with pytest.raises(PeerLost, match=r"rank 0 waited 0.1 s for the other 0: one of them has ended, or"):
            group.finish()
        driver_log.busy(False)
    assert fake.calls == ["init", "abort"]


def test_an_abort_waits_for_the_exchanges_that_it_ends(fake: fake_nccl.FakeNccl, driver_log: FakeDriver) -> None:
    """Their arrays are freed next."""
    group = Group(NcclCommunicator.create(nccl.unique_id(), 0, 1, 0, 1.0))
    assert group.stream
    driver_log.clear()
    group.abort()
    names = [name for name in driver_log.names if name.startswith(("cuEvent", "cuStream"))]
    assert names == ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventDestroy", "cuStreamDestroy"]


def test_nccl_reports_an_error(fake: fake_nccl.FakeNccl) -> None:
    one, _ = pair()
    fake.fail()
    with pytest.raises(PeerLost, match=r"ncclGroupEnd: NCCL reports remote process exited .*: the communicator is"):
        one.exchange([], [], 0, 1.0)
    assert one.failure() == ""
    one.abort()  # once is enough
    assert fake.calls.count("abort") == 1


def test_an_abort_that_fails_does_not_hide_why(fake: fake_nccl.FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may report the rank that is lost from the abort too."""

    def fails(comm: Any) -> None:
        raise fake_nccl.NCCLError("RemoteError (6): remote process exited or there was a network error")

    monkeypatch.setattr(fake, "comm_abort", fails)
    with pytest.raises(PeerLost, match=r"rank 0 waited 0.1 s in ncclCommInitRankConfig for the other 1"):
        NcclCommunicator.create(nccl.unique_id(), 0, 2, 0, 0.1)


def test_nccl_refuses_a_call(fake: fake_nccl.FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL's own words, though there is no communicator yet."""
    monkeypatch.setattr(fake, "get_last_error", lambda comm: f"no rank 3 of 2 {comm.handle}\n")
    text = r"ncclCommInitRankConfig: InvalidArgument \(4\): invalid argument; no rank 3 of 2 0$"
    with pytest.raises(DriverError, match=text):
        NcclCommunicator.create(nccl.unique_id(), 3, 2, 0, 1.0)


def test_a_rank_that_does_not_close(fake: fake_nccl.FakeNccl) -> None:
    one, _ = pair()
    one._timeout = 0.1
    with pytest.raises(PeerLost, match=r"in ncclCommFinalize for the other 1"):
        Group(one).close()


def test_missing_or_old(fake: fake_nccl.FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(fake_nccl.FakeNccl, "comm_init_rank_config")
        with pytest.raises(NoDevice, match=r"nccl4py is another version, without comm_init_rank_config: run pip inst"):
            nccl.bindings()
    fake.version = 22707
    with pytest.raises(NoDevice, match=r"libnccl is version 2.27: must be 2.28 or later; run pip install 'nccl4py"):
        nccl.bindings()
    monkeypatch.setattr(fake, "get_version", lambda: int("x"))
    with pytest.raises(NoDevice, match=r"libnccl.so.2 was not found \(invalid literal .*\): run pip install 'nccl4py"):
        nccl.bindings()
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    with pytest.raises(NoDevice, match=r"nccl4py is not installed \(.*\): run pip install 'nccl4py>=0.6,<0.7'"):
        connect(0, 1, "host:1")


# Bootstrap


@pytest.fixture
def port() -> Iterator[int]:
    """A port where nobody listens yet. No other process gets it before the test ends, nor does a connection.

    The socket stays bound and does not listen: a server that reuses addresses, as rank 0 is, may listen all the same.
    """
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind, which else may share another's port
        yield kept.getsockname()[1]


@pytest.fixture(params=["file", "port"])
def address(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> str:
    return str(tmp_path / "id") if request.param == "file" else f"127.0.0.1:{port}"


def test_all_ranks_get_one_id(address: str, tmp_path: Path) -> None:
    """Also if they come late, and beside files of an earlier run."""
    (tmp_path / "id").write_bytes(b"\x03\0\0\0old" + bytes(48))
    (tmp_path / "id.1").write_bytes(bytes(16))
    (tmp_path / "id.2").write_bytes(b"ok" + bytes(32))

    def of_rank(rank: int) -> bytes:
        time.sleep(0.1 * (rank % 2))
        return bootstrap.exchange_id(address, rank, 4, lambda: b"the id of rank 0", 20.0)

    assert together(4, of_rank) == [b"the id of rank 0"] * 4


def test_a_rank_that_never_comes(address: str) -> None:
    """Every other rank says so within the time limit."""
    found = together(2, lambda rank: bootstrap.exchange_id(address, rank, 3, lambda: b"id", 0.3))
    assert all(isinstance(error, PeerLost) for error in found)
    assert re.search(r"rank (1, )?2 of 3 did not come to .* in time: start all ranks with this address", str(found[0]))
    assert re.search(r"rank 1 got no answer at .* in time( \(.*refused\))?: rank 0, or another rank", str(found[1]))


def test_ranks_of_different_sizes(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank that has come is told. The wrong one comes last here."""
    has_come, judge = threading.Event(), bootstrap._Listener._judge
    monkeypatch.setattr(bootstrap, "_TELL_SECONDS", 0.1)
    monkeypatch.setattr(bootstrap._Listener, "_judge", lambda *given: (judge(*given), has_come.set())[0])
    sizes = {0: 3, 1: 3, 2: 4}

    def of_rank(rank: int) -> bytes:
        if rank == 2:
            has_come.wait(20)
        return bootstrap.exchange_id(f"127.0.0.1:{port}", rank, sizes[rank], lambda: b"id", 20.0)

    found = together(3, of_rank)
    assert isinstance(found[2], NotSupported)
    assert "rank 2 has size = 4, and rank 0 has 3: must be the same on all ranks; correct one" in str(found[2])
    assert str(found[0]) == str(found[1]) == str(found[2])


def test_two_processes_of_one_rank(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_TELL_SECONDS", 0.1)
    ranks = {0: 0, 1: 1, 2: 1}
    address = f"127.0.0.1:{port}"
    found = together(3, lambda number: bootstrap.exchange_id(address, ranks[number], 3, lambda: b"id", 20.0))
    assert {str(error) for error in found} == {"two processes have rank = 1: must be different on each; correct one"}


def test_strangers_at_the_port(port: int) -> None:
    """A connection that says something else is dropped."""
    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
                    return
            except OSError:
                time.sleep(0.01)

    thread = threading.Thread(target=knock)
    thread.start()

    def of_rank(rank: int) -> bytes:
        if rank:
            thread.join()
        return bootstrap.exchange_id(f"127.0.0.1:{port}", rank, 2, lambda: b"id", 20.0)

    try:
        assert together(2, of_rank) == [b"id"] * 2
    finally:
        stop.set()


def of_ranks(address: str, limit: float = 20.0) -> list[Any]:
    """Returns what two ranks get from an address."""
    return together(2, lambda rank: bootstrap.exchange_id(address, rank, 2, lambda: b"id", limit))


def talks(port: int, words: list[bytes], pause: float) -> Callable[[], None]:
    """Returns a function that connects to a port as soon as somebody listens, and sends words with pauses."""

    def talk() -> None:
        for _ in range(500):
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            except OSError:
                time.sleep(0.01)
                continue
            with stranger, contextlib.suppress(OSError):  # it was hung up
                for word in words:
                    stranger.sendall(word)
                    time.sleep(pause)
            return

    return talk


@pytest.mark.parametrize(
    ("words", "pause"),
    [
        ([b"x"] * 8, 0.1),
        ([bootstrap._MAGIC + b"\1"], 0.0),
        ([bootstrap._MAGIC + bytes(64)], 0.0),
        ([bootstrap._MAGIC + bytes(8), bytes(1000)], 0.0),
        ([bytes(4096)], 0.0),
    ],
    ids=["slow", "half a hello", "a wrong code", "too much", "long"],
)
def test_strangers_that_speak(port: int, words: list[bytes], pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is a rank, and a slow one does not take the ranks' time."""
    monkeypatch.setattr(bootstrap, "_HELLO_SECONDS", 0.3)
    thread = threading.Thread(target=talks(port, words, pause))
    thread.start()

    def of_rank(rank: int) -> bytes:
        time.sleep(0.1 * rank)
        return bootstrap.exchange_id(f"127.0.0.1:{port}", rank, 2, lambda: b"id", 20.0)

    assert together(2, of_rank) == [b"id"] * 2
    thread.join()


@pytest.mark.parametrize("cut", [1, 4, 20, 120])
def test_half_an_answer_is_none(cut: int) -> None:
    """Rank 0 ends while it sends: the rank asks again, and does not take a part of an identifier."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ranks = bootstrap._Ranks(0, 2, b"", time.monotonic() + 20)

        def serve() -> None:
            for end in (cut, None):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(bootstrap._MAGIC + bytes(16))
                    hello = bootstrap._receive(connection, bootstrap._HELLO_BYTES, ranks.limit)
                    nonces = bytes(16) + hello[len(bootstrap._MAGIC) + 16 : -32]
                    answer = bootstrap._answer(ranks, b"ok", bytes(range(100)), nonces)[:end]
                    connection.sendall(answer[:3])
                    time.sleep(0.05)
                    connection.sendall(answer[3:])

        thread = threading.Thread(target=serve)
        thread.start()
        found = bootstrap.exchange_id(f"127.0.0.1:{port}", 1, 2, lambda: b"", 20.0)
        thread.join()
    assert found == bytes(range(100))


def test_a_connection_with_itself_is_none(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP makes one where nobody listens if the system gives the connecting side that port: rank 0 is not there yet."""
    connect_to, with_itself = socket.create_connection, socket.socket()
    with_itself.bind(("127.0.0.1", 0))
    with_itself.connect(with_itself.getsockname())
    connections = iter([with_itself])
    monkeypatch.setattr(
        socket, "create_connection", lambda *at, **more: next(connections, None) or connect_to(*at, **more)
    )
    assert of_ranks(f"127.0.0.1:{port}") == [b"id"] * 2


def test_an_error_of_an_earlier_attempt_is_not_shown(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 came late, and left when another rank did not come: that it was not there at first explains nothing."""
    connect_to, now, accepted = socket.create_connection, [0.0], list[socket.socket]()
    refused = iter([ConnectionRefusedError(111, "Connection refused")])
    server = socket.create_server(("127.0.0.1", port))

    def late(*at: Any, **more: Any) -> socket.socket:
        for error in refused:
            raise error
        found = connect_to(*at, **more)
        accepted.append(server.accept()[0])
        accepted[0].shutdown(socket.SHUT_WR)
        now[0] = 9.0
        return found

    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    monkeypatch.setattr(socket, "create_connection", late)
    with server, pytest.raises(PeerLost, match=rf"rank 1 got no answer at 127.0.0.1:{port} in time: rank 0, or"):
        bootstrap.exchange_id(f"127.0.0.1:{port}", 1, 3, lambda: b"", 5.0)
    accepted[0].close()


def test_names_and_addresses_of_ip_version_6(port: int) -> None:
    assert of_ranks(f"localhost:{port}") == [b"id"] * 2
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert of_ranks(f"[::1]:{port}") == [b"id"] * 2


def test_a_name_that_has_an_address_of_ip_version_6_alone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: look_up("::1", *rest, **more))
    assert of_ranks(f"rank0.example:{port}") == [b"id"] * 2


def test_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    one, other = of_ranks("no-such-host.example:29500", 0.1)
    assert isinstance(one, NotSupported)
    assert "rank 0 cannot listen there ([Errno -2] Name or service not known); pass a free port of its host" in str(one)
    assert isinstance(other, PeerLost)
    assert "in time ([Errno -2] Name or service not known): rank 0, or another rank" in str(other)


def hello(rank: int, size: int, greeting: bytes, secret: bytes = b"") -> bytes:
    """What a rank answers to the greeting of rank 0."""
    ranks = bootstrap._Ranks(rank, size, secret, 0.0)
    said = rank.to_bytes(8, "little") + size.to_bytes(8, "little") + bytes(16)
    return bootstrap._MAGIC + said + ranks.code(b"hello", greeting[len(bootstrap._MAGIC) :], said)


class Strangers:
    """Connections to a port where rank 0 listens, which stay open."""

    def __init__(self, port: int) -> None:
        self.open: list[socket.socket] = []
        self._port = port

    def connect(self) -> socket.socket:
        for _ in range(1000):
            try:
                self.open.append(socket.create_connection(("127.0.0.1", self._port), timeout=5))
                return self.open[-1]
            except OSError:
                time.sleep(0.01)
        raise AssertionError("nobody listens")

    def close(self) -> None:
        for connection in self.open:
            connection.close()


@pytest.fixture
def strangers(port: int) -> Iterator[Strangers]:
    found = Strangers(port)
    yield found
    found.close()


def beside(port: int, attack: Callable[[], object], secret: str | None = None, limit: float = 20.0) -> list[Any]:
    """Returns what two ranks get when rank 1 comes after strangers."""

    def of_rank(rank: int) -> bytes:
        if rank:
            attack()
        return bootstrap.exchange_id(f"127.0.0.1:{port}", rank, 2, lambda: b"id", limit, secret)

    return together(2, of_rank)


@pytest.mark.parametrize("count", [1, 10, 3 * bootstrap._MOST_STRANGERS])
def test_idle_connections_do_not_delay_the_ranks(port: int, strangers: Strangers, count: int) -> None:
    begin = time.monotonic()
    assert beside(port, lambda: [strangers.connect() for _ in range(count)]) == [b"id"] * 2
    assert time.monotonic() - begin < bootstrap._HELLO_SECONDS, "none of them was waited for"


def test_idle_connections_are_hung_up(port: int, strangers: Strangers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_HELLO_SECONDS", 0.1)

    def attack() -> None:
        stranger = strangers.connect()
        assert stranger.recv(100).startswith(bootstrap._MAGIC)
        assert stranger.recv(100) == b""

    assert beside(port, attack) == [b"id"] * 2


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ECONNABORTED, errno.ENOBUFS])
def test_too_many_open_files_end_no_job(port: int, strangers: Strangers, code: int) -> None:
    """As of rank 0 under a small limit: the oldest connection that has said nothing makes room."""
    accept, left = socket.socket.accept, iter(range(6))

    def failing(server: socket.socket) -> Any:
        if next(left, None) in (2, 3, 4):
            raise OSError(code, os.strerror(code))
        return accept(server)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "accept", failing)
        assert beside(port, lambda: [strangers.connect() for _ in range(2)]) == [b"id"] * 2
    assert next(left, None) is None or code, "rank 0 went on"


def test_a_rank_that_hangs_up_may_come_again(port: int, strangers: Strangers) -> None:
    has_gone = threading.Event()

    def of_rank(rank: int) -> bytes:
        if rank == 1:  # its first process ends before rank 2 comes
            first = strangers.connect()
            first.sendall(hello(1, 3, first.recv(bootstrap._GREETING_BYTES)))
            time.sleep(0.1)
            first.close()
            has_gone.set()
        elif rank:
            has_gone.wait(20)
        return bootstrap.exchange_id(f"127.0.0.1:{port}", rank, 3, lambda: b"id", 20.0)

    assert together(3, of_rank) == [b"id"] * 3


@pytest.mark.parametrize("said", [(1, 2), (1, 3), (0, 2), (2**64 - 1, 2)])
@pytest.mark.parametrize("secret", [b"", b"guessed"])
def test_a_stranger_cannot_pose_as_a_rank(
    port: int, strangers: Strangers, said: tuple[int, int], secret: bytes
) -> None:
    """It gets no identifier, ends no job, and takes no rank's place, for want of the secret."""
    got = []

    def attack() -> None:
        stranger = strangers.connect()
        stranger.sendall(hello(*said, stranger.recv(bootstrap._GREETING_BYTES), secret))
        got.append(b"".join(iter(lambda: stranger.recv(4096), b"")))

    assert beside(port, attack, "the secret") == [b"id"] * 2
    assert len(got[0]) == bootstrap._HEAD_BYTES + bootstrap._CODE_BYTES, "no, and nothing more"


def test_a_hello_of_another_connection_is_none(port: int, strangers: Strangers) -> None:
    """Whoever listened to a rank cannot say the same."""

    def attack() -> None:
        one, other = strangers.connect(), strangers.connect()
        other.recv(bootstrap._GREETING_BYTES)
        other.sendall(hello(1, 2, one.recv(bootstrap._GREETING_BYTES), b"the secret"))
        assert other.recv(100).startswith(b"no")

    assert beside(port, attack, "the secret") == [b"id"] * 2


@pytest.mark.parametrize(
    "answer", [b"ok\2\0\0\0id" + bytes(32), b"no\0\0\0\0" + bytes(32), b"ok\xff\xff\xff\xff", b"HTTP"]
)
def test_a_stranger_cannot_pose_as_rank_0(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        port, ranks = server.getsockname()[1], []

        def serve() -> None:
            while not ranks:
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    connection.sendall(bootstrap._MAGIC + bytes(16))
                    connection.recv(1000)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(PeerLost, match="rank 1 got no answer"):
                bootstrap.exchange_id(f"127.0.0.1:{port}", 1, 2, lambda: b"", 0.3, "the secret")
        finally:
            ranks.append(1)
            thread.join()


def test_different_secrets_are_said(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bootstrap.VARIABLE, "of the environment")
    found = together(2, lambda rank: bootstrap.exchange_id(address, rank, 2, lambda: b"id", 0.5, "xy"[rank]))
    assert [type(error) for error in found] == [PeerLost] * 2
    if ":" in address:
        assert all(f"a process there has another secret, or a wrong {bootstrap.VARIABLE}" in str(it) for it in found)
    both = together(
        2,
        lambda rank: bootstrap.exchange_id(address, rank, 2, lambda: b"id", 20.0, [None, "of the environment"][rank]),
    )
    assert both == [b"id"] * 2
    assert "of the environment" not in repr(bootstrap._Ranks(0, 2, b"of the environment", 0.0))


@pytest.mark.parametrize("secret", ["", b"bytes", 7])
def test_no_secret(secret: Any) -> None:
    with pytest.raises(NotSupported, match=r"secret = (an empty str|an object of (bytes|int)): must be a str"):
        bootstrap.exchange_id("host:80", 0, 2, lambda: b"", 1.0, secret)


def test_files_are_of_this_user_alone(tmp_path: Path) -> None:
    seen = set[tuple[str, int]]()
    before, watching = os.umask(0), threading.Event()

    def watch() -> None:
        while not watching.wait(0.002):
            for path in tmp_path.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    seen.add((path.name.split(".")[0], path.stat().st_mode & 0o777))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert of_ranks(str(tmp_path / "id")) == [b"id"] * 2
    finally:
        os.umask(before)
        watching.set()
        thread.join()
    assert {mode for name, mode in seen if name == "id"} == {0o600}


@pytest.mark.parametrize("name", ["id", "id.1"])
@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "link to a file", "zeros", "of others"])
def test_what_is_in_the_place_of_a_file(tmp_path: Path, name: str, kind: str) -> None:
    """It is replaced, and neither read nor followed; a pipe has no writer to wait for."""
    path, own = tmp_path / name, tmp_path / "own"
    own.write_text("precious")
    if kind == "pipe":
        os.mkfifo(path)
    elif "link" in kind:
        path.symlink_to(own if "file" in kind else tmp_path / "nothing")
    else:
        path.write_bytes(bytes(1 << 20) if kind == "zeros" else bytes(48))
        path.chmod(0o666)
    assert of_ranks(str(tmp_path / "id")) == [b"id"] * 2
    assert own.read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["own"]


def test_a_pipe_that_stays_hangs_nobody(tmp_path: Path) -> None:
    """Rank 2 never comes, and a pipe is in its place."""
    os.mkfifo(tmp_path / "id.2")
    found = together(2, lambda rank: bootstrap.exchange_id(str(tmp_path / "id"), rank, 3, lambda: b"id", 0.3))
    assert [type(error) for error in found] == [PeerLost] * 2
    assert f"({tmp_path}/id.2 must be a file of this user that nobody else may write)" in str(found[0])


@pytest.mark.parametrize("owner", [12345, None])
def test_an_identifier_of_another_user_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int | None
) -> None:
    """Who may read FILE.1 and write FILE, as in a folder of everybody, knows the random bytes."""
    path, ranks = tmp_path / "id", bootstrap._Ranks(0, 2, b"", 0.0)
    real = os.fstat

    def fstat(handle: int) -> os.stat_result:
        found = real(handle)
        is_foreign = owner is not None and path.exists() and os.path.samestat(found, path.stat())
        return os.stat_result([*found[:4], owner, *found[5:10]]) if is_foreign else found

    monkeypatch.setattr(os, "fstat", fstat)

    def foreign() -> None:
        while not (tmp_path / "id.1").exists():
            time.sleep(0.01)
        content = (7).to_bytes(4, "little") + b"EVIL ID" + (tmp_path / "id.1").read_bytes()[:16]
        bootstrap._write(path, content + ranks.code(b"id", content))

    found = together(
        2, lambda number: bootstrap.exchange_id(str(path), 1, 2, lambda: b"", 0.5) if number else foreign()
    )
    if owner is None:
        assert found[1] == b"EVIL ID", "without a secret a process of this user is trusted"
    else:
        assert isinstance(found[1], PeerLost)
        assert "id must be a file of this user that nobody else may write" in str(found[1])


def test_no_files_are_left(tmp_path: Path) -> None:
    """Neither those of ranks that waited in vain."""
    found = together(3, lambda rank: bootstrap.exchange_id(str(tmp_path / "id"), rank, 4, lambda: b"id", 0.2))
    assert [type(error) for error in found] == [PeerLost] * 3
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bootstrap.tempfile, "mkstemp", fails)
    with pytest.raises(NotSupported, match=r"must be in a folder that this process can write \(\[Errno 13\]"):
        bootstrap.exchange_id(str(tmp_path / "id"), 1, 2, lambda: b"", 1.0)
    for address in (str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(NotSupported, match=r"must be a file, and not a folder; add the name of one"):
            bootstrap.exchange_id(address, 1, 2, lambda: b"", 1.0)


@pytest.mark.parametrize("address", ["/tmp/a\0b", "/tmp/" + "x" * 300, "x" * 300 + ":80", "é" * 70 + ".com:80"])
def test_no_name_of_a_file_or_a_host(address: str) -> None:
    with pytest.raises(
        NotSupported, match=r"address = .*: must be (the path of a file|host:port with the name) .*\(.*\)"
    ):
        bootstrap.exchange_id(address, 0, 2, lambda: b"", 1.0)


def test_a_folder_in_the_place_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "id.1").mkdir()
    one, other = of_ranks(str(tmp_path / "id"), 0.3)
    assert isinstance(one, PeerLost)
    assert "id.1 must be a file of this user that nobody else may write" in str(one)
    assert isinstance(other, NotSupported)


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:99999", None, 7, "/no such folder/id"])
def test_no_address(address: Any) -> None:
    with pytest.raises(NotSupported, match=r"address = .*: must be (host:port|a file in a folder that exists)"):
        bootstrap.exchange_id(address, 0, 2, lambda: b"", 1.0)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NotSupported, match=r"rank 0 cannot listen there \(.*\); pass a free port of its host"):
            bootstrap.exchange_id(address, 0, 2, lambda: b"", 1.0)
