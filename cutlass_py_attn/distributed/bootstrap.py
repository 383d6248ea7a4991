"""Bootstrap: the ranks of a new group find each other and get one identifier, through a file or a TCP port.

Rank 0 creates the identifier. It gives it away when all ranks have come, so that a rank that never comes is reported
here, with its number, and NCCL starts with all ranks.

The file: every other rank writes FILE.RANK with random bytes of its own. Rank 0 writes FILE with the identifier and all
of these; a rank takes the identifier if its own are among them, so that files of an earlier run do no harm, and says so
in FILE.RANK. Rank 0 removes the files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cutlass_py_attn.distributed.communicator import PeerLost
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.scalars import shown

_NONCE_BYTES: Final = 16
_MAGIC: Final = b"cutlass_py_attn 1"
_POLL_SECONDS: Final = 0.02
_HELLO_BYTES: Final = len(_MAGIC) + 16
_HELLO_SECONDS: Final = 1.0  # that rank 0 waits for the hello of one connection, while others queue
_TELL_SECONDS: Final = 1.0  # that rank 0 waits for other ranks, to tell them that ranks disagree
_HEAD_BYTES: Final = 2 + 4  # of an answer: its kind, and the length of the rest
_MOST_BYTES: Final = 1 << 16  # of the rest


def exchange_id(address: str, rank: int, size: int, create: Callable[[], bytes], timeout: float) -> bytes:
    """Returns the identifier that `create` made on rank 0.

    address: "host:port" where rank 0 listens, or the path of a file that all ranks see, which has a "/"

    PeerLost: ranks did not come within `timeout` seconds. NotSupported: the address is none, or ranks disagree.
    """
    if reasons := [*_objections(address)]:
        raise NotSupported(reasons)
    if size == 1:
        return create()
    through = _through_file if "/" in address else _through_port
    return through(address, rank, size, create, time.monotonic() + timeout)


def _objections(address: object) -> Iterator[str]:
    if isinstance(address, str) and "/" in address:
        if address.endswith("/") or Path(address).is_dir():
            yield f"address = {address!r}: must be a file, and not a folder; add the name of one"
        elif not Path(address).parent.is_dir():
            yield f"address = {address!r}: must be a file in a folder that exists; create {Path(address).parent}"
        return
    port = address.rpartition(":")[2] if isinstance(address, str) else ""
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16 and str(address).rpartition(":")[0]):
        yield f"address = {shown(address)}: must be host:port, or the path of a file with a '/' in it; pass one"


def _absent(missing: list[int], size: int, address: str) -> PeerLost:
    names = ", ".join(map(str, missing))
    return PeerLost(
        f"rank {names} of {size} did not come to {address} in time: start all ranks with this address, and one time "
        "limit"
    )


def _no_answer(rank: int, address: str, error: OSError | None = None) -> PeerLost:
    found = "" if error is None or isinstance(error, TimeoutError) else f" ({error})"
    return PeerLost(
        f"rank {rank} got no answer at {address} in time{found}: rank 0, or another rank that it waits for, did not "
        "come; start all ranks with this address"
    )


def _left(limit: float) -> float:
    """Returns the seconds until the limit, as the time limit of a socket: positive, and not more than C takes."""
    return min(max(limit - time.monotonic(), 1e-3), 1e6)


# A file


def _through_file(address: str, rank: int, size: int, create: Callable[[], bytes], limit: float) -> bytes:
    path = Path(address)
    if rank:
        return _read_id(path, rank, limit)
    identifier, written = create(), b""
    others = [path.with_name(f"{path.name}.{other}") for other in range(1, size)]
    accepted = _accepted(identifier)
    try:
        while (found := [_read(other) for other in others]) != [accepted] * len(others):
            nonces = [text for text in found if len(text) == _NONCE_BYTES]
            have_come = len(nonces) + found.count(accepted) == len(others)
            content = len(identifier).to_bytes(4, "little") + identifier + b"".join(nonces)
            if have_come and content != written:
                _write(path, content)
                written = content
            if time.monotonic() > limit:
                raise _absent([number for number, text in enumerate(found, 1) if text != accepted], size, address)
            time.sleep(_POLL_SECONDS)
        for other in others:
            other.unlink(missing_ok=True)
    finally:
        path.unlink(missing_ok=True)
    return identifier


def _read_id(path: Path, rank: int, limit: float) -> bytes:
    """Returns the identifier from the file of rank 0."""
    nonce, own = secrets.token_bytes(_NONCE_BYTES), path.with_name(f"{path.name}.{rank}")
    _write(own, nonce)
    try:
        while time.monotonic() <= limit:
            text = _read(path)
            end = 4 + int.from_bytes(text[:4], "little")
            nonces = text[end:]
            if nonce in (nonces[at : at + _NONCE_BYTES] for at in range(0, len(nonces), _NONCE_BYTES)):
                _write(own, _accepted(text[4:end]))
                return text[4:end]
            time.sleep(_POLL_SECONDS)
    except BaseException:
        own.unlink(missing_ok=True)
        raise
    own.unlink(missing_ok=True)
    raise _no_answer(rank, str(path))


def _accepted(identifier: bytes) -> bytes:
    """Returns what a rank writes when it has taken the identifier; it is longer than random bytes."""
    return b"ok" + hashlib.sha256(identifier).digest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # not there yet, or removed
        return b""


def _write(path: Path, content: bytes) -> None:
    """Writes a file that other processes see whole or not at all; NotSupported if the folder refuses it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise NotSupported(
            f"address = {str(path)!r}: must be in a folder that this process can write ({error}); pass another one"
        ) from error


# A TCP port


def _through_port(address: str, rank: int, size: int, create: Callable[[], bytes], limit: float) -> bytes:
    host, _, port = address.rpartition(":")
    place = host.strip("[]"), int(port)
    if rank:
        return _ask(place, address, rank, size, limit)
    identifier = create()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(place, address))
        ranks: dict[int, socket.socket] = {}
        wrong, end = "", limit
        while len(ranks) < size - 1:
            missing = [other for other in range(1, size) if other not in ranks]
            server.settimeout(_left(end))
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                if wrong:
                    break
                listened = f"{address}, where rank 0 listened as {server.getsockname()[0]},"
                raise _absent(missing, size, listened) from error
            stack.enter_context(connection)
            other, found = _hello_of(connection, ranks, size, limit)
            if found and not wrong:  # the others are told too, if they come now
                wrong, end = found, min(limit, time.monotonic() + _TELL_SECONDS)
            if other:
                ranks[other] = connection
        answer = _answer(b"no", wrong.encode()) if wrong else _answer(b"ok", identifier)
        for connection in ranks.values():
            with contextlib.suppress(OSError):  # NCCL reports a rank that has ended meanwhile
                connection.sendall(answer)
    if wrong:
        raise NotSupported(wrong)
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


def _answer(kind: bytes, content: bytes) -> bytes:
    """Returns what rank 0 sends: with its length, so that a part of it is no answer."""
    return kind + len(content).to_bytes(4, "little") + content


def _hello_of(connection: socket.socket, ranks: dict[int, socket.socket], size: int, limit: float) -> tuple[int, str]:
    """Returns the rank at the other end, 0 for a stranger, and what is wrong with it.

    A rank sends its hello at once. One that is dropped for being slow connects again.
    """
    try:
        text = _receive(connection, _HELLO_BYTES, min(limit, time.monotonic() + _HELLO_SECONDS))
    except OSError:
        return 0, ""
    if not text.startswith(_MAGIC) or len(text) < _HELLO_BYTES:
        return 0, ""
    connection.settimeout(_HELLO_SECONDS)
    rank, its_size = (int.from_bytes(text[at : at + 8], "little") for at in (len(_MAGIC), len(_MAGIC) + 8))
    if its_size != size:
        wrong = f"rank {rank} has size = {its_size}, and rank 0 has {size}: must be the same on all ranks; correct one"
    elif rank in ranks:
        wrong = f"two processes have rank = {rank}: must be different on each; correct one"
    elif not 0 < rank < size:  # no rank of this package sends it
        return 0, ""
    else:
        return rank, ""
    with contextlib.suppress(OSError):
        connection.sendall(_answer(b"no", wrong.encode()))
    return 0, wrong


def _ask(place: tuple[str, int], address: str, rank: int, size: int, limit: float) -> bytes:
    """Returns the identifier from rank 0's port."""
    while True:  # at least once, however little time is left
        refused: OSError | None = None
        try:
            with socket.create_connection(place, timeout=_left(limit)) as connection:
                _expect_another_side(connection)
                connection.sendall(_MAGIC + rank.to_bytes(8, "little") + size.to_bytes(8, "little"))
                head = _receive(connection, _HEAD_BYTES, limit)
                count = int.from_bytes(head[2:], "little")
                content = _receive(connection, min(count, _MOST_BYTES), limit)
            if len(head) == _HEAD_BYTES and len(content) == count:
                if head.startswith(b"ok"):
                    return content
                if head.startswith(b"no"):
                    raise NotSupported(content.decode(errors="replace"))
        except OSError as error:  # nobody listens yet, or rank 0 has ended
            refused = error
        if time.monotonic() > limit:
            raise _no_answer(rank, address, refused)
        time.sleep(_POLL_SECONDS)


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
