"""A cable with a delay, between two network namespaces: every frame that goes in comes out a while later.

What ``tc netem delay`` does, for kernels that are built without it. Each end is a TAP device, into which Linux hands
whole frames with their checksums done. Ends with its standard input.

    python delay_line.py PID INTERFACE PID INTERFACE SECONDS
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000


def open_tap(pid: int, name: str) -> int:
    """A TAP device in the network of a process."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def main(argv: list[str]) -> None:
    one, other = open_tap(int(argv[0]), argv[1]), open_tap(int(argv[2]), argv[3])
    delay = float(argv[4])
    across = {one: other, other: one}
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([one, other, 0], [], [], wait)
        if 0 in ready and not os.read(0, 1):
            return
        for end in across:
            if end in ready:
                frame = os.read(end, 65536)
                under_way.append((time.monotonic() + delay, across[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # down, or full: as a cable, it loses what it cannot carry
                os.write(end, frame)


if __name__ == "__main__":
    main(sys.argv[1:])
