"""The accelerators: driver and versions, whether they are alike, whether they reach each other, how they are doing.

The first three ask torch, in the process of this check: a driver that hangs takes nothing else along. The last asks
``nvidia-smi``, which knows of errors and throttling. Written for GPUs, and tried without: there are none where this
is tested.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.doctor.checks.memory import gib
from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding

_DRIVER = Path("/proc/driver/nvidia/version")
_SMI_SECONDS = 15.0
_FIELDS: dict[str, tuple[str, ...]] = {
    "index": ("index",),
    "name": ("name",),
    "ecc": ("ecc.errors.uncorrected.volatile.total",),
    "throttle": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),  # older drivers have the second
    "temperature": ("temperature.gpu",),
    "used": ("memory.used",),
    "total": ("memory.total",),
}
"""Our names for what is asked, and nvidia-smi's, the newest first."""
_NO_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
_HARMFUL = {0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""Bits of NVML's throttle reasons that mean trouble; the others say idle, or a power limit that was chosen."""


def by_torch(context: DoctorContext) -> Iterator[Finding]:
    """All that torch knows, in one process: importing it takes longer than the rest."""
    yield versions(context)
    yield alike(context)
    yield reach(context)


def versions(context: DoctorContext) -> Finding:
    """Driver, CUDA or ROCm, NCCL; and torch's reason where it cannot use what is there."""
    import torch

    driver = _DRIVER.read_text(encoding="utf-8").splitlines()[0].strip() if _DRIVER.exists() else None
    build = torch.version.cuda or torch.version.hip
    present = torch.accelerator.is_available()
    data: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip}
    data |= {"driver": driver, "accelerators": torch.accelerator.device_count() if present else 0}
    if not present:
        if driver is None:
            what = f"none; torch {torch.__version__} will use the CPU"
            return Finding(check="accelerators", status="ok", what=what, data=data)
        return Finding(
            check="accelerators",
            status="error",
            what=f"a driver is here ({driver}), but torch {torch.__version__} finds no GPU",
            why="the job would train on the CPU"
            if build
            else "this torch was built for the CPU only, so the job would train there",
            fix="install the torch that fits the driver (https://pytorch.org/get-started); nvidia-smi shows the newest "
            "CUDA it can do",
            data=data,
        )
    device = torch.accelerator.current_accelerator()
    kind = "accelerator" if device is None else device.type
    words = [f"{torch.accelerator.device_count()} of type {kind}", f"torch {torch.__version__}"]
    if torch.version.cuda:
        data["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        words += [f"CUDA {torch.version.cuda}", f"NCCL {data['nccl']}"]
    if driver:
        words.append(driver)
    return Finding(check="accelerators", status="ok", what=", ".join(words), data=data)


def alike(context: DoctorContext) -> Finding:
    """The model and memory of each: the slowest and the smallest decide for all."""
    import torch

    if not torch.cuda.is_available():
        return Finding(check="GPU models", status="skipped", what="no GPU")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return judge_models([(each.name, each.total_memory) for each in found])


def judge_models(found: Sequence[tuple[str, int]]) -> Finding:
    """Whether GPUs of these names and memories fit together."""
    data = {"gpus": [{"name": name, "memory": memory} for name, memory in found]}
    names = sorted({name for name, _ in found})
    smallest, largest = (pick(memory for _, memory in found) for pick in (min, max))
    if len(names) == 1 and largest - smallest <= 0.02 * largest:
        return Finding(check="GPU models", status="ok", what=f"{len(found)} x {names[0]}, {gib(smallest)}", data=data)
    listed = "; ".join(f"{index}: {name}, {gib(memory)}" for index, (name, memory) in enumerate(found))
    weakest = min(range(len(found)), key=lambda index: found[index][1])
    return Finding(
        check="GPU models",
        status="warning",
        what=f"they are not alike: {listed}",
        why=f"all ranks go at the pace of the slowest, and the batch has to fit the smallest (GPU {weakest}, "
        f"{gib(smallest)})",
        fix="train on those that are alike: CUDA_VISIBLE_DEVICES, or lockstep launch --gpu_ids; or give the smaller "
        "ones smaller batches",
        data=data,
    )


def reach(context: DoctorContext) -> Finding:
    """Whether each GPU can read the other's memory directly."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return Finding(check="GPU peer access", status="skipped", what="fewer than two GPUs")
    without = [
        [a, b] for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if not without:
        return Finding(check="GPU peer access", status="ok", what=f"each of {count} reaches each other directly")
    shown = ", ".join(f"{a} to {b}" for a, b in without[:6]) + (" and more" if len(without) > 6 else "")
    return Finding(
        check="GPU peer access",
        status="warning",
        what=f"not from {shown}",
        why="NCCL goes through the host's memory between them, which is slower; some consumer GPUs cannot do better",
        fix="see `nvidia-smi topo -p2p r`; in a virtual machine or with IOMMU on, ask for ACS to be off",
        data={"without": without},
    )


def health(context: DoctorContext) -> Finding:
    """Memory errors and throttling, where ``nvidia-smi`` is installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding(check="GPU health", status="skipped", what="nvidia-smi is not installed")
    try:
        columns, done = _query_nvidia_smi(program)
    except subprocess.TimeoutExpired:
        return Finding(
            check="GPU health",
            status="error",
            what=f"nvidia-smi gives no answer within {_SMI_SECONDS:g} s",
            why="a GPU or its driver hangs, and every process that uses it will",
            fix="dmesg | grep -i xid shows why; reset the GPU (nvidia-smi --gpu-reset) or the machine",
        )
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip().splitlines()
        return Finding(
            check="GPU health",
            status="error",
            what=f"nvidia-smi fails: {output[0] if output else f'exit code {done.returncode}'}",
            why="the driver does not work",
            fix="reinstall the driver, or restart the machine after an upgrade of it",
        )
    return judge_health(list(parse_smi(done.stdout, columns)))


def _query_nvidia_smi(program: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What nvidia-smi answers, and to which of our questions: a field that it does not know is asked for otherwise."""
    names = {name: list(fields) for name, fields in _FIELDS.items()}
    deadline = time.monotonic() + _SMI_SECONDS
    while True:
        fields = [candidates[0] for candidates in names.values()]
        query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        left = max(0.1, deadline - time.monotonic())
        done = subprocess.run(query, capture_output=True, text=True, timeout=left, check=False)
        unknown = _NO_FIELD.search(done.stdout + done.stderr)
        if done.returncode == 0 or unknown is None or unknown[1] not in fields:
            return list(names), done
        name = list(names)[fields.index(unknown[1])]
        del names[name][0]
        if not names[name]:
            del names[name]


def parse_smi(text: str, columns: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """The rows of nvidia-smi's answer, by our names for the columns; what was not asked is empty."""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(columns):
            yield dict.fromkeys(_FIELDS, "") | dict(zip(columns, (cell.strip() for cell in row), strict=True))


def judge_health(rows: Sequence[Mapping[str, str]]) -> Finding:
    """What the rows mean; a value that the GPU does not tell is no trouble."""
    data = {"gpus": [dict(row) for row in rows]}
    broken, slow = [], []
    for row in rows:
        if row["ecc"].isdecimal() and int(row["ecc"]):
            broken.append(f"GPU {row['index']}: {row['ecc']} memory errors that could not be corrected")
        bits = int(row["throttle"], 16) if row["throttle"].startswith("0x") else 0
        reasons = [text for bit, text in _HARMFUL.items() if bits & bit]
        if reasons:
            slow.append(f"GPU {row['index']} is slowed down: {', '.join(reasons)}, {row['temperature']} degrees")
    if broken:
        return Finding(
            check="GPU health",
            status="error",
            what="; ".join([*broken, *slow]),
            why="results on this GPU cannot be trusted, and jobs on it die",
            fix="reset it (nvidia-smi --gpu-reset -i N); if they come back, have it replaced",
            data=data,
        )
    if slow:
        return Finding(
            check="GPU health",
            status="warning",
            what="; ".join(slow),
            why="all ranks go at the pace of the slowest",
            fix="look at fans, air and power supply; nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows more",
            data=data,
        )
    return Finding(
        check="GPU health", status="ok", what=f"{len(rows)} GPU{'s' if len(rows) > 1 else ''}, no errors", data=data
    )
