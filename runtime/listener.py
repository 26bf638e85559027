"""The TCP port of an instance: binding it, saying who holds it when it is taken, and the URL that it is reached at."""

import contextlib
import errno
import socket

from llmserve.runtime.config import ConfigError
from llmserve.runtime.instance import list_instances

BACKLOG = 2048
PORTS_TRIED = 100


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the model loads so that nobody else takes the port. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is invalid in DNS
        reason = getattr(error, "strerror", None) or "this is no name of a host"
        raise ConfigError(f"--host {host}: {reason}; give an address of this machine, such as 127.0.0.1") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = find_holder(port)
            raise ConfigError(f"port {port} is in use by {holder}; try --port {find_free_port(host, port)}") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def find_holder(port: int) -> str:
    """Who listens on a TCP port, such as `pid 812 (llmserve "prod")`; "another process" where that cannot be seen."""
    for record in list_instances():
        if record.port == port:
            return f'pid {record.pid} (llmserve "{record.name}")'
    import psutil  # needed only when a port is taken, and commands import this module for url_of

    for connection in psutil.net_connections("tcp"):
        if (
            connection.laddr
            and connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
            and connection.pid
        ):
            with contextlib.suppress(psutil.Error):
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"


def find_free_port(host: str, taken: int) -> int:
    """The first port after `taken` that can be bound now; 0 when none of the next PORTS_TRIED can."""
    for port in range(taken + 1, min(taken + PORTS_TRIED, 65535) + 1):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    return 0


def url_of(host: str, port: int) -> str:
    """The URL at which a server that listens on `host` is reached from this machine: over loopback where it listens on
    every address.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
