"""Network: the address where a job's store listens, and the interface that leads to it. Nothing is sent."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from contextlib import suppress

from trainwright.errors import LaunchError

__all__ = ["DEFAULT_PORT", "LOOPBACK"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
ELSEWHERE = "192.0.2.1"  # an unassigned address (RFC 5737), which the default route leads to
SIOCGIFADDR = 0x8915  # Linux: the first IPv4 address of an interface


def resolve(address: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the number of an address (LaunchError if unknown), preferably IPv4."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"the main address {address!r} is not known here ({error}); pass the name or IP address at which the other nodes "
            "reach the node of rank 0."
        ) from error
    family, _, _, _, resolved = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(resolved[0])


def is_own_name(address: str, number: str) -> bool:
    """Return whether an address is a machine's name for itself that means loopback there, as on Debian."""
    is_loopback = ipaddress.ip_address(number.partition("%")[0]).is_loopback
    return is_loopback and address not in (number, "localhost")


def is_own_address(address: str) -> bool:
    """Return whether an address is this machine's (LaunchError if it is unknown)."""
    family, number = resolve(address)
    with socket.socket(family) as probe:
        try:
            probe.bind((number, 0))
        except OSError:
            return False
    return True


def listen_at(address: str, port: int, *, else_everywhere: bool = False) -> socket.socket:
    """Return a socket that listens at only one address of this machine. Port 0 chooses a free port.

    Torch's stores listen on all interfaces unless they get such a socket. `else_everywhere` allows that if other nodes cannot
    reach the address, such as a machine's name for its loopback, or a translated address.

    Raises:
        LaunchError: the port is taken, or the address is not this machine's.
    """
    family, number = resolve(address)
    hosts = [] if else_everywhere and is_own_name(address, number) else [number]
    for host in [*hosts, ""] if else_everywhere else hosts:
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise LaunchError(
                    f"port {port} of {address} cannot be listened on ({error.strerror}); the job needs a port that no other "
                    "program uses. Set another port on every node: --main-port of trainwright launch, --master-port of "
                    "torchrun, or the variable MASTER_PORT."
                ) from error
    raise LaunchError(
        f"the main address {address!r} is {number}, which is not an address of this machine, but must be an "
        "address of the node of rank 0. Check the main address and the rank of this node."
    )


def is_listening(address: str, port: int) -> bool:
    """Return whether a program accepts connections at an address (LaunchError if the address is unknown)."""
    resolve(address)
    try:
        socket.create_connection((address, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def loopback_interface() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def interface_towards(address: str) -> str | None:
    """Return the interface over which this machine reaches an address, or None if unknown."""
    family, number = resolve(address)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A connected datagram socket sends nothing, but looks up the route.
            probe.connect((ELSEWHERE if is_own_name(address, number) else number, DEFAULT_PORT))
            local = str(probe.getsockname()[0])
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if local in _addresses_of(name)), None)


def _addresses_of(interface: str) -> list[str]:
    if sys.platform != "linux":
        return []
    import fcntl

    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it may have no IPv4 address
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    return found
