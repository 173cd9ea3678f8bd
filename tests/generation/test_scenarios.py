"""Golden sequences: what the machine says, in order, in the situations that it is made for."""

from __future__ import annotations

from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.history import History
from ridethrough.generation.machine import GenerationMachine
from ridethrough.generation.plan import NodeRanks, Plan
from ridethrough.generation.policy import Policy


class Job:
    """Feeds a machine and writes down what it says, in short: `enter a 2` is plan 2 for node a."""

    def __init__(self, nodes: str = "ab", num_workers: int = 1, min_nodes: int = 0, max_nodes: int = 0, **policy: Any):
        self.now_s = 0.0
        self.machine = GenerationMachine(
            num_workers=num_workers,
            min_nodes=min_nodes or len(nodes),
            max_nodes=max_nodes or len(nodes),
            policy=Policy(**{"last_call_s": 0.0, "node_wait_s": 20.0, **policy}),
        )
        self.spawned: dict[str, m.Spawn] = {}
        self.said: list[m.Action] = []
        for node in nodes:
            self.join(node)

    def __call__(self, *events: m.Event, after_s: float = 0.0) -> list[str]:
        self.now_s += after_s
        out: list[m.Action] = []
        for event in events:
            out += self.machine.handle(event, self.now_s)
        for action in out:
            if isinstance(action, m.Spawn):
                self.spawned[action.worker] = action
        self.said += out
        return [brief(a) for a in out]

    def join(self, node: str, name: str = "") -> list[str]:
        return self(m.NodeJoined(node=node, name=name or f"host-{node}", num_workers=self.machine.members.num_workers))

    def tick(self, after_s: float) -> list[str]:
        return self(m.Tick(), after_s=after_s)

    def open_store(self) -> list[str]:
        asked = [a for a in self.said if isinstance(a, m.OpenStore)][-1]
        return self(m.StoreOpened(serial=asked.serial, endpoint=f"{asked.node}:1"))

    def running(self) -> Job:
        """Generation 1, everybody inside, one step done."""
        self.open_store()
        for worker in list(self.spawned):
            self(m.WorkerReady(worker=worker))
        self.enter()
        return self

    def enter(self) -> None:
        for worker in self.machine.members.workers():
            self(m.WorkerEntered(worker=worker.id, generation=self.machine.generation))
        self.step()

    def step(self, number: int = 0) -> None:
        number = number or self.machine.history.best_step + 1
        node = self.machine.members.active[0].id
        self(m.Progress(node=node, generation=self.machine.generation, step=number))

    def ready(self, *workers: str) -> list[str]:
        return self(*(m.WorkerReady(worker=w, left=self.machine.generation) for w in workers))

    def exited(self, worker: str, fault_class: str = "sigkill", **fields: Any) -> list[str]:
        report = None
        if fault_class:
            given = {"generation": self.machine.generation, "worker": worker, "node": "", "fault_class": fault_class}
            report = FaultReport.model_validate({**given, "detected_by": "waitpid", **fields})
        return self(m.WorkerExited(worker=worker, report=report))

    def raised(self, worker: str, fault_class: str = "exception", **fields: Any) -> list[str]:
        given = {"generation": self.machine.generation, "worker": worker, "fault_class": fault_class, "rank": 0}
        report = FaultReport.model_validate({"detected_by": "exception", "cause": "ValueError: x", **given, **fields})
        return self(m.WorkerFaulted(report=report))


def brief(action: m.Action) -> str:
    if isinstance(action, m.Enter):
        return f"enter {action.node} {action.plan.generation}"
    if isinstance(action, m.Spawn):
        return f"spawn {action.node} {action.worker} as rank {action.rank} of {action.world_size}"
    if isinstance(action, m.FaultDeclared):
        return f"fault {action.report.fault_class}"
    if isinstance(action, m.IncidentDecided):
        return f"incident {action.id} {action.root.fault_class} {action.rung} attempt {action.attempts}"
    if isinstance(action, m.JobDone):
        return f"done {action.code}"
    if isinstance(action, m.AllOut):
        return f"all out {action.generation}"
    if isinstance(action, m.Kill):
        return f"kill {action.worker}"
    if isinstance(action, m.StopAt):
        return f"stop {action.node} at {action.step}"
    if isinstance(action, m.Dismiss):
        return f"dismiss {action.node} {action.code}"
    return f"{action.kind.replace('_', ' ')} {action.node}"


# --- beginning and end -----------------------------------------------------------------------------------------------


def test_the_first_world() -> None:
    job = Job("")
    job.machine._quorum.min_nodes = job.machine._quorum.max_nodes = 2
    assert job.join("a") == []
    assert job.join("b") == ["open store a"]
    assert job.open_store() == ["spawn a w0-1 as rank 0 of 2", "spawn b w0-2 as rank 1 of 2"]
    assert job.ready("w0-2") == []
    assert job.ready("w0-1") == ["enter a 1", "enter b 1"]
    assert job.machine.plan is not None and job.machine.plan.store == "a:1"


def test_everybody_finished() -> None:
    job = Job().running()
    assert job(m.WorkerFinished(worker="w0-1", generation=1, step=9)) == []
    assert job(m.WorkerFinished(worker="w0-2", generation=1, step=9)) == ["done 0"]
    assert job.tick(100.0) == []


def test_a_finished_rank_is_called_back() -> None:
    job = Job().running()
    job(m.WorkerFinished(worker="w0-1", generation=1, step=9))
    assert job.exited("w0-2")[1:4] == ["leave a", "leave b", "open store a"]
    job.open_store()
    job.ready("w0-1")
    assert job.ready("w0-3")[-2:] == ["enter a 2", "enter b 2"]


def test_too_few_nodes_at_the_start_end_it() -> None:
    job = Job("a", min_nodes=2, max_nodes=2, join_limit_s=100.0)
    assert job.tick(99.0) == []
    assert job.tick(2.0) == ["done 80"]


# --- faults ----------------------------------------------------------------------------------------------------------


def test_an_exception_keeps_every_process() -> None:
    job = Job().running()
    assert job.raised("w0-1") == ["fault exception", "leave a", "leave b", "open store a"]
    assert job.raised("w0-2", "collective") == ["fault collective"]
    assert job.raised("w0-2", "collective") == []
    assert job.ready("w0-1") == []
    assert job.ready("w0-2") == ["all out 1"]
    assert job.open_store() == ["incident 0.1 exception in_process attempt 1", "enter a 2", "enter b 2"]


def test_a_kill_replaces_one_process() -> None:
    job = Job(num_workers=2).running()
    assert job.raised("w0-1", "collective")[0] == "fault collective"
    assert job.exited("w0-4") == ["fault sigkill", "spawn b w0-5 as rank 3 of 4"]
    job.open_store()
    assert job.ready("w0-1", "w0-2", "w0-3") == ["all out 1"]
    assert job.ready("w0-5") == ["incident 0.1 sigkill replace_process attempt 1", "enter a 2", "enter b 2"]
    plan = job.machine.plan
    assert plan is not None and [w for *_, w in plan.members()] == ["w0-1", "w0-2", "w0-3", "w0-5"]
    assert plan.restarts == 1


def test_who_does_not_leave_is_killed_and_who_cannot_be_killed_costs_the_node() -> None:
    job = Job("abc", min_nodes=2, max_nodes=2, leave_limit_s=2.0, kill_limit_s=15.0).running()
    job.raised("w0-1")
    job.ready("w0-1")
    assert job.tick(2.5) == ["kill w0-2"]
    assert job.tick(10.0) == []
    out = job.tick(6.0)
    assert out[:2] == ["dismiss b 80", "fault node_loss"]
    assert "spawn c w0-3 as rank 1 of 2" in [*out, *job.open_store()]


def test_a_stuck_rank_that_is_killed_takes_no_other_with_it() -> None:
    job = Job("abc").running()
    job.raised("w0-1")
    job.open_store()
    job.ready("w0-1", "w0-3")
    assert job.tick(3.0) == ["kill w0-2"]
    out = job.exited("w0-2", killed_by_us=True, signal=9)
    assert not [a for a in out if a.startswith("kill")]
    assert job.ready("w0-4")[0] == "incident 0.1 exception replace_process attempt 1"
    assert [w.id for w in job.machine.members.workers()] == ["w0-1", "w0-4", "w0-3"]


def test_a_failed_attempt_belongs_to_the_incident_before() -> None:
    job = Job().running()
    job.exited("w0-2")
    job.open_store()
    job.ready("w0-1", "w0-3")
    assert job.machine.generation == 2
    job.exited("w0-3")
    job.open_store()
    out = [*job.ready("w0-1"), *job.ready("w0-4")]
    assert "incident 0.1 sigkill replace_process attempt 2" in out


def test_who_does_not_enter_is_killed() -> None:
    job = Job(rebuild_limit_s=30.0).running()
    job.raised("w0-1")
    job.open_store()
    job.ready("w0-1", "w0-2")
    job(m.WorkerEntered(worker="w0-1", generation=2))
    assert job.tick(31.0)[:2] == ["kill w0-2", "fault hang"]
    assert job.exited("w0-2", killed_by_us=True, signal=9)[-1].startswith("spawn b")


def test_a_process_that_never_comes_to_rt_run_is_replaced() -> None:
    job = Job(start_limit_s=60.0)
    job.open_store()
    job.ready("w0-1")
    job.tick(1.0)
    assert job.tick(60.0) == ["kill w0-2", "fault hang"]
    job.exited("w0-2", killed_by_us=True, signal=9)
    assert "spawn b w0-3 as rank 1 of 2" in job.tick(1.0)


def test_a_store_that_does_not_come_is_asked_of_the_next_node_and_then_given_up() -> None:
    job = Job(store_limit_s=15.0)
    assert [job.tick(16.0) for _ in range(6)] == [
        ["open store b"],
        ["open store a"],
        ["open store b"],
        ["open store a"],
        ["open store b"],
        ["open store a", "done 80"],
    ]


def test_the_second_failure_at_a_step_loads_an_older_state() -> None:
    job = Job().running()
    for times in (1, 2):
        job.step(6)
        job.raised("w0-1", step=7, resumed_at=5)
        job.ready("w0-1", "w0-2")
        job.open_store()
        if times == 2:
            assert job.said[-1].kind != "job_done"
            assert job.exited("w0-1", "sigkill", killed_by_us=True, signal=9)
            job.ready(*[w.id for w in job.machine.members.workers() if w.state == "starting"])
        assert job.machine.plan is not None
        assert job.machine.plan.resume == ({} if times == 1 else {"older_than": 5})
        job.enter()


# --- nodes -----------------------------------------------------------------------------------------------------------


def test_a_lost_nodes_ranks_go_to_a_standby() -> None:
    job = Job("abc", min_nodes=2, max_nodes=2).running()
    out = job(m.NodeLeft(node="a", lost=True))
    assert out == ["fault node_loss", "leave b", "open store b"]
    assert job.ready("w0-2") == ["all out 1"]
    assert job.open_store() == ["spawn c w0-3 as rank 0 of 2"]
    assert job.ready("w0-3") == ["incident 0.1 node_loss replace_node attempt 1", "enter c 2", "enter b 2"]
    assert job.machine.history.restarts == 0


def test_without_a_standby_it_waits_and_then_shrinks_once() -> None:
    job = Job("abc", min_nodes=2, max_nodes=3).running()
    job(m.NodeLeft(node="b", lost=True))
    job.ready("w0-1", "w0-3")
    assert job.tick(19.0) == []
    assert job.tick(2.0) == ["open store c"]  # the one asked of a did not come
    out = job.open_store()  # it does not wait a second time
    assert out == ["incident 0.1 node_loss shrink attempt 1", "enter a 2", "enter c 2"]
    assert job.machine.plan is not None
    assert [(r, n) for r, _, n, _ in job.machine.plan.members()] == [(0, "a"), (1, "c")]


def test_below_the_least_number_of_nodes_it_ends() -> None:
    job = Job().running()
    job(m.NodeLeft(node="b", lost=True))
    job.ready("w0-1")
    job.tick(1.0)
    out = job.tick(20.0)
    assert out == ["incident 0.1 node_loss give_up attempt 1", "done 80"]


def test_a_shrunken_world_grows_in_a_planned_way_and_without_charge() -> None:
    job = Job("abc", min_nodes=2, max_nodes=3, grow_after_s=5.0).running()
    job(m.NodeLeft(node="c", lost=True))
    job.ready("w0-1", "w0-2")
    job.open_store()
    job.tick(1.0)
    job.tick(20.0)
    assert job.machine.generation == 2
    job.enter()
    assert job.join("d") == ["ask step a", "ask step b"]
    job(m.StepAt(worker="w0-1", generation=2, step=4))
    assert job(m.StepAt(worker="w0-2", generation=2, step=5)) == ["stop a at 5", "stop b at 5"]
    job(m.WorkerFinished(worker="w0-1", generation=2, step=5, stopped=True))
    out = job(m.WorkerFinished(worker="w0-2", generation=2, step=5, stopped=True))
    assert out == ["leave a", "leave b", "open store a"]
    assert job.ready("w0-1", "w0-2") == ["all out 2"]
    job.open_store()
    assert job.ready("w0-3", "w0-4") == ["enter a 3", "enter b 3", "enter d 3"]
    assert job.machine.history.restarts == 0 and job.machine.history.incidents == 1


def test_a_node_with_notice_is_replaced_after_a_save() -> None:
    job = Job("abc", min_nodes=2, max_nodes=2).running()
    assert job(m.Notice(node="b", cause="preempted", grace_s=30.0)) == ["ask step a", "ask step b"]
    job(*(m.StepAt(worker=w, generation=1, step=3) for w in ("w0-1", "w0-2")))
    job(*(m.WorkerFinished(worker=w, generation=1, step=3, stopped=True) for w in ("w0-1", "w0-2")))
    assert job.ready("w0-1", "w0-2") == ["all out 1", "fault preemption", "dismiss b 82"]
    job.open_store()
    assert job.ready("w0-3") == ["incident 0.1 preemption replace_node attempt 1", "enter a 2", "enter c 2"]
    assert job.machine.history.restarts == 0


def test_an_old_node_that_comes_back_is_a_newcomer_without_workers() -> None:
    job = Job("abc", min_nodes=2, max_nodes=2).running()
    plan = job.machine.plan
    assert plan is not None
    job(m.NodeLeft(node="a", lost=True))
    snapshot = m.WorkerSnapshot(worker="w0-1", local_rank=0, state="inside", attached=True)
    assert job(m.NodeRejoined(node="a", name="host-a", plan=plan.parts()[0], workers=(snapshot,))) == ["kill w0-1"]
    assert [n.id for n in job.machine.members.standby][-1] == "a"


def test_a_host_that_is_lost_twice_is_cordoned() -> None:
    job = Job("ab", min_nodes=1, max_nodes=2).running()
    job(m.NodeLeft(node="b", lost=True))
    job.ready("w0-1")
    job.open_store()
    job.join("b2", "host-b")
    job.ready("w0-3")
    assert job.machine.generation == 2
    job(m.NodeLeft(node="b2", lost=True))
    assert job.join("b3", "host-b") == ["dismiss b3 80"]


def test_a_lost_node_with_eight_ranks_is_one_incident_also_on_the_way_in() -> None:
    job = Job(num_workers=8, max_no_progress=2)
    job.open_store()
    job(m.WorkerReady(worker="w0-1"))
    job(m.NodeLeft(node="b", lost=True))
    job.tick(1.0)
    assert job.machine.history.incidents == 1
    assert job.machine.phase == "forming"


def test_a_node_with_another_number_of_ranks_is_refused() -> None:
    job = Job("a", min_nodes=1, max_nodes=2, num_workers=2)
    assert job(m.NodeJoined(node="x", name="x", num_workers=4)) == ["dismiss x 2"]


def test_the_same_rank_again_without_progress_moves_to_another_node() -> None:
    job = Job("abc", min_nodes=2, max_nodes=2).running()
    job.step(5)
    rungs = []
    for i in range(3):
        worker = next(w for w in job.machine.members.workers() if job.machine.members.rank_of(w) == 1)
        job.raised(worker.id, rank=1, node=worker.node, cause=f"ValueError: {i}", step=6)
        job.ready(*[w.id for w in job.machine.members.workers() if w.state == "inside"])
        job.open_store()
        if i == 1:
            job.exited(worker.id, killed_by_us=True, signal=9)
        for _ in range(2):
            job.ready(*[w.id for w in job.machine.members.workers() if w.state == "starting"])
        rungs += [a.rung for a in job.said if isinstance(a, m.IncidentDecided)][len(rungs) :]
        for w in job.machine.members.workers():
            job(m.WorkerEntered(worker=w.id, generation=job.machine.generation))
    assert rungs == ["in_process", "replace_process", "replace_node"]
    assert [n.id for n in job.machine.members.active] == ["a", "c"]
    assert [n.id for n in job.machine.members.standby] == ["b"]


def test_a_failed_check_of_a_node_gives_its_place_to_a_standby() -> None:
    job = Job("abc", min_nodes=2, max_nodes=2).running()
    job.raised("w0-2", rank=1, node="b")
    assert job(m.NodeUnfit(node="a", generation=1, why="check nic failed: eth1")) == []
    assert job.exited("w0-1", killed_by_us=True, signal=9)[:1] == ["fault sigkill"]
    assert job.ready("w0-2")[:1] == ["all out 1"]
    assert [n.id for n in job.machine.members.active] == ["c", "b"]
    job.open_store()
    job.ready(*[w.id for w in job.machine.members.workers() if w.state == "starting"])
    (incident,) = [a for a in job.said if isinstance(a, m.IncidentDecided)]
    assert (incident.root.rank, incident.rung) == (1, "replace_node")
    assert incident.why.endswith("; a: check nic failed: eth1")
    assert job.machine.plan is not None and [n.node for n in job.machine.plan.nodes] == ["c", "b"]
    assert [n.id for n in job.machine.members.standby] == ["a"]


def test_without_a_standby_an_unfit_node_keeps_its_place_with_a_new_process() -> None:
    job = Job("ab").running()
    job.raised("w0-2", rank=1, node="b")
    job(m.NodeUnfit(node="a", generation=1, why="check nic failed: eth1"))
    job.exited("w0-1", killed_by_us=True, signal=9)
    job.ready("w0-2")
    job.open_store()
    job.ready(*[w.id for w in job.machine.members.workers() if w.state == "starting"])
    (incident,) = [a for a in job.said if isinstance(a, m.IncidentDecided)]
    assert incident.rung == "replace_process"
    assert job.machine.plan is not None and [n.node for n in job.machine.plan.nodes] == ["a", "b"]


def test_a_late_word_of_an_unfit_node_evicts_nobody() -> None:
    job = Job("abc", min_nodes=2, max_nodes=2).running()
    job(m.NodeUnfit(node="a", generation=1, why="not while it runs"))
    job.raised("w0-2", rank=1, node="b")
    job(m.NodeUnfit(node="a", generation=0, why="of an older generation"))
    job.ready("w0-1", "w0-2")
    assert [n.id for n in job.machine.members.active] == ["a", "b"]


# --- planned stop ----------------------------------------------------------------------------------------------------

STOP = m.StopRequested(cause="SIGTERM", code=82, grace_s=10.0)


def test_a_planned_stop() -> None:
    job = Job().running()
    assert job(STOP) == ["ask step a", "ask step b"]
    assert job(m.StepAt(worker="w0-2", generation=1, step=7)) == []
    assert job(m.StepAt(worker="w0-2", generation=1, step=9)) == []
    assert job(m.StepAt(worker="w0-1", generation=1, step=6)) == ["stop a at 7", "stop b at 7"]
    assert job.machine.stop_agreed
    job(m.WorkerFinished(worker="w0-1", generation=1, step=7, stopped=True))
    assert job(m.WorkerFinished(worker="w0-2", generation=1, step=7, stopped=True)) == ["done 82"]


def test_a_rank_that_had_finished_need_not_answer() -> None:
    job = Job().running()
    job(m.WorkerFinished(worker="w0-1", generation=1, step=9))
    job(STOP)
    assert job(m.StepAt(worker="w0-2", generation=1, step=8)) == ["stop a at 9", "stop b at 9"]


def test_a_stop_in_the_middle_of_a_recovery_saves_in_the_next_generation() -> None:
    job = Job().running()
    job.exited("w0-2")
    assert job(STOP) == []
    job.open_store()
    assert job.ready("w0-1", "w0-3")[-2:] == ["enter a 2", "enter b 2"]
    job(m.WorkerEntered(worker="w0-1", generation=2))
    assert job(m.WorkerEntered(worker="w0-3", generation=2)) == ["ask step a", "ask step b"]


def test_a_stop_ends_in_time_whatever_happens() -> None:
    job = Job().running()
    job(STOP)
    assert job.tick(9.9) == []
    assert job.tick(0.2) == ["done 82"]


def test_a_second_request_ends_it_at_once_and_so_does_one_before_the_first_plan() -> None:
    job = Job().running()
    job(STOP)
    assert job(STOP) == ["done 82"]
    assert Job()(STOP) == ["done 82"]


# --- scripts without rt.run ------------------------------------------------------------------------------------------


def test_a_plain_script_is_started_anew_as_a_whole() -> None:
    job = Job()
    job.open_store()
    assert job.exited("w0-2", "exit", exit_code=1, cause="ValueError: lr", step=3) == ["fault exit"]
    out = job.tick(0.2)
    assert out == ["kill w0-1", "open store a"]
    assert job.open_store() == ["spawn a w0-3 as rank 0 of 2", "spawn b w0-4 as rank 1 of 2"]
    assert job.exited("w0-1", killed_by_us=True, signal=9) == []
    job.exited("w0-3", "")
    assert job.exited("w0-4", "")[-1] == "done 0"


def test_a_plain_victim_waits_for_its_culprit() -> None:
    job = Job()
    job.open_store()
    job.exited("w0-1", "exit", exit_code=1, cause="RuntimeError: Connection closed by peer", step=3)
    assert job.tick(0.5) == []
    job.exited("w0-2", "exit", exit_code=1, cause="ValueError: lr=-1", step=3)
    job.tick(0.2)
    job.open_store()
    decided = job.machine._incident.settle()
    assert decided[0].root.cause == "ValueError: lr=-1"


def test_a_plain_world_does_not_change_under_its_processes() -> None:
    job = Job("a", min_nodes=1, max_nodes=2, grow_after_s=5.0)
    job.tick(1.0)
    job.open_store()
    assert [s.world_size for s in job.spawned.values()] == [1]
    job.machine._quorum.max_nodes = 3
    assert job.join("b") == []
    out = job.tick(6.0)
    assert out == ["kill w0-1", "open store a"]
    job.open_store()
    assert [s.world_size for s in job.spawned.values()][1:] == [2, 2]
    assert job.machine.history.restarts == 0


def test_some_processes_end_before_rt_run() -> None:
    job = Job()
    job.open_store()
    job.exited("w0-2", "")
    assert job.ready("w0-1") == ["fault exit"]
    assert job.tick(0.2) == ["spawn b w0-3 as rank 1 of 2"]


# --- a coordinator that is started again -----------------------------------------------------------------------------


def snapshots(*states: str) -> list[m.NodeRejoined]:
    history = History(restarts=3, best_step=40)
    nodes = tuple(NodeRanks(node=n, first_rank=i, workers=(f"w0-{i + 1}",)) for i, n in enumerate("ab"))
    plan = Plan(epoch=0, generation=4, nodes=nodes, store="a:1", prefix="p", history=history)
    return [
        m.NodeRejoined.model_validate(
            {
                "node": n,
                "name": f"host-{n}",
                "plan": plan.parts()[i],
                "workers": [{"worker": f"w0-{i + 1}", "local_rank": 0, "state": states[i], "attached": True}],
            }
        )
        for i, n in enumerate("ab")
    ]


def again() -> Job:
    job = Job("", min_nodes=2, max_nodes=2)
    job.machine = GenerationMachine(
        num_workers=1, min_nodes=2, max_nodes=2, policy=job.machine.policy, epoch=1, earlier=4
    )
    return job


def test_training_goes_on_without_a_restart() -> None:
    job = again()
    assert job(*snapshots("inside", "inside")) == []
    assert (job.machine.phase, job.machine.generation, job.machine.history.restarts) == ("running", 4, 3)
    assert job.exited("w0-2")[:3] == ["fault sigkill", "leave a", "leave b"]


def test_a_report_that_comes_while_learning_is_not_forgotten() -> None:
    job = again()
    first, second = snapshots("inside", "inside")
    job(first)
    assert job.raised("w0-1", generation=4) == []
    assert job(second)[:3] == ["fault exception", "leave a", "leave b"]


def test_a_generation_that_was_ending_is_ended() -> None:
    job = again()
    out = job(*snapshots("inside", "ready"))
    assert out[:3] == ["fault exit", "leave a", "leave b"]
    job.open_store()
    assert job.ready("w0-1")[-2:] == ["enter a 5", "enter b 5"]


def test_a_node_that_does_not_come_back_is_lost() -> None:
    job = again()
    job(snapshots("inside", "inside")[0])
    assert job.tick(9.0) == []
    assert job.tick(1.5)[:2] == ["fault node_loss", "leave a"]


def test_the_newest_plan_counts() -> None:
    job = again()
    first, second = snapshots("inside", "ready")
    newer = first.plan.model_copy(update={"generation": 5})
    assert job(second, first.model_copy(update={"plan": newer}))[1:3] == ["leave a", "leave b"]
    assert job.machine.generation == 5
    assert [w.id for w in job.machine.members.workers()] == ["w0-1", "w0-2"]  # b keeps its place and its process


def test_a_node_behind_the_newest_plan_takes_no_place_from_one_that_is_in_it() -> None:
    job = again()
    first, second = snapshots("inside", "inside")
    newer = {"generation": 5, "place": 0, "first_rank": 0, "workers": ("w0-2",)}
    moved = second.model_copy(update={"plan": second.plan.model_copy(update=newer)})
    job(first, moved)
    job.tick(11.0)
    assert [n.id for n in job.machine.members.active] == ["b"] and [n.id for n in job.machine.members.standby] == ["a"]


def test_a_deposed_coordinator_says_nothing() -> None:
    job = again()
    rejoined = snapshots("inside", "inside")[0]
    later = rejoined.model_copy(update={"plan": rejoined.plan.model_copy(update={"epoch": 2})})
    assert job(later) == []


def test_without_a_majority_of_the_last_plan_nothing_is_planned() -> None:
    job = Job("abcd", min_nodes=1, max_nodes=4)
    policy = job.machine.policy.model_copy(update={"majority": True})
    job.machine = GenerationMachine(num_workers=1, min_nodes=1, max_nodes=4, policy=policy, epoch=0)
    job.spawned.clear()
    for node in "abcd":
        job.join(node)
    job.running()
    for node in "cd":
        job(m.NodeLeft(node=node, lost=True))
    job.ready("w0-1", "w0-2")
    job.tick(1.0)
    assert job.tick(21.0)[-1] == "done 80"


# --- repeats, delays and what dies in between ------------------------------------------------------------------------


def test_an_old_ready_moves_nobody() -> None:
    job = Job().running()
    old = m.WorkerReady(worker="w0-1", left=0)
    assert job(old) == []
    job(m.WorkerFinished(worker="w0-1", generation=1, step=9))
    job.raised("w0-2")
    job.ready("w0-2")
    assert job(old) == []  # it has finished, and was not heard to leave yet
    assert job.ready("w0-1") == ["all out 1"]


def test_who_leaves_by_itself_ends_the_generation() -> None:
    job = Job().running()
    assert job.ready("w0-1") == ["fault collective", "leave a", "leave b", "open store a"]


def test_a_finished_process_that_has_ended_is_replaced_when_it_is_needed_again() -> None:
    for ends_first in (True, False):
        job = Job().running()
        job(m.WorkerFinished(worker="w0-1", generation=1, step=9))
        out = []
        if ends_first:
            out += job.exited("w0-1", "")
        out += job.exited("w0-2")
        if not ends_first:
            out += job.exited("w0-1", "")
        assert [a for a in out if a.startswith(("spawn", "all"))] == (
            ["all out 1"] if ends_first else ["spawn b w0-3 as rank 1 of 2", "all out 1"]
        )
        job.open_store()
        starting = [w.id for w in job.machine.members.workers() if w.state == "starting"]
        assert len(starting) == 2
        assert job.ready(*starting)[-2:] == ["enter a 2", "enter b 2"]


def test_a_finished_rank_that_does_not_come_back_is_killed() -> None:
    job = Job().running()
    job(m.WorkerFinished(worker="w0-1", generation=1, step=9))
    job.raised("w0-2")
    job.ready("w0-2")
    assert job.tick(3.0) == ["kill w0-1"]


def test_the_stores_host_is_lost_before_the_plan() -> None:
    job = Job("abc", min_nodes=2, max_nodes=3).running()
    assert job.raised("w0-2")[-1] == "open store a"
    assert job(m.NodeLeft(node="a", lost=True)) == ["fault node_loss"]
    job.ready("w0-2", "w0-3")
    assert job.tick(1.0) == []
    assert job.tick(20.0) == ["open store b"]
    assert job.open_store()[-2:] == ["enter b 2", "enter c 2"]


def test_an_answer_to_an_earlier_request_is_no_store() -> None:
    job = Job(store_limit_s=5.0)
    first = next(a for a in job.said if isinstance(a, m.OpenStore))
    assert job.tick(6.0) == ["open store b"]
    assert job(m.StoreOpened(serial=first.serial, endpoint="a:1")) == []
    assert len(job.open_store()) == 2


def test_a_worker_in_an_older_generation_is_ended_by_a_new_coordinator() -> None:
    job = again()
    first, second = snapshots("inside", "inside")
    newer = first.plan.model_copy(update={"generation": 5})
    out = job(second, first.model_copy(update={"plan": newer}))
    assert out[0] == "kill w0-2"
    assert "spawn b w1-1 as rank 1 of 2" in out


def test_no_generation_number_comes_twice() -> None:
    job = again()
    first, second = snapshots("ready", "ready")
    newer = first.plan.model_copy(update={"epoch": -1, "generation": 9})
    job(second, first.model_copy(update={"plan": newer}))
    job.open_store()
    job.ready(*[w.id for w in job.machine.members.workers()])
    assert job.machine.generation == 10
