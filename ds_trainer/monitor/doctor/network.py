"""Host names, addresses and interfaces of the ranks, and the bandwidth of an all-reduce."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.utils import distributed
from ds_trainer.utils.ranks import RankInfo
from ds_trainer.utils.units import counted, human_bytes

_INTERFACES = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_NAMED_BY = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
MEGABYTES = {"cpu": 16, "cuda": 256}
_REPEATS = 5


def has_infiniband() -> bool:
    """Whether this machine has InfiniBand or RoCE."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def addresses_of(name: str) -> list[str]:
    """IP addresses of a host name; empty if it cannot be resolved."""
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
    except OSError:
        return []


def name_findings(info: RankInfo, several_hosts: bool) -> list[Finding]:
    """Whether this machine can resolve its own host name and the main process's address."""
    host, findings = socket.gethostname(), []
    addresses = addresses_of(host)
    if not addresses:
        remedy = f"Add {host} to /etc/hosts or to DNS, or name an interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."
        findings.append(Finding(Level.WARN, "host name", f"{host} has no address", remedy))
    elif several_hosts and all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses):
        remedy = "gloo would announce it to other machines: fix /etc/hosts, or set GLOO_SOCKET_IFNAME."
        message = f"{host} resolves to {', '.join(addresses)}, which only this machine can reach"
        findings.append(Finding(Level.WARN, "host name", message, remedy))
    else:
        findings.append(Finding(Level.OK, "host name", f"{host} resolves to {', '.join(addresses)}"))
    if not addresses_of(info.master_address):
        remedy = "Set MASTER_ADDR to a name or address of the first machine that all other machines can resolve."
        message = f"MASTER_ADDR={info.master_address} cannot be resolved here"
        findings.append(Finding(Level.FAIL, "main process", message, remedy))
    return findings


def reach_finding(info: RankInfo) -> Finding:
    """Whether this rank reaches the main process's port; called after the rendezvous failed."""
    where = f"{info.master_address}:{info.master_port}"
    try:
        socket.create_connection((info.master_address, info.master_port), timeout=5.0).close()
    except OSError as error:
        remedy = (
            "Check that rank 0 is running, that MASTER_ADDR is its machine's address, that MASTER_PORT is free there, "
            "and that no firewall blocks it."
        )
        return Finding(Level.FAIL, "main process", f"{where} cannot be reached: {error}", remedy)
    return Finding(Level.OK, "main process", f"{where} accepts connections")


def interface_findings(environment: Mapping[str, str], directory: Path = _INTERFACES) -> list[Finding]:
    """The interfaces of this machine, and whether those named in environment variables exist."""
    if not directory.is_dir():
        return []
    states = {}
    for entry in sorted(directory.iterdir()):
        state = entry / "operstate"
        states[entry.name] = state.read_text(encoding="utf-8").strip() if state.is_file() else "unknown"
    shown = ", ".join(f"{name} {'up' if state in ('up', 'unknown') else state}" for name, state in states.items())
    findings = [Finding(Level.OK, "interfaces", shown + (", InfiniBand" if has_infiniband() else ""))]
    for variable in _NAMED_BY:
        missing = _missing(environment.get(variable, ""), list(states))
        if missing:
            remedy = f"Unset {variable}, or name one of {', '.join(states)}."
            message = f"{variable}={environment[variable]}: there is no {', '.join(missing)}"
            findings.append(Finding(Level.FAIL, "interfaces", message, remedy))
    return findings


def _missing(value: str, interfaces: list[str]) -> list[str]:
    """Names or prefixes in the value of an NCCL variable that match no interface."""
    if not value or value.startswith("^"):
        return []
    exact = value.startswith("=")
    names = [name for name in value.lstrip("=").split(",") if name]
    return [n for n in names if not any(i == n or (not exact and i.startswith(n)) for i in interfaces)]


def bandwidth_finding(device: torch.device) -> Finding:
    """Bandwidth of an all-reduce over all ranks. Collective; a second or less on a healthy network."""
    ranks = distributed.world_size()
    if ranks == 1:
        return Finding(Level.OK, "all-reduce", "one rank")
    amount = MEGABYTES[device.type] * 2**20
    tensor = torch.ones(amount // 4, device=device)
    seconds = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.monotonic() - began)
        tensor.fill_(1.0)
    best = min(seconds[1:])  # the first one opens connections
    bus = 2 * (ranks - 1) / ranks * amount / best
    over = f"{human_bytes(amount)} over {counted(ranks, 'rank')} in {best * 1e3:.1f} ms"
    message = f"{bus / 1e9:.2f} GB/s bus bandwidth ({over})"
    return Finding(Level.OK, "all-reduce", message)
