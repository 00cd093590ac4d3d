"""What the ranks tell each other, and what is reported: plain values that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T", bound="Plain")


class Plain:
    """A dataclass that can be written as JSON and read again."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def of(cls: type[T], plain: Mapping[str, Any]) -> T:
        """From what `plain` has written; what a newer version has added is left out."""
        known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in plain.items() if name in known})


@dataclass(frozen=True, kw_only=True)
class RankInfo(Plain):
    """One rank, as it introduces itself."""

    rank: int
    host: str
    machine: str = ""
    """By which its machine is told from others of the same name."""
    node: int = 0
    local_rank: int = 0
    device: str = "cpu"
    """Where it computes."""
    device_name: str = ""
    """What that is called; empty for a CPU."""
    device_memory: int = 0
    """Its memory, in bytes."""
    backend: str = "gloo"
    """What it talks over."""
    address: str | None = None
    """The address that the others would use to talk to it."""
    interface: str | None = None
    """The interface of that address."""
    reason: str = ""
    """Why that one."""
    problem: str = ""
    """What is wrong with how it is set."""
    port: int = 0
    """Where it listens for the others."""
    token: str = ""
    """By which it is known that it was really this rank that answered."""
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Its other interfaces that lead out, with their addresses."""
    speed: int = 0
    """What the interface should give, in Mbit/s; 0 when it does not say."""
    mtu: int = 0
    """The largest packet of the interface; 0 when it is not known."""
    cores: Sequence[int] = ()
    """The cores that it may use."""
    share: float | None = None
    """The cores' worth of time that its control group allows; None when it does not limit it."""
    threads: int | None = None
    """The threads that it is told to use; None when it is not told."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """What must be the same everywhere."""
    findings: Sequence[Mapping[str, Any]] = ()
    """What the checks of its machine have found, told by the first rank of each."""

    @property
    def name(self) -> str:
        """How it is called in texts."""
        return f"rank {self.rank} on {self.host} ({self.interface or 'no interface'} {self.address or 'no address'})"


@dataclass(frozen=True, kw_only=True)
class Contact(Plain):
    """One rank's try to connect to another that failed."""

    source: int
    """Who tried."""
    target: int
    """To whom."""
    error: str
    seconds: float = 0.0
    through: str = ""
    """The interface by which it left."""
    instead: str = ""
    """An interface of the target that can be reached, where the one it would use cannot."""


@dataclass(frozen=True, kw_only=True)
class Link(Plain):
    """What was measured between two ranks."""

    a: int
    """The one with the lower number."""
    b: int
    """The other."""
    latency: float | None = None
    """Seconds for a small message one way: half of the middle round trip."""
    forth: float | None = None
    """Bytes a second from a to b."""
    back: float | None = None
    """Bytes a second from b to a."""
    offset: float | None = None
    """Seconds by which b's clock is ahead of a's."""
    uncertain: float = 0.0
    """Half of the shortest round trip: the offset is not known better."""
    lost_forth: float = 0.0
    """The share of packets from a to b that had to be sent again."""
    lost_back: float = 0.0
    """The same from b to a."""
    error: str = ""
    """How the line broke, if it did."""
    device_latency: float | None = None
    """The same as ``latency``, by send and receive on the devices."""
    device_rate: float | None = None
    """Bytes a second by send and receive on the devices, from a to b."""


@dataclass(frozen=True, kw_only=True)
class Point(Plain):
    """One size of the all-reduce curve."""

    size: int
    """Bytes on each rank."""
    seconds: float | None = None
    """For one all-reduce, the middle one of several; None when it was left out."""
    rate: float | None = None
    """Bytes a second that each link had to carry: size / seconds * 2 (n - 1) / n."""
    note: str = ""
    """Why it was left out."""


@dataclass(frozen=True, kw_only=True)
class RankResult(Plain):
    """What one rank says in the end."""

    rank: int
    error: str = ""
    """Why it is not well; empty when it is."""
    checked: bool = False
    """Whether a collective of this rank gave the right values."""
    copy: float | None = None
    """Bytes a second that memory is copied with on its machine; told by the first rank of each."""
    points: Sequence[Mapping[str, Any]] = ()
    """The curve, told by the first of those that took part."""


@dataclass(frozen=True, kw_only=True)
class NetReport(Plain):
    """All of it."""

    members: Sequence[RankInfo]
    missing: Sequence[int] = ()
    tried: Sequence[int] = ()
    """Ranks that have tried to connect to each other one."""
    contacts: Sequence[Contact] = ()
    """Their tries that failed."""
    links: Sequence[Link] = ()
    """What was measured."""
    outcomes: Sequence[RankResult] = ()
    """What each rank said in the end."""
    group: Sequence[int] = ()
    """The ranks that could all talk to each other, on which the collectives ran."""
    points: Sequence[Point] = ()
