"""Memory is given back by collecting garbage, often: that is quick when what other tests left is out of the way."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    gc.freeze()
