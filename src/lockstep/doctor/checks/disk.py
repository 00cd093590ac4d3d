"""Room for checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from lockstep.doctor.checks.memory import gib
from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding

_LITTLE = 5 << 30
_NOTHING = 200 << 20


def room(context: DoctorContext) -> Finding:
    """Free space and inodes where checkpoints go, and whether anything can be written there."""
    folder = context.folder.absolute()
    there = _nearest(folder)
    usage, inodes = shutil.disk_usage(there), os.statvfs(there)
    data = {"folder": str(folder), "free": usage.free, "total": usage.total, "inodes": inodes.f_favail}
    summary = f"{gib(usage.free)} free of {gib(usage.total)} in {folder}"
    refused = _refusal(there)
    if refused:
        return Finding(
            check="disk",
            status="error",
            what=f"nothing can be written in {there}: {refused}",
            why="checkpoints go there",
            fix="name another folder with --folder, and in the script as project_dir",
            data=data,
        )
    if inodes.f_files and inodes.f_favail < 1000:
        return Finding(
            check="disk",
            status="error",
            what=f"{summary}, but only {inodes.f_favail} more files (inodes)",
            why="'No space left on device' comes when files run out, too",
            fix=f"delete files: du --inodes -d 1 {folder} shows where they are",
            data=data,
        )
    if usage.free >= _LITTLE:
        return Finding(check="disk", status="ok", what=summary, data=data)
    return Finding(
        check="disk",
        status="error" if usage.free < _NOTHING else "warning",
        what=summary,
        why="a checkpoint with its optimizer takes 12 to 16 bytes for each weight: 100 GB for 7 billion",
        fix="free some, or name another folder with --folder, and in the script as project_dir",
        data=data,
    )


def _nearest(folder: Path) -> Path:
    """The folder, or the first one above it that exists: it will be made there."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _refusal(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())  # a full or read-only disk may only say so here
    except OSError as error:
        return error.strerror or str(error)
    return ""
