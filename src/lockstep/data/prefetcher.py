"""Bringing batches to the device ahead of time.

Where the device has streams, a batch is copied on a stream of its own, while the step before is still being computed.
Not run on an accelerator so far: written after torch's documentation, tested on CPU only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.comm.trees import map_tensors, send_to_device


class Mover:
    """Copies batches to one device."""

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking
        streams = device.type != "cpu" and torch.accelerator.current_accelerator() is not None
        self._stream = torch.Stream(device) if streams and device.type in ("cuda", "xpu") else None

    def start(self, batch: Any) -> tuple[Any, torch.Event | None]:
        """Begin to copy a batch."""
        if self._stream is None:
            return send_to_device(batch, self.device, self.non_blocking), None
        with self._stream:
            moved = send_to_device(batch, self.device, self.non_blocking)
        return moved, self._stream.record_event()

    def finish(self, moving: tuple[Any, torch.Event | None]) -> Any:
        """The batch, for use in the stream of the caller."""
        moved, event = moving
        if event is not None:
            stream = torch.accelerator.current_stream(self.device)
            stream.wait_event(event)

            def claim(tensor: Tensor) -> Tensor:
                # Or the allocator would give its memory away once we let go of it, whatever the stream still does.
                tensor.record_stream(stream)
                return tensor

            map_tensors(claim, moved)
        return moved
