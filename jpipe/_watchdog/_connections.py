"""TCP connections between process 0 and the others, which carry one JSON value a line."""

import contextlib
import json
import secrets
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
        """Sends a value, as far as the connection takes it now. The rest goes with the next one."""
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


def listen() -> tuple[socket.socket, dict]:
    """A socket of process 0, and what the others need to connect to it."""
    if socket.has_dualstack_ipv6():
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
        )
    else:
        server = socket.create_server(("", 0))
    hosts = [socket.gethostname(), socket.getfqdn()]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the interface
        hosts.append(probe.getsockname()[0])
    hosts.append("127.0.0.1")
    address = {
        "hosts": list(dict.fromkeys(hosts)),
        "port": server.getsockname()[1],
        "token": secrets.token_hex(16),
    }
    return server, address


def accept(
    server: socket.socket, address: dict, count: int, seconds: float
) -> dict[int, socket.socket]:
    """The connections of the other processes, by number: `count` of them, or those that came in time."""
    connections: dict[int, socket.socket] = {}
    until = time.monotonic() + seconds
    with server:
        while len(connections) < count and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
                connection.settimeout(5.0)
                hello = json.loads(connection.makefile().readline(1000))
                if hello["token"] == address["token"]:
                    connections[int(hello["process"])] = connection
                    connection.sendall(b"{}\n")
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return connections


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
