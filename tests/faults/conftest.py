"""Tests of faults that stay in this process begin where tests of one process do."""

from tests.unit.conftest import alone

__all__ = ["alone"]
