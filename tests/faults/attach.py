"""Holds a process for some seconds, as a debugger does: ``attach.py PID SECONDS``."""

from __future__ import annotations

import ctypes
import os
import sys
import time

ATTACH, DETACH, ALL_THREADS = 16, 17, 0x40000000
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
time.sleep(0.5)
if libc.ptrace(ATTACH, pid, None, None):
    print(f"no debugger here: {os.strerror(ctypes.get_errno())}")
else:
    os.waitpid(pid, ALL_THREADS)
    with open(f"/proc/{pid}/status") as status:
        print("held by a debugger:", next(line for line in status if line.startswith("TracerPid")).strip())
    time.sleep(seconds)
    libc.ptrace(DETACH, pid, None, None)
