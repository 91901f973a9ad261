"""Which network interface leads to another machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def interface_towards(host: str) -> str | None:
    """Name of the interface that packets to ``host`` leave by; None where that cannot be told.

    gloo by itself takes the address that this machine's own name resolves to, which often is one that no other machine
    can reach, such as 127.0.1.1.
    """
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing: it only asks for the route
                own = probe.getsockname()[0].split("%")[0]
                for _, name in socket.if_nameindex():
                    if own in _addresses(name):
                        return name
    return None


def _addresses(interface: str) -> set[str]:
    found = set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.add(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.add(str(ipaddress.IPv6Address(int(digits, 16))))
    return found
