"""NCCL logs for tests, written from the message forms that documentation and threads show: there is no GPU here."""

from __future__ import annotations

from collections.abc import Iterable


def rank_log(
    rank: int,
    ranks: int = 4,
    *,
    host: str | None = None,
    version: str = "2.19.3+cuda12.2",
    network: str = "Socket",
    interface: str = "eth0",
    complete: bool = True,
    settings: Iterable[str] = (),
    then: Iterable[str] = (),
    comm: str = "0xabc",
    old: bool = False,
) -> str:
    """What one rank of a job of two nodes writes when it joins its group, and ``then`` after it."""
    per_machine = max(1, ranks // 2)
    host = host or f"node{rank // per_machine}"
    device = rank % per_machine
    pid = 1000 + rank
    start = f"{host}:{pid}:{pid} [{device}] NCCL INFO"
    line = f"{host}:{pid}:{pid + 500} [{device}] NCCL INFO"
    group = f"comm 0x55{rank:04x} rank {rank} nranks {ranks} cudaDev {device} nvmlDev {device} busId {device + 1}000"
    group += "" if old else f" commId {comm}"
    following = (rank + 1) % ranks
    near = following // per_machine == rank // per_machine and following != rank
    via = "P2P/IPC/read" if near else f"NET/{network}/0"
    lines = [
        f"{start} cudaDriverVersion 12020",
        *(f"{start} {setting}" for setting in settings),
        f"{start} Bootstrap : Using {interface}:10.0.0.{rank + 1}<0>",
        f"{start} NCCL version {version}" if not old else f"NCCL version {version}",
        f"{line} NET/Socket : Using [0]{interface}:10.0.0.{rank + 1}<0>",
        f"{line} Using network {network}",
    ]
    if not old:
        lines.append(f"{line} {group} - Init START")
    if rank == 0:
        order = "".join(f"{r:>4}" for r in range(ranks))
        lines += [f"{line} Channel {channel:02}/02 : {order}" for channel in range(2)]
    if complete:
        direction = "" if near else " [send]"
        lines += [
            f"{line} Trees [0] {following}/-1/-1->{rank}->{rank - 1} [1] {following}/-1/-1->{rank}->{rank - 1}",
            *(
                f"{line} Channel {channel:02}/0 : {rank}[{device}] -> {following}[0]{direction} via {via}"
                for channel in range(2)
            ),
            f"{line} Connected all rings",
            f"{line} 2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer",
            f"{line} {group} - Init COMPLETE",
        ]
    lines += [text.format(host=host, pid=pid, device=device) for text in then]
    return "\n".join(lines) + "\n"
