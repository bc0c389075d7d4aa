"""Addresses and interfaces: where a job's store listens, and which interface leads to it. Nothing is sent from here."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from pathlib import Path

from trainwright.errors import LaunchError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
SIOCGIFADDR = 0x8915  # Linux: the first IPv4 address of an interface


def resolve(address: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the number of an address; an IPv4 one where it has both.

    Raises:
        LaunchError: no such name.
    """
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"the main address {address!r} is not known here ({error}); give the name or the IP address of the node that has "
            "rank 0, as the other nodes reach it."
        ) from error
    family, _, _, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(place[0])


def is_number(address: str) -> bool:
    """Whether an address is an IP address rather than a name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def is_loopback(place: str) -> bool:
    """Whether only this machine reaches an IP address."""
    return ipaddress.ip_address(place.partition("%")[0]).is_loopback


def listen_at(address: str, port: int, *, else_everywhere: bool = False) -> socket.socket:
    """Return a socket that listens at one address of this machine alone; port 0 is a free one.

    Torch's stores listen on all interfaces unless they are handed such a socket. `else_everywhere` lets it do so too where
    the address is no other node's way here: a name that stands for loopback on its own machine, or one that is translated.

    Raises:
        LaunchError: the port is taken, or the address is not this machine's.
    """
    family, place = resolve(address)
    if else_everywhere and is_loopback(place) and not is_number(address):
        place = ""
    for host in (place, "") if else_everywhere and place else (place,):
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
                    "program and no other job has. Give another one to every node: --main-port of trainwright launch, "
                    "--master-port of torchrun, or else the variable MASTER_PORT."
                ) from error
    raise LaunchError(
        f"the main address {address!r} is {place}, which is no address of this machine; the node with rank 0 has to be the "
        "one at the main address. Check the main address and the rank of this node."
    )


def loopback_interface() -> str | None:
    """Return the name of the interface that only this machine reaches."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def interface_towards(address: str) -> str | None:
    """Return the interface over which this machine reaches an address; None where that cannot be found out."""
    family, place = resolve(address)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((place, DEFAULT_PORT))  # a datagram socket only looks up its way
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if own in _addresses_of(name)), None)


def _addresses_of(interface: str) -> list[str]:
    if sys.platform != "linux":
        return []
    import fcntl

    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has no IPv4 address
            pass
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        number, *_, name = line.split()
        if name == interface:
            found.append(str(ipaddress.ip_address(bytes.fromhex(number))))
    return found
