"""What torchrun's and ft_launcher's options mean for `ridethrough run`. Pure: values in, values out.

Every function raises ValueError with one line that names the option and the remedy.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from ridethrough.cli.launching import host_and_port

_STATIC_PORT, _C10D_PORT = 29500, 29400
_STREAMS = {0: frozenset[str](), 1: frozenset({"out"}), 2: frozenset({"err"}), 3: frozenset({"out", "err"})}
_NEVER = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}

_CHOICES = {
    "numa_binding": ("node", "socket", "exclusive", "core-complex"),
    "start_method": ("spawn", "fork", "forkserver"),
    "ft_restart_policy": ("any-failed", "min-healthy"),
}

# Option (its parameter's name) -> what is so instead; said once, on standard error.
WITHOUT_MEANING = {
    "monitor_interval": "nothing is polled, a death is an event",
    "start_method": "ranks are forked where that is safe, else executed",
    "logs_specs": "logs are one file per rank and generation",
    "event_log_handler": "events are in the run's events/",
    "ft_workload_check_interval": "heartbeats are looked at ten times a second",
    "ft_safety_factor": "hang_factor in --policy FILE is the factor of the learned deadline",
    "ft_cfg_path": "limits and budgets are in --policy FILE",
    "ft_node_health_check_interval": "nodes are known by their leases (--lease)",
    "ft_rank_termination_signal": "a rank that must go gets SIGKILL, after SIGTERM and --stop-grace if it is planned",
    "ft_log_level": "--quiet hides the ranks' output",
    "ft_rank_out_of_section_timeout": "phases have limits in --policy FILE",
    "ft_rank_section_timeouts": "phases have limits in --policy FILE",
    "ft_restart_check_interval": "nothing is polled in a restart",
    "ft_enable_nic_monitor": "`ridethrough k8s doctor` and the checks in evict_on look at links",
    "ft_pci_topo_file": "`ridethrough k8s doctor` and the checks in evict_on look at links",
    "ft_link_down_path_template": "`ridethrough k8s doctor` and the checks in evict_on look at links",
}


def without_meaning(params: dict[str, Any]) -> list[str]:
    """One line for each option that was given and changes nothing here."""
    lines = [
        f"--{name.replace('_', '-')} has no meaning here: {instead}"
        for name, instead in WITHOUT_MEANING.items()
        if params.get(name) is not None
    ]
    if params.get("ft_restart_policy") == "min-healthy":
        lines.append("--ft-restart-policy min-healthy has no meaning here: only what died is replaced (any-failed)")
    if str(params.get("rdzv_backend") or "static") not in ("static", "c10d"):
        lines.append(f"--rdzv-backend {params['rdzv_backend']} has no meaning here: the coordinator takes its place")
    return lines


@dataclass
class Meeting:
    """Where the machines meet. `may_host`: None if whoever can listen at the endpoint hosts the coordinator.

    `policy` holds the limits that came with --rdzv-conf; `notes` one line for each key that changes nothing.
    """

    endpoint: tuple[str, int] | None = None
    may_host: bool | None = None
    address: str | None = None
    store_port: int = 0
    policy: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def meeting(
    *,
    most_nodes: int,
    standalone: bool,
    rdzv_endpoint: str,
    rdzv_backend: str,
    rdzv_conf: str,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    local_addr: str | None,
) -> Meeting:
    """As torchrun: --standalone before everything, --rdzv-endpoint before --master-addr and --master-port."""
    found = Meeting(address=local_addr, store_port=master_port or 0)
    _read_conf(rdzv_conf, found)
    if standalone and most_nodes > 1:
        raise ValueError("--standalone is for one machine: leave it out, or --nnodes")
    if standalone:
        found.may_host = None
        return found
    if rdzv_endpoint:
        port = _C10D_PORT if rdzv_backend == "c10d" else _STATIC_PORT
        host, port = host_and_port("--rdzv-endpoint", rdzv_endpoint, port)
        if port or most_nodes > 1:  # localhost:0 is torchrun's own way to say "one machine"
            found.endpoint = (host, port)
    elif master_addr and most_nodes > 1:
        found.endpoint = (master_addr.strip("[]"), master_port or _STATIC_PORT)
        found.store_port = 0
        if found.may_host is None and node_rank is not None:
            found.may_host = node_rank == 0
    elif master_addr:
        found.address = found.address or master_addr.strip("[]")
    return found


def _read_conf(text: str, found: Meeting) -> None:
    conf = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"--rdzv-conf {part}: give KEY=VALUE, like join_timeout=600")
        conf[key.strip()] = value.strip()
    if "is_host" in conf:
        value = conf.pop("is_host").lower()
        if value not in ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"):
            raise ValueError(f"--rdzv-conf is_host={value}: give true or false")
        found.may_host = value[0] in "1ty"
    for key, setting in (
        ("timeout", "join_limit_s"),
        ("join_timeout", "join_limit_s"),
        ("last_call_timeout", "last_call_s"),
    ):
        if key in conf:
            found.policy[setting] = _seconds(f"--rdzv-conf {key}", conf.pop(key))
    if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
        interval_s = _seconds("--rdzv-conf keep_alive_interval", conf.pop("keep_alive_interval", "5"))
        attempts = _seconds("--rdzv-conf keep_alive_max_attempt", conf.pop("keep_alive_max_attempt", "3"))
        found.policy["lease_s"] = interval_s * attempts
    found.notes += [f"--rdzv-conf {key} has no meaning here" for key in conf]


def heartbeat_limits(between: str | None, first: str | None) -> dict[str, float]:
    """ft_launcher's two heartbeat time-outs as settings of the policy; "null" leaves one at its default."""
    found = {}
    for flag, setting, text in (
        ("--ft-rank-heartbeat-timeout", "heartbeat_limit_s", between),
        ("--ft-initial-rank-heartbeat-timeout", "first_heartbeat_limit_s", first),
    ):
        if text is not None and text.lower() not in ("", "null", "none"):
            found[setting] = _seconds(flag, text)
    return found


def signals(text: str) -> tuple[int, ...]:
    """The numbers behind --signals-to-handle SIGTERM,SIGINT,..."""
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = signal.Signals[name]
        except KeyError:
            raise ValueError(f"--signals-to-handle {name}: no such signal; give names like SIGTERM,SIGUSR1") from None
        if number in _NEVER:
            raise ValueError(f"--signals-to-handle {name} can't be handled: leave it out")
        found.append(int(number))
    return tuple(found)


def hidden_streams(redirects: str, tee: str, num_workers: int) -> dict[int, frozenset[str]]:
    """Which of a local rank's streams ("out", "err") are not shown: those redirected, but for those that tee names."""
    hidden = _per_rank("--redirects", redirects, num_workers)
    shown = _per_rank("--tee", tee, num_workers)
    return {rank: streams for rank in hidden if (streams := hidden[rank] - shown[rank])}


def _per_rank(flag: str, text: str, num_workers: int) -> dict[int, frozenset[str]]:
    wrong = f"{flag} {text}: give 0, 1, 2 or 3, or one of them per local rank, like 0:3,1:1"
    if ":" not in text:
        if text not in ("0", "1", "2", "3"):
            raise ValueError(wrong)
        return dict.fromkeys(range(num_workers), _STREAMS[int(text)])
    found = dict.fromkeys(range(num_workers), _STREAMS[0])
    for part in text.split(","):
        rank, _, value = part.partition(":")
        if not rank.strip().isdigit() or value.strip() not in ("0", "1", "2", "3"):
            raise ValueError(wrong)
        found[int(rank)] = _STREAMS[int(value)]
    return {rank: found[rank] for rank in range(num_workers)}


def local_ranks(text: str) -> frozenset[int] | None:
    """--local-ranks-filter; None shows all."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"--local-ranks-filter {text}: give local ranks, like 0,1,2")
    return frozenset(int(part) for part in parts)


def words(text: str) -> tuple[str, ...]:
    """--duplicate-*-filters: split at commas; a double comma stands for one."""
    return tuple(word.replace("\0", ",") for word in text.replace(",,", "\0").split(",") if word)


def check_choices(params: dict[str, Any]) -> None:
    """Raises ValueError for a value that torchrun or ft_launcher would refuse."""
    for name, allowed in _CHOICES.items():
        value = params.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give {', '.join(allowed)}")


def _seconds(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise ValueError(f"{flag} {text}: give seconds, more than 0")
    return value
