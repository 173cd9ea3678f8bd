"""`ridethrough run` knows every option of torchrun, in every spelling, and means the same by it."""

from __future__ import annotations

import argparse
import inspect
import signal
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ridethrough.cli import run as command
from ridethrough.cli import run_meaning as rm


def torchrun_actions() -> list[argparse.Action]:
    from torch.distributed.run import get_args_parser

    return [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]


def our_names() -> set[str]:
    found: set[str] = set()
    for parameter in get_command(command.app).params:
        found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def test_no_option_of_torchrun_is_missed() -> None:
    ours = our_names()
    missing = [n for a in torchrun_actions() for n in a.option_strings if n.replace("_", "-") not in ours]
    assert not missing
    assert len(torchrun_actions()) >= 25


def test_torchruns_environment_variables_are_read() -> None:
    ours = {
        v
        for p in get_command(command.app).params
        for v in ([p.envvar] if isinstance(p.envvar, str) else p.envvar or [])
    }
    theirs = {f"PET_{a.dest.upper()}" for a in torchrun_actions()}
    assert theirs <= ours


def test_each_option_takes_a_value_exactly_where_torchruns_does() -> None:
    flags = {n for p in get_command(command.app).params if getattr(p, "is_flag", False) for n in p.opts}
    for action in torchrun_actions():
        name = action.option_strings[0].replace("_", "-")
        assert (name in flags) == (action.nargs == 0), name


@pytest.mark.parametrize(
    "option", ["--nproc_per_node=x", "--ft_rank_heartbeat_timeout=x", "--ft-param-rank_heartbeat_timeout=x"]
)
def test_underscores_are_as_good(option: str, tmp_path: Any) -> None:
    script = tmp_path / "a.py"
    script.write_text("")
    result = CliRunner().invoke(command.app, [option, str(script)])
    assert result.exit_code == 2 and "No such option" not in result.output
    assert "x" in result.stderr.splitlines()[-1]


def test_help_is_grouped() -> None:
    text = CliRunner().invoke(command.app, ["--help"]).output
    titles = ["Launch", "Several machines", "Recovery", "Run folder and output", "Faults on purpose", "Accepted from"]
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)


def meet(most_nodes: int = 2, **given: Any) -> rm.Meeting:
    settings = {name: p.default for name, p in inspect.signature(command.run).parameters.items()}
    known = inspect.signature(rm.meeting).parameters
    fixed = {name: settings[name] for name in known if name in settings}
    return rm.meeting(**{**fixed, "most_nodes": most_nodes, **given})


def test_static_rendezvous_is_the_coordinator_on_the_machine_of_rank_0() -> None:
    first = meet(node_rank=0, master_addr="node0", master_port=1234)
    assert (first.endpoint, first.may_host, first.store_port) == (("node0", 1234), True, 0)
    second = meet(node_rank=1, master_addr="node0")
    assert (second.endpoint, second.may_host) == (("node0", 29500), False)


def test_an_endpoint_goes_before_the_master() -> None:
    found = meet(rdzv_endpoint="a:1", master_addr="b", master_port=2)
    assert (found.endpoint, found.store_port) == (("a", 1), 2)
    assert meet(rdzv_endpoint="a", rdzv_backend="c10d").endpoint == ("a", 29400)


def test_one_machine() -> None:
    assert meet(1, standalone=True, rdzv_endpoint="a:1").endpoint is None
    assert meet(1, rdzv_endpoint="localhost:0").endpoint is None
    assert meet(1, master_addr="10.0.0.1", master_port=7).address == "10.0.0.1"
    assert meet(1, master_addr="10.0.0.1", master_port=7).store_port == 7
    with pytest.raises(ValueError, match="--standalone"):
        meet(2, standalone=True)


def test_rendezvous_configuration() -> None:
    found = meet(rdzv_conf="join_timeout=60,last_call_timeout=3,keep_alive_interval=2,is_host=false,read_timeout=9")
    assert found.policy == {"join_limit_s": 60, "last_call_s": 3, "lease_s": 6}
    assert found.may_host is False
    assert found.notes == ["--rdzv-conf read_timeout has no meaning here"]
    for wrong in ("x", "is_host=perhaps", "join_timeout=soon", "timeout=0"):
        with pytest.raises(ValueError, match="--rdzv-conf"):
            meet(rdzv_conf=wrong)


def test_streams_hidden_and_shown() -> None:
    both, out = frozenset({"out", "err"}), frozenset({"out"})
    assert rm.hidden_streams("0", "0", 2) == {}
    assert rm.hidden_streams("3", "0", 2) == {0: both, 1: both}
    assert rm.hidden_streams("3", "2", 2) == {0: out, 1: out}
    assert rm.hidden_streams("0:3,1:1", "0", 3) == {0: both, 1: out}
    with pytest.raises(ValueError, match="--redirects 4"):
        rm.hidden_streams("4", "0", 1)


def test_words_signals_and_heartbeats() -> None:
    assert rm.words("apple,or,,ange") == ("apple", "or,ange")
    assert rm.local_ranks("0, 2") == {0, 2} and rm.local_ranks("") is None
    assert rm.signals("SIGTERM,SIGUSR1") == (signal.SIGTERM, signal.SIGUSR1)
    with pytest.raises(ValueError, match="SIGKILL"):
        rm.signals("SIGKILL")
    assert rm.heartbeat_limits("3", "null") == {"heartbeat_limit_s": 3.0}
    assert rm.heartbeat_limits(None, "9.5") == {"first_heartbeat_limit_s": 9.5}


def test_what_has_no_meaning_is_said_once() -> None:
    lines = rm.without_meaning({"monitor_interval": "5", "ft_restart_policy": "any-failed", "rdzv_backend": "etcd-v2"})
    assert len(lines) == 2 and "--monitor-interval" in lines[0] and "etcd-v2" in lines[1]
    with pytest.raises(ValueError, match="--start-method"):
        rm.check_choices({"start_method": "thread"})
