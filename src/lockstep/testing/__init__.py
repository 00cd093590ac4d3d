"""Real ranks on one machine: functions run on several processes at once, and faults put into them on purpose."""

from __future__ import annotations

from lockstep.testing.outcome import Outcome, RanksFailed
from lockstep.testing.ranks import Ranks, close_pools, run_ranks

__all__ = ["Outcome", "Ranks", "RanksFailed", "close_pools", "run_ranks"]
