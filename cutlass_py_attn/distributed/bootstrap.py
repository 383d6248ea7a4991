"""Bootstrap: the ranks of a new group find each other and get one identifier, through a file or a TCP port.

Rank 0 creates the identifier. It gives it away when all ranks have come, so that a rank that never comes is reported
here, with its number, and NCCL starts with all ranks.

The file: every other rank writes FILE.RANK with random bytes of its own. Rank 0 writes FILE with the identifier and all
of these; a rank takes the identifier if its own are among them, so that files of an earlier run do no harm, and says so
in FILE.RANK. Rank 0 removes the files.
"""

from __future__ import annotations

import contextlib
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
        if not Path(address).parent.is_dir():
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


def _no_answer(rank: int, address: str) -> PeerLost:
    return PeerLost(
        f"rank {rank} got no answer at {address} in time: rank 0, or another rank that it waits for, did not come; "
        "start all ranks with this address"
    )


# A file


def _through_file(address: str, rank: int, size: int, create: Callable[[], bytes], limit: float) -> bytes:
    path = Path(address)
    if rank:
        return _read_id(path, rank, limit)
    identifier, written = create(), b""
    others = [path.with_name(f"{path.name}.{other}") for other in range(1, size)]
    accepted = _accepted(identifier)
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
    for file in (path, *others):
        file.unlink(missing_ok=True)
    return identifier


def _read_id(path: Path, rank: int, limit: float) -> bytes:
    """Returns the identifier from the file of rank 0."""
    nonce, own = secrets.token_bytes(_NONCE_BYTES), path.with_name(f"{path.name}.{rank}")
    _write(own, nonce)
    while time.monotonic() <= limit:
        text = _read(path)
        end = 4 + int.from_bytes(text[:4], "little")
        nonces = text[end:]
        if nonce in (nonces[at : at + _NONCE_BYTES] for at in range(0, len(nonces), _NONCE_BYTES)):
            _write(own, _accepted(text[4:end]))
            return text[4:end]
        time.sleep(_POLL_SECONDS)
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
    """Writes a file that other processes see whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    part.write_bytes(content)
    part.replace(path)


# A TCP port


def _through_port(address: str, rank: int, size: int, create: Callable[[], bytes], limit: float) -> bytes:
    host, _, port = address.rpartition(":")
    place = host.strip("[]"), int(port)
    if rank:
        return _ask(place, address, rank, size, limit)
    identifier = create()
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(place, family=family))
        except OSError as error:
            raise NotSupported(
                f"address = {address!r}: rank 0 cannot listen there ({error}); pass a free port of its host"
            ) from error
        ranks: dict[int, socket.socket] = {}
        wrong = ""
        while len(ranks) < size - 1 and not wrong:
            missing = [other for other in range(1, size) if other not in ranks]
            server.settimeout(max(limit - time.monotonic(), 1e-3))
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                raise _absent(missing, size, address) from error
            stack.enter_context(connection)
            other, wrong = _hello_of(connection, ranks, size)
            if other:
                ranks[other] = connection
        answer = b"no" + wrong.encode() if wrong else b"ok" + identifier
        for connection in ranks.values():
            with contextlib.suppress(OSError):  # NCCL reports a rank that has ended meanwhile
                connection.sendall(answer)
    if wrong:
        raise NotSupported(wrong)
    return identifier


def _hello_of(connection: socket.socket, ranks: dict[int, socket.socket], size: int) -> tuple[int, str]:
    """Returns the rank at the other end, 0 for a stranger, and what is wrong with it."""
    connection.settimeout(1.0)
    try:
        text = _receive(connection, _HELLO_BYTES)
    except OSError:
        return 0, ""
    if not text.startswith(_MAGIC):
        return 0, ""
    rank, its_size = (int.from_bytes(text[at : at + 8], "little") for at in (len(_MAGIC), len(_MAGIC) + 8))
    if its_size != size:
        wrong = f"rank {rank} has size = {its_size}, and rank 0 has {size}: must be the same on all ranks; correct one"
    elif rank in ranks:
        wrong = f"two processes have rank = {rank}: must be different on each; correct one"
    else:
        return rank, ""
    with contextlib.suppress(OSError):
        connection.sendall(b"no" + wrong.encode())
    return 0, wrong


def _ask(place: tuple[str, int], address: str, rank: int, size: int, limit: float) -> bytes:
    """Returns the identifier from rank 0's port."""
    while time.monotonic() <= limit:
        try:
            with socket.create_connection(place, timeout=max(limit - time.monotonic(), 1e-3)) as connection:
                connection.sendall(_MAGIC + rank.to_bytes(8, "little") + size.to_bytes(8, "little"))
                connection.settimeout(max(limit - time.monotonic(), 1e-3))
                answer = _receive(connection, 1 << 16)
        except OSError:  # nobody listens yet, or rank 0 has ended
            time.sleep(_POLL_SECONDS)
            continue
        if answer.startswith(b"ok"):
            return answer[2:]
        if answer.startswith(b"no"):
            raise NotSupported(answer[2:].decode())
        time.sleep(_POLL_SECONDS)
    raise _no_answer(rank, address)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Returns `count` bytes, or those until the other side closes."""
    found = b""
    while len(found) < count and (part := connection.recv(count - len(found))):
        found += part
    return found
