"""What the files of a model are called.

==================================  =====================================
safetensors                         torch
==================================  =====================================
model.safetensors                   pytorch_model.bin
model-00001-of-00003.safetensors    pytorch_model-00001-of-00003.bin
model.safetensors.index.json        pytorch_model.bin.index.json
==================================  =====================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How one format names its files."""

    stem: str
    """What all names begin with."""
    suffix: str
    """What the names of files with tensors end with."""

    @property
    def whole(self) -> str:
        """The only file of a model that is not divided."""
        return self.stem + self.suffix

    @property
    def index(self) -> str:
        """The index of one that is."""
        return self.whole + ".index.json"

    @property
    def entry_points(self) -> tuple[str, str]:
        """The files with which a reader begins."""
        return self.index, self.whole

    def owns(self, name: str) -> bool:
        """Whether a file of that name belongs to a model saved like this."""
        shard = re.fullmatch(rf"{re.escape(self.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(self.suffix)}", name)
        return name in self.entry_points or shard is not None


def layout_of(stem: str, safe: bool) -> Layout:
    """The names of a model's files: those of torch's format begin with ``pytorch_``."""
    return Layout(stem, ".safetensors") if safe else Layout(f"pytorch_{stem}", ".bin")


def layouts_of(stem: str) -> list[Layout]:
    """Those of both formats, safetensors first."""
    return [layout_of(stem, safe) for safe in (True, False)]
