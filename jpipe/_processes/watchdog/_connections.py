"""TCP connections between process 0 and the others, which carry one JSON value a line."""

import contextlib
import json
import secrets
import selectors
import socket
import time
from typing import Any


class Line:
    """A connection that carries one JSON value a line, without blocking."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._unread, self._unsent = b"", b""
        self.closed = False

    def send(self, value: Any) -> None:
        """Sends as much of a value as the connection takes now. The rest goes with the next one."""
        self._unsent += json.dumps(value).encode() + b"\n"
        try:
            while self._unsent:
                sent = self.connection.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            self.closed |= len(self._unsent) > 2**20
        except OSError:
            self.closed = True

    def receive(self) -> list:
        """The values that have arrived."""
        try:
            while data := self.connection.recv(2**16):
                self._unread += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]


class Lines(dict[int, Line]):
    """The connections of a process, by the number of the process at the other end."""

    def send(self, value: Any) -> None:
        """Sends a value on all of them."""
        for line in self.values():
            line.send(value)

    def send_last(self, value: Any, seconds: float) -> None:
        """Sends a last word to all, and waits until they have read it and close, at most so long."""
        self.send(value)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for line in self.values():
                line.receive()
            if all(line.closed for line in self.values()):
                break
            time.sleep(0.01)


def listen(host: str | None = None) -> tuple[socket.socket, dict]:
    """Returns a socket of process 0, and the address and token that the others need to connect to it.

    Args:
      host: a name or address of this machine that the others reach. None, or one that is none of this machine's, such
        as that of a router: the socket listens on all interfaces.
    """
    server = None if host is None else _listen_at(host)
    if server is not None:
        hosts = [server.getsockname()[0], host]
    else:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        hosts = _reachable_names(host)
    address = {
        "hosts": list(dict.fromkeys(hosts)),
        "port": server.getsockname()[1],
        "token": secrets.token_hex(16),
    }
    return server, address


def _listen_at(host: str) -> socket.socket | None:
    """A socket that listens at a name or an address; None if it is none of this machine's."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = dict.fromkeys((family, str(at[0])) for family, *_, at in infos)
    # A machine may know its own name as a loopback address, at which no other machine reaches it.
    is_local = host == "localhost" or _is_loopback(host)
    for family, address in addresses:
        if is_local or not _is_loopback(address):
            with contextlib.suppress(OSError):
                return socket.create_server((address, 0), family=family)
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _reachable_names(host: str | None) -> list[str]:
    """Names and addresses at which other machines may reach this one, the best one first."""
    hosts = [*filter(None, [host]), socket.gethostname(), socket.getfqdn()]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the interface
        hosts.append(probe.getsockname()[0])
    return [*hosts, "127.0.0.1"]


_HELLO_SECONDS = 5.0
"""Time limit for a connection to say who it is."""
_HELLO_BYTES = 1000


def accept(server: socket.socket, address: dict, count: int, seconds: float) -> dict[int, socket.socket]:
    """The connections of the other processes, by number: `count` of them, or those that came in time.

    Anyone may connect. Who says nothing, or not the token, keeps nobody out: all are heard at the same time.
    """
    connections: dict[int, socket.socket] = {}
    strangers: dict[socket.socket, tuple[float, bytes]] = {}  # when it came, its words
    until = time.monotonic() + seconds
    with server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)

        def dismiss(connection: socket.socket) -> None:
            selector.unregister(connection)
            del strangers[connection]

        while len(connections) < count and (left := until - time.monotonic()) > 0:
            ready = [key.fileobj for key, _ in selector.select(min(left, 0.5))]
            now = time.monotonic()
            for stream in ready:
                if stream is server:
                    with contextlib.suppress(OSError):
                        connection, _ = server.accept()
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                        strangers[connection] = now, b""
                    continue
                assert isinstance(stream, socket.socket)
                came, words = strangers[stream]
                try:
                    heard = stream.recv(_HELLO_BYTES)
                except OSError:
                    heard = b""
                words += heard
                strangers[stream] = came, words
                if heard and b"\n" not in words and len(words) < _HELLO_BYTES:
                    continue
                dismiss(stream)
                process = _greeted(stream, words, address["token"])
                if process is None:
                    stream.close()
                else:
                    connections[process] = stream
            for connection, (came, _) in list(strangers.items()):
                if now - came > _HELLO_SECONDS or len(strangers) > count + _MOST_SILENT:
                    dismiss(connection)
                    connection.close()
        for connection in strangers:
            connection.close()
    return connections


_MOST_SILENT = 128
"""Connections beside those of the processes that may be open at a time; the oldest ones are closed."""


def _greeted(connection: socket.socket, words: bytes, token: str) -> int | None:
    """Answers the first words of a connection; the number of its process, or None if it is no process of ours."""
    try:
        hello = json.loads(words)
        if not secrets.compare_digest(hello["token"], token):
            return None
        process = int(hello["process"])
        connection.settimeout(_HELLO_SECONDS)
        connection.sendall(b"{}\n")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return process


def connect(address: dict, process: int) -> socket.socket | None:
    """A connection to process 0, or None if there is no way to it."""
    hello = json.dumps({"token": address["token"], "process": process}).encode() + b"\n"
    for host in address["hosts"]:
        try:
            connection = socket.create_connection((host, address["port"]), timeout=5.0)
            connection.sendall(hello)
            if connection.recv(3) == b"{}\n":
                return connection
        except OSError:
            continue
    return None
