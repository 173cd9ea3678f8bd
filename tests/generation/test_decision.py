"""Who is charged, which rung is picked, and when a job ends."""

from __future__ import annotations

from typing import Any

from ridethrough.generation.decision import Decision, decide
from ridethrough.generation.faults import FaultReport, root_cause
from ridethrough.generation.history import History
from ridethrough.generation.policy import Policy


def report(fault_class: str = "exception", **fields: Any) -> FaultReport:
    given = {"generation": 1, "worker": "w", "rank": 1, "node": "n", "step": 7, "cause": "ValueError: bad (t.py:3)"}
    return FaultReport.model_validate({**given, "detected_by": "exception", "fault_class": fault_class, **fields})


def chosen(history: History, root: FaultReport, policy: Policy | None = None, **given: Any) -> Decision:
    known: dict[str, Any] = {"now_s": 0.0, "replaced": False, "can_replace_node": False}
    return decide(policy or Policy(), history, root, **{**known, **given})


# --- root cause ------------------------------------------------------------------------------------------------------


def test_the_dead_explain_the_hung_the_raisers_and_the_cut() -> None:
    order = ["node_loss", "sigkill", "hang", "exception", "collective"]
    for i, earlier in enumerate(order):
        later = [report(c, declared_ns=1) for c in order[i + 1 :]]
        assert root_cause([*later, report(earlier, declared_ns=99)]).fault_class == earlier


def test_a_process_that_we_ended_is_no_root() -> None:
    ours = report("sigkill", killed_by_us=True)
    replaced = report("exit", exit_code=71)
    own = report("exception")
    assert root_cause([ours, replaced, own]) is own


def test_a_script_that_died_of_a_peer_is_no_root() -> None:
    victim = report("exit", cause="RuntimeError: Connection closed by peer", rank=0, fault_ns=1)
    culprit = report("exit", cause="ValueError: lr=-1 (train.py:12)", fault_ns=2)
    assert root_cause([victim, culprit]) is culprit


def test_clocks_of_two_hosts_are_not_compared() -> None:
    first, second = report(node="a", fault_ns=900), report(node="b", fault_ns=5)
    assert root_cause([first, second]) is first
    earlier = report(node="a", fault_ns=100)
    assert root_cause([first, second, earlier]) is earlier


# --- the same again (B19) --------------------------------------------------------------------------------------------


def test_the_same_before_any_step_ends_it_at_the_second_attempt() -> None:
    history = History()
    root = report("exit", step=None, cause="ValueError: lr (t.py:1)")
    assert chosen(history, root).rung == "replace_process"
    second = chosen(history, root)
    assert (second.rung, second.code) == ("give_up", 81)
    assert "failed before the first step, no progress" in second.why


def test_twice_at_one_step_goes_further_back_and_thrice_ends_it() -> None:
    history = History(best_step=6)
    assert chosen(history, report(resumed_at=5)).rung == "in_process"
    assert history.older_than is None
    assert chosen(history, report(resumed_at=5)).rung == "replace_process"
    assert history.older_than == 5
    third = chosen(history, report(resumed_at=0))
    assert (third.rung, third.code) == ("give_up", 81)


def test_without_the_resumed_step_one_below_the_failed_one_is_taken() -> None:
    history = History(best_step=6)
    for _ in range(2):
        chosen(history, report())
    assert history.older_than == 6


def test_no_progress_comes_before_the_budgets() -> None:
    history = History(best_step=6)
    policy = Policy(max_restarts=2, max_rank_faults=2)
    ends = [chosen(history, report(), policy) for _ in range(3)]
    assert [e.code for e in ends] == [0, 0, 81]


def test_hangs_are_the_same_whatever_they_lasted() -> None:
    history = History(best_step=6)
    ends = [chosen(history, report("hang", phase="forward", cause=f"no progress for {i} s")) for i in range(3)]
    assert ends[-1].code == 81


def test_kills_from_outside_are_never_the_same_again() -> None:
    history = History()
    for step in range(1, 10):
        history.progressed(step)
        assert chosen(history, report("sigkill", step=7)).rung == "replace_process"


def test_incidents_without_a_new_best_step_end_it_whatever_their_class() -> None:
    history = History(best_step=6)
    ends = [chosen(history, report("node_loss", rank=i)) for i in range(11)]
    assert [e.rung for e in ends[:10]] == ["replace_node"] * 10
    assert (ends[10].rung, ends[10].code) == ("give_up", 81)


def test_what_is_not_to_be_retried_is_not() -> None:
    for root in (report(fatal="policy"), report(cause="ImportError: no module x"), report(cause="a.b.Fatal: stop")):
        assert chosen(History(), root).code == 83
    own = Policy(never_retry=("ValueError",))
    assert chosen(History(), report(), own).code == 83
    assert chosen(History(), report(fatal="before_first_step")).code == 81


def test_with_recovery_off_the_workers_own_code_is_passed_on() -> None:
    off = Policy(max_restarts=0)
    assert chosen(History(), report("exit", exit_code=42), off).code == 42
    assert chosen(History(), report("sigsegv", signal=11), off).code == 139
    assert chosen(History(), report(), off).code == 1


# --- budgets (B20, C45) ----------------------------------------------------------------------------------------------


def faults(history: History, policy: Policy, count: int, *, first_step: int, gap_s: float = 0.0) -> list[Decision]:
    out = []
    for i in range(count):
        history.progressed(first_step + i, forgive_after_steps=policy.forgive_after_steps)
        root = report(step=first_step + i + 1, rank=i % 2, cause=f"ValueError: {i}")
        out.append(chosen(history, root, policy, now_s=i * gap_s))
    return out


def test_the_fourth_of_three_restarts_ends_it() -> None:
    ends = faults(History(), Policy(max_restarts=3), 4, first_step=1)
    assert [e.code for e in ends] == [0, 0, 0, 80]


def test_good_steps_between_are_forgiven_only_if_asked_for() -> None:
    for forgive, code in ((50, 0), (0, 80)):
        policy, history = Policy(max_restarts=3, forgive_after_steps=forgive), History()
        faults(history, policy, 2, first_step=1)
        assert faults(history, policy, 2, first_step=60)[-1].code == code


def test_preemption_and_node_loss_are_not_charged() -> None:
    policy, history = Policy(max_restarts=2), History()
    for step in range(1, 6):
        history.progressed(step)
        assert chosen(history, report("preemption"), policy).rung == "replace_node"
    assert history.restarts == 0
    assert [e.code for e in faults(history, policy, 3, first_step=10)] == [0, 0, 80]


def test_one_ranks_budget_is_its_own() -> None:
    policy, history = Policy(max_rank_faults=2), History()
    ends = []
    for step in range(1, 4):
        history.progressed(step)
        ends.append(chosen(history, report("sigkill", rank=3), policy))
    assert ends[-1].code == 80 and "rank 3 failed 3 times" in ends[-1].why


def test_cheap_and_costly_restarts_have_windows_of_their_own() -> None:
    policy = Policy(max_cheap_in_window=2, max_costly_in_window=2, window_s=100.0)
    assert [e.code for e in faults(History(), policy, 3, first_step=1, gap_s=10.0)] == [0, 0, 80]
    assert [e.code for e in faults(History(), policy, 3, first_step=1, gap_s=60.0)] == [0, 0, 0]
    history = History()
    faults(history, policy, 2, first_step=1)
    history.progressed(9)
    assert chosen(history, report("sigkill", rank=0), policy).rung == "replace_process"
    assert history.restarts == 3


def test_another_coordinators_clock_frees_no_budget() -> None:
    policy = Policy(max_cheap_in_window=2, window_s=100.0)
    history = History()
    faults(history, policy, 2, first_step=1)
    history.rebase(1e6)
    history.progressed(9)
    assert chosen(history, report(step=10, cause="ValueError: new", rank=0), policy, now_s=1e6).code == 80


# --- escalation ------------------------------------------------------------------------------------------------------


def test_the_same_rank_without_progress_climbs_the_ladder() -> None:
    for standby, last in ((True, "replace_node"), (False, "replace_process")):
        history = History(best_step=6)
        rungs = [chosen(history, report(cause=f"ValueError: {i}"), can_replace_node=standby).rung for i in range(3)]
        assert rungs == ["in_process", "replace_process", last]


def test_progress_between_starts_the_ladder_anew() -> None:
    history = History()
    for step in range(1, 6):
        history.progressed(step)
        assert chosen(history, report(step=step + 1)).rung == "in_process"


def test_a_gpu_error_needs_a_new_process() -> None:
    assert chosen(History(best_step=6), report("gpu")).rung == "replace_process"
    assert chosen(History(best_step=6), report("hang"), replaced=True).rung == "replace_process"


def test_a_host_lost_twice_in_the_window_is_cordoned() -> None:
    history = History()
    limits = {"cordon_after": 2, "window_s": 100.0}
    assert not history.mark_host("a", 0.0, **limits)
    assert not history.mark_host("a", 200.0, **limits)
    assert history.mark_host("a", 250.0, **limits)
    assert history.cordoned == ["a"]
    assert not history.mark_host("b", 250.0, cordon_after=0, window_s=100.0)
