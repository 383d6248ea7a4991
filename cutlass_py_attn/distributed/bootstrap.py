"""Bootstrap: the ranks of a new group find each other and get one identifier, through a file or a TCP port.

Rank 0 creates the identifier. It gives it away when all ranks have come, so that a rank that never comes is reported
here, with its number, and NCCL starts with all ranks.

The file: every other rank writes FILE.RANK with random bytes of its own. Rank 0 writes FILE with the identifier and all
of these; a rank takes the identifier if its own are among them, so that files of an earlier run do no harm, and says so
in FILE.RANK. Rank 0 removes the files. A file counts if it belongs to this user, and no other user may write to it.

The port: rank 0 sends random bytes to whoever connects, which answers with its rank, size and random bytes of its own.

A secret that all ranks know makes a code (HMAC-SHA256) of each message, with the random bytes of both sides. Without
one the codes are those of an empty secret: they tell ranks from strangers that speak another protocol.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.compilation.private_folder import read_private
from cutlass_py_attn.distributed.communicator import PeerLost
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal, refuse

VARIABLE: Final = "CUTLASS_PY_ATTN_SECRET"

_NONCE_BYTES: Final = 16
_CODE_BYTES: Final = 32
_MAGIC: Final = b"cutlass_py_attn 2"
_POLL_SECONDS: Final = 0.02
_AGAIN_SECONDS: Final = 0.2  # until a rank asks again that rank 0 has hung up on
_GREETING_BYTES: Final = len(_MAGIC) + _NONCE_BYTES
_HELLO_BYTES: Final = len(_MAGIC) + 16 + _NONCE_BYTES + _CODE_BYTES
_HELLO_SECONDS: Final = 5.0  # that rank 0 waits for the hello of one connection, beside others
_MOST_STRANGERS: Final = 64  # connections without a hello; the oldest is dropped for another one
_TELL_SECONDS: Final = 1.0  # that rank 0 waits for other ranks, to tell them that ranks disagree
_HEAD_BYTES: Final = 2 + 4  # of an answer: its kind, and the length of the rest
_MOST_BYTES: Final = 1 << 16  # of the rest, and of an identifier


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What one process knows of the group: its rank, their number, the secret, and the time of its time limit."""

    rank: int
    size: int
    secret: bytes = field(repr=False)
    limit: float

    def code(self, *parts: bytes) -> bytes:
        """Returns the code of a message, whose parts have a fixed length but for the last."""
        return hmac.digest(self.secret, b"\0".join(parts), "sha256")

    def is_code(self, given: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(given, self.code(*parts))


def exchange_id(
    address: str, rank: int, size: int, create: Callable[[], bytes], timeout: float, secret: str | None = None
) -> bytes:
    """Returns the identifier that `create` made on rank 0.

    address: "host:port" where rank 0 listens, or the path of a file that all ranks see, which has a "/"
    secret: the same on all ranks; None for the environment variable CUTLASS_PY_ATTN_SECRET, or none

    PeerLost: ranks did not come within `timeout` seconds. NotSupported: a wrong argument, or ranks disagree.
    """
    if reasons := [*_address_refusals(address), *_secret_refusals(secret)]:
        raise NotSupported(reasons)
    if size == 1:
        return create()
    given = os.environ.get(VARIABLE, "") if secret is None else secret
    ranks = _Ranks(rank, size, given.encode(errors="surrogateescape"), time.monotonic() + timeout)
    through = _through_file if "/" in address else _through_port
    return through(address, ranks, create)


def _secret_refusals(secret: object) -> Iterator[Refusal]:
    if secret is not None and not (isinstance(secret, str) and secret):  # an error does not repeat it
        kind = "an empty str" if secret == "" else f"an object of {type(secret).__name__}"
        yield Refusal("secret", kind, "must be a str with characters, or None", "pass one")


def _address_refusals(address: Any) -> Iterator[Refusal]:
    if isinstance(address, str) and "/" in address:
        try:
            if "\0" in address:
                raise ValueError("it has a zero byte")
            if address.endswith("/") or Path(address).is_dir():
                yield refuse("address", address, "must be a file, and not a folder", "add the name of one")
            elif not Path(address).parent.is_dir():
                remedy = f"create {Path(address).parent}"
                yield refuse("address", address, "must be a file in a folder that exists", remedy)
        except (OSError, ValueError) as error:  # a name that is too long, for example
            yield refuse("address", address, f"must be the path of a file ({error})", "pass another one")
        return
    port = address.rpartition(":")[2] if isinstance(address, str) else ""
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16 and str(address).rpartition(":")[0]):
        yield refuse("address", address, "must be host:port, or the path of a file with a '/' in it", "pass one")
        return
    try:
        _host_of(address).encode("idna")
    except UnicodeError as error:
        yield refuse("address", address, f"must be host:port with the name of a host ({error})", "correct it")


_OTHER_SECRET: Final = f"a process there has another secret, or a wrong {VARIABLE}"


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _absent(missing: list[int], size: int, address: str, why: str) -> PeerLost:
    names = ", ".join(map(str, missing))
    return PeerLost(
        f"rank {names} of {size} did not come to {address} in time{_in_brackets(why)}: start all ranks with this "
        "address, and one time limit"
    )


def _no_answer(rank: int, address: str, why: str) -> PeerLost:
    return PeerLost(
        f"rank {rank} got no answer at {address} in time{_in_brackets(why)}: rank 0, or another rank that it waits "
        "for, did not come; start all ranks with this address"
    )


def _in_brackets(why: str) -> str:
    return f" ({why})" if why else ""


def _left(limit: float) -> float:
    """Returns the seconds until the limit, as the time limit of a socket: positive, and not more than C takes."""
    return min(max(limit - time.monotonic(), 1e-3), 1e6)


# A file


def _through_file(address: str, ranks: _Ranks, create: Callable[[], bytes]) -> bytes:
    path = Path(address)
    owner = _owner(path)
    if ranks.rank:
        return _read_id(path, ranks, owner)
    identifier, written = create(), b""
    others = {other: path.with_name(f"{path.name}.{other}") for other in range(1, ranks.size)}
    try:
        while True:
            texts = {other: _read(file, owner, ranks) for other, file in others.items()}
            come = {other: text[:_NONCE_BYTES] for other, text in texts.items() if _is_rank(ranks, other, text)}
            have_it = [other for other, text in texts.items() if _is_thanks(ranks, other, identifier, text)]
            if len(have_it) == len(others):
                break
            content = len(identifier).to_bytes(4, "little") + identifier + b"".join(come.values())
            if len(come) + len(have_it) == len(others) and content != written:
                _write(path, content + ranks.code(b"id", content))
                written = content
            if time.monotonic() > ranks.limit:
                missing = [other for other in others if other not in have_it]
                raise _absent(missing, ranks.size, address, _ignored(others.values(), owner))
            time.sleep(_POLL_SECONDS)
        for file in others.values():
            file.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return identifier


def _read_id(path: Path, ranks: _Ranks, owner: int) -> bytes:
    """Returns the identifier from the file of rank 0."""
    nonce, own = secrets.token_bytes(_NONCE_BYTES), path.with_name(f"{path.name}.{ranks.rank}")
    number = ranks.rank.to_bytes(8, "little")
    _write(own, nonce + ranks.code(b"rank", number, nonce))
    try:
        while time.monotonic() <= ranks.limit:
            text = _read(path, owner, ranks)
            content, code = text[:-_CODE_BYTES], text[-_CODE_BYTES:]
            end = 4 + int.from_bytes(content[:4], "little")
            nonces = content[end:]
            is_mine = nonce in (nonces[at : at + _NONCE_BYTES] for at in range(0, len(nonces), _NONCE_BYTES))
            if is_mine and ranks.is_code(code, b"id", content):
                _write(own, b"ok" + ranks.code(b"ok", number, content[4:end]))
                return content[4:end]
            time.sleep(_POLL_SECONDS)
    except BaseException:
        own.unlink(missing_ok=True)
        raise
    own.unlink(missing_ok=True)
    raise _no_answer(ranks.rank, str(path), _ignored([path], owner))


def _is_rank(ranks: _Ranks, other: int, text: bytes) -> bool:
    """Returns whether another rank has written this, which waits for the identifier."""
    nonce, code = text[:_NONCE_BYTES], text[_NONCE_BYTES:]
    return ranks.is_code(code, b"rank", other.to_bytes(8, "little"), nonce)


def _is_thanks(ranks: _Ranks, other: int, identifier: bytes, text: bytes) -> bool:
    """Returns whether another rank has written this when it had taken the identifier."""
    return text[:2] == b"ok" and ranks.is_code(text[2:], b"ok", other.to_bytes(8, "little"), identifier)


def _owner(path: Path) -> int:
    """Returns to whom a new file in the folder belongs: on a network file system perhaps not to this user."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError as error:
        raise _unwritable(path, error) from error


def _read(path: Path, owner: int, ranks: _Ranks) -> bytes:
    """Returns the contents of a file; b"" if it is not there yet, or not one that a rank writes."""
    return read_private(path, 4 + _MOST_BYTES + ranks.size * _NONCE_BYTES + _CODE_BYTES, owner) or b""


def _ignored(paths: Iterable[Path], owner: int) -> str:
    """Returns the files that are there and that no rank of this user wrote, as a part of a sentence; "" for none."""
    found = [str(path) for path in paths if path.is_symlink() or path.exists()]
    unfit = [path for path in found if read_private(Path(path), owner=owner) is None]
    return f"{', '.join(unfit)} must be a file of this user that nobody else may write" if unfit else ""


def _write(path: Path, content: bytes) -> None:
    """Writes a file that other processes see whole or not at all; NotSupported if the folder refuses it."""
    part = ""
    try:
        handle, part = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)  # mode 0600
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> NotSupported:
    return NotSupported(
        f"address = {str(path)!r}: must be in a folder that this process can write ({error}); pass another one"
    )


# A TCP port


@dataclass(slots=True)
class _Stranger:
    """A connection that has not said its hello: what rank 0 sent and got, and when it hangs up."""

    connection: socket.socket
    nonce: bytes
    end: float
    text: bytes = b""


class _Listener:
    """Rank 0's port until all ranks have come: reads the hellos of all connections side by side.

    A connection that says nothing in time, something else, or the code of another secret, is dropped. wrong: how ranks
    disagree, "" if they do not.
    """

    def __init__(self, server: socket.socket, ranks: _Ranks) -> None:
        self.wrong, self._first_wrong = "", 0.0
        self.has_other_secret = False
        self._server = server
        self._ranks = ranks
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._come: dict[int, tuple[socket.socket, bytes]] = {}  # by rank: its connection, and both random bytes
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._strangers, *(connection for connection, _ in self._come.values())]:
            connection.close()
        self._selector.close()

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self._ranks.size) if rank not in self._come]

    def wait(self) -> None:
        """Returns when all ranks have come, when ranks disagree and the others are told, or after the time limit."""
        end = self._ranks.limit
        while self.missing and time.monotonic() <= end:
            for key, _ in self._selector.select(min(_left(end), _HELLO_SECONDS)):
                if key.data is None:
                    self._accept()
                elif key.data.connection in self._strangers:
                    self._hear(key.data)
                else:
                    self._lose(key.data.connection)
            for stranger in [it for it in self._strangers.values() if time.monotonic() > it.end]:
                self._drop(stranger)
            if self.wrong:  # the others are told too, if they come now
                end = min(end, self._first_wrong + _TELL_SECONDS)

    def answer(self, kind: bytes, content: bytes) -> None:
        """Sends an answer to every rank that has come."""
        for connection, nonces in self._come.values():
            self._send(connection, kind, content, nonces)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # it has gone already, or this process has too many open files
            if self._strangers:
                self._drop(next(iter(self._strangers.values())))
            else:
                time.sleep(_POLL_SECONDS)
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers.values())))
        stranger = _Stranger(connection, secrets.token_bytes(_NONCE_BYTES), time.monotonic() + _HELLO_SECONDS)
        self._strangers[connection] = stranger
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        with contextlib.suppress(OSError):
            connection.send(_MAGIC + stranger.nonce)

    def _hear(self, stranger: _Stranger) -> None:
        """Reads a part of a hello; the stranger is a rank, or is dropped, when it is whole."""
        try:
            part = stranger.connection.recv(_HELLO_BYTES - len(stranger.text))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        stranger.text += part
        is_other = not stranger.text.startswith(_MAGIC[: len(stranger.text)])
        if not part or is_other:
            self._drop(stranger)
        elif len(stranger.text) == _HELLO_BYTES:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        said, code = stranger.text[len(_MAGIC) : -_CODE_BYTES], stranger.text[-_CODE_BYTES:]
        rank, its_size = (int.from_bytes(said[at : at + 8], "little") for at in (0, 8))
        nonces, wrong = stranger.nonce + said[16:], ""
        if not self._ranks.is_code(code, b"hello", stranger.nonce, said):
            self.has_other_secret = True
            self._send(stranger.connection, b"no", b"", nonces)  # whose code says why
        elif its_size != self._ranks.size:
            wrong = (
                f"rank {rank} has size = {its_size}, and rank 0 has {self._ranks.size}: must be the same on all "
                "ranks; correct one"
            )
        elif rank in self._come:
            wrong = f"two processes have rank = {rank}: must be different on each; correct one"
        elif 0 < rank < self._ranks.size:
            del self._strangers[stranger.connection]
            self._come[rank] = stranger.connection, nonces
            return
        if wrong:
            self._send(stranger.connection, b"no", wrong.encode(), nonces)
            if not self.wrong:
                self.wrong, self._first_wrong = wrong, time.monotonic()
        self._drop(stranger)

    def _lose(self, connection: socket.socket) -> None:
        """Forgets a rank that hangs up before it has an answer: it may come again."""
        for rank in [rank for rank, (other, _) in self._come.items() if other is connection]:
            del self._come[rank]
            self._selector.unregister(connection)
            connection.close()

    def _drop(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)
        stranger.connection.close()

    def _send(self, connection: socket.socket, kind: bytes, content: bytes, nonces: bytes) -> None:
        with contextlib.suppress(OSError):  # NCCL reports a rank that has ended meanwhile
            connection.settimeout(_HELLO_SECONDS)
            connection.sendall(_answer(self._ranks, kind, content, nonces))


def _through_port(address: str, ranks: _Ranks, create: Callable[[], bytes]) -> bytes:
    place = _host_of(address), int(address.rpartition(":")[2])
    if ranks.rank:
        return _ask(place, address, ranks)
    identifier = create()
    with _listen(place, address) as server, _Listener(server, ranks) as listener:
        listener.wait()
        if listener.wrong:
            listener.answer(b"no", listener.wrong.encode())
            raise NotSupported(listener.wrong)
        if listener.missing:
            listened = f"{address}, where rank 0 listened as {server.getsockname()[0]},"
            raise _absent(listener.missing, ranks.size, listened, _OTHER_SECRET if listener.has_other_secret else "")
        listener.answer(b"ok", identifier)
    return identifier


def _listen(place: tuple[str, int], address: str) -> socket.socket:
    """Returns a socket that listens at the first address of the host that this machine has; NotSupported if none."""
    errors: list[OSError] = []
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    except OSError as error:
        found = []
        errors.append(error)
    for family, _, _, _, at in found:
        try:
            return socket.create_server(at[:2], family=family)
        except OSError as error:
            errors.append(error)
    raise NotSupported(
        f"address = {address!r}: rank 0 cannot listen there ({'; '.join(map(str, errors))}); pass a free port of its "
        "host"
    ) from errors[0]


def _answer(ranks: _Ranks, kind: bytes, content: bytes, nonces: bytes) -> bytes:
    """Returns what rank 0 sends: with its length, so that a part of it is no answer, and its code."""
    return kind + len(content).to_bytes(4, "little") + content + ranks.code(kind, nonces, content)


def _ask(place: tuple[str, int], address: str, ranks: _Ranks) -> bytes:
    """Returns the identifier from rank 0's port."""
    has_other_secret = False
    while True:  # at least once, however little time is left
        why, pause = "", _AGAIN_SECONDS
        try:
            with socket.create_connection(place, timeout=_left(ranks.limit)) as connection:
                _expect_another_side(connection)
                kind, content = _talk(connection, ranks)
            if kind == b"ok":
                return content
            if kind == b"no":
                raise NotSupported(content.decode(errors="replace"))
            has_other_secret = has_other_secret or bool(kind)
        except TimeoutError:
            pass
        except OSError as error:  # nobody listens yet, or rank 0 has ended
            why, pause = str(error), _POLL_SECONDS
        if time.monotonic() > ranks.limit:
            raise _no_answer(ranks.rank, address, _OTHER_SECRET if has_other_secret else why)
        time.sleep(pause)


def _talk(connection: socket.socket, ranks: _Ranks) -> tuple[bytes, bytes]:
    """Returns the kind and the content of rank 0's answer: "ok" or "no", "?" for another secret, b"" for no answer."""
    greeting = _receive(connection, _GREETING_BYTES, ranks.limit)
    if len(greeting) < _GREETING_BYTES or not greeting.startswith(_MAGIC):
        return b"", b""
    nonce, own = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    said = ranks.rank.to_bytes(8, "little") + ranks.size.to_bytes(8, "little") + own
    connection.sendall(_MAGIC + said + ranks.code(b"hello", nonce, said))
    head = _receive(connection, _HEAD_BYTES, ranks.limit)
    kind, count = head[:2], int.from_bytes(head[2:], "little")
    if len(head) < _HEAD_BYTES or kind not in (b"ok", b"no") or count > _MOST_BYTES:
        return b"", b""
    text = _receive(connection, count + _CODE_BYTES, ranks.limit)
    if len(text) < count + _CODE_BYTES:
        return b"", b""
    is_right = ranks.is_code(text[count:], kind, nonce + own, text[:count])
    return (kind, text[:count]) if is_right else (b"?", b"")


def _expect_another_side(connection: socket.socket) -> None:
    """Raises ConnectionRefusedError if a connection to a port where nobody listens was made with itself.

    TCP does so where the system gives the connecting side that very port, as it may for a port of its dynamic range.
    """
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _receive(connection: socket.socket, count: int, limit: float) -> bytes:
    """Returns `count` bytes, or those until the other side closes; TimeoutError after the time limit."""
    found = b""
    while len(found) < count:
        connection.settimeout(_left(limit))
        if not (part := connection.recv(count - len(found))):
            break
        found += part
        if time.monotonic() > limit:
            raise TimeoutError("the other side sent too slowly")
    return found
