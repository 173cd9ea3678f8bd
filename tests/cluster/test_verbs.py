"""submit, status, wait, logs, collect, delete, doctor against a cluster in memory, errors and retries included."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ridethrough.cluster import doctor, pod_logs
from ridethrough.cluster.api import MARK, ApiError
from ridethrough.cluster.collect import collect
from ridethrough.cluster.folder_server import FolderServer
from ridethrough.cluster.reading import parse_spec
from ridethrough.cluster.render import render
from ridethrough.cluster.spec import JobSpec, SpecError
from ridethrough.cluster.status import job_status, wait
from ridethrough.cluster.submit import delete, submit


def make(more: str = "", profile: str = "cpu", backend: str = "jobset") -> JobSpec:
    return parse_spec(f"name: llama\nprofile: {profile}\nbackend: {backend}\n{more}")


def jobset(**status: Any) -> dict[str, Any]:
    return {"kind": "JobSet", "metadata": {"name": "llama", "labels": {}}, "status": status}


def condition(kind: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": "True", **more}


# --- submit ---


@pytest.mark.parametrize("backend", ["jobset", "job"])
def test_submit_makes_what_render_shows_in_its_order(cluster: Any, backend: str) -> None:
    spec = make(backend=backend)
    words = submit(cluster.api(), spec)
    assert cluster.kinds() == [thing["kind"] for thing in render(spec, token="x")]
    assert all(word.endswith(" made") for word in words)
    secret = next(thing for thing in cluster.objects.values() if thing["kind"] == "Secret")
    assert len(secret["stringData"]["token"]) == 64
    marks = {thing["metadata"]["annotations"][MARK] for thing in cluster.objects.values()}
    assert len(marks) == 1


def test_each_submission_has_a_token_of_its_own(cluster: Any) -> None:
    tokens = set()
    for _ in range(2):
        submit(cluster.api(), make())
        tokens.add(cluster.objects[("secrets", "default", "llama-token")]["stringData"]["token"])
        cluster.objects.clear()
    assert len(tokens) == 2


@pytest.mark.parametrize(("status", "kind"), [(403, "forbidden"), (422, "invalid"), (409, "conflict")])
def test_a_half_submitted_job_is_rolled_back(cluster: Any, status: int, kind: str) -> None:
    cluster.fail("POST", "/jobsets", status=status)
    said: list[str] = []
    with pytest.raises(ApiError) as caught:
        submit(cluster.api(), make(), say=said.append)
    assert caught.value.kind == kind
    assert cluster.objects == {}
    assert "ConfigMap/llama-job deleted again" in said


def test_a_submission_that_never_gets_through_leaves_nothing(cluster: Any) -> None:
    cluster.fail("POST", "/jobsets", status=503, times=99)
    with pytest.raises(ApiError) as caught:
        submit(cluster.api(), make())
    assert caught.value.kind == "server"
    assert cluster.objects == {}


def test_a_job_of_that_name_stays_untouched(cluster: Any) -> None:
    api = cluster.api()
    submit(api, make())
    before = dict(cluster.objects)
    with pytest.raises(ApiError) as caught:
        submit(api, make())
    assert caught.value.kind == "conflict"
    assert cluster.objects == before


def test_a_broken_roll_back_says_what_is_left(cluster: Any) -> None:
    cluster.fail("POST", "/jobsets", status=403)
    cluster.fail("DELETE", "/configmaps", status=403)
    said: list[str] = []
    with pytest.raises(ApiError, match="JobSet/llama"):
        submit(cluster.api(), make(), say=said.append)
    assert cluster.kinds() == ["ConfigMap"]
    assert any(line.startswith("ConfigMap/llama-job is left over") for line in said)


def test_an_interrupted_submission_is_rolled_back(cluster: Any) -> None:
    def interrupt(line: str) -> None:
        if line == "Secret/llama-token made":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit(cluster.api(), make(), say=interrupt)
    assert cluster.objects == {}


def test_lost_answers_do_not_stop_it(cluster: Any) -> None:
    cluster.fail("POST", "/secrets", after=True)
    cluster.fail("POST", "/jobsets", after=True)
    submit(cluster.api(), make())
    assert len(cluster.objects) == len(render(make(), token="x"))


def test_a_volume_from_an_earlier_job_is_used_again(cluster: Any) -> None:
    api = cluster.api()
    spec = make("nodes: 2\n", profile="eks-p5")
    submit(api, spec)
    delete(api, "llama", "default")
    assert cluster.kinds() == ["PersistentVolume", "PersistentVolumeClaim"]
    words = submit(api, spec)
    assert "PersistentVolume/default-llama-fsx is there" in words


def test_a_dry_run_asks_and_makes_nothing(cluster: Any) -> None:
    words = submit(cluster.api(), make(), dry_run=True)
    assert cluster.objects == {}
    assert len(words) == len(render(make(), token="x"))
    assert all("would be made" in word for word in words)


@pytest.mark.parametrize("backend", ["trainjob", "hyperpod"])
def test_what_is_only_rendered_is_not_submitted(cluster: Any, backend: str) -> None:
    with pytest.raises(SpecError, match="rendered and validated only"):
        submit(cluster.api(), make(backend=backend))
    assert cluster.requests == []


@pytest.mark.parametrize(("end", "goes_on"), [("Complete", True), ("Failed", False)])
def test_gpus_are_asked_for_when_the_data_is_there(cluster: Any, end: str, goes_on: bool) -> None:
    spec = make("data: {args: [--out, /shared/data]}\n")

    def finish(line: str) -> None:
        if line == "waiting for the data: Job/llama-data":
            assert "JobSet" not in cluster.kinds()
            data = cluster.objects[("jobs", "default", "llama-data")]
            data["status"] = {"conditions": [condition(end, message="no space")]}

    if goes_on:
        submit(cluster.api(), spec, say=finish)
        assert "JobSet" in cluster.kinds()
    else:
        with pytest.raises(ApiError, match="the data preparation failed"):
            submit(cluster.api(), spec, say=finish)
        assert cluster.objects == {}


# --- status ---


@pytest.mark.parametrize(
    ("conditions", "phase"),
    [
        ([condition("Completed")], "succeeded"),
        ([condition("Failed", reason="FailedJobs", message="fatal")], "failed"),
        ([condition("Suspended")], "queued"),
        ([{"type": "Failed", "status": "False"}], "starting"),
    ],
)
def test_the_phase_of_a_jobset(cluster: Any, conditions: list[dict[str, str]], phase: str) -> None:
    cluster.put("jobsets", jobset(conditions=conditions, restarts=2))
    status = job_status(cluster.api(), "llama", "default")
    assert (status.phase, status.backend, status.restarts) == (phase, "jobset", 2)


def test_no_job_is_missing(cluster: Any) -> None:
    assert job_status(cluster.api(), "llama", "default").phase == "missing"


def test_pods_say_what_their_exit_codes_mean(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    cluster.pod("llama-trainer-0-1-b", "trainer", index=1, node="n2")
    cluster.pod("llama-trainer-0-0-a", "trainer", "Failed", index=0, exit_code=83)
    cluster.pod("llama-trainer-0-2-c", "trainer", "Failed", index=2, exit_code=137, reason="OOMKilled")
    cluster.pod("llama-trainer-0-3-d", "trainer", "Failed", index=3, exit_code=143, disrupted="EvictionByEvictionAPI")
    cluster.pod("llama-coordinator-0-0-e", "coordinator", "Pending", index=0, reason="ImagePullBackOff")
    status = job_status(cluster.api(), "llama", "default")
    assert [(pod.name[-1], pod.ended, pod.reason) for pod in status.pods] == [
        ("e", "", "ImagePullBackOff"),
        ("a", "fatal by policy: do not retry", "Error"),
        ("b", "", ""),
        ("c", "killed for memory", "OOMKilled"),
        ("d", "ended by SIGTERM", "EvictionByEvictionAPI"),
    ]
    assert status.phase == "running"
    assert set(status.as_json()) >= {"name", "phase", "pods", "warnings", "restarts"}


def test_warnings_are_shown_and_their_absence_is_no_error(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    for number, about in enumerate(("llama-trainer-0-0", "other")):
        event = {
            "metadata": {"name": f"e{number}"},
            "type": "Warning",
            "reason": "FailedScheduling",
            "message": "0/3 nodes",
            "involvedObject": {"kind": "Pod", "name": about},
            "lastTimestamp": f"{number}",
        }
        cluster.put("events", event)
    api = cluster.api()
    assert job_status(api, "llama", "default").warnings == ["Pod/llama-trainer-0-0: FailedScheduling: 0/3 nodes"]
    cluster.fail("GET", "/events", status=403)
    assert job_status(api, "llama", "default").warnings == []


def test_wait_follows_a_job_to_its_end_through_a_stumbling_server(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    cluster.fail("GET", "/pods", status=500, times=2)
    phases: list[str] = []

    def seen(status: Any) -> None:
        phases.append(status.phase)
        if status.phase == "starting":
            cluster.pod("llama-trainer-0-0-a", "trainer", index=0)
        elif status.phase == "running":
            cluster.pod("llama-trainer-0-0-a", "trainer", "Failed", index=0, exit_code=81)
            cluster.put("jobsets", jobset(conditions=[condition("Failed")]))

    ended = wait(cluster.api(), "llama", "default", timeout_s=20, seen=seen)
    assert phases == ["starting", "running", "failed"]
    assert ended.exit_code == 81


def test_wait_ends_when_the_job_is_deleted(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    ended = wait(cluster.api(), "llama", "default", timeout_s=20, seen=lambda status: cluster.objects.clear())
    assert ended.phase == "missing"


def test_wait_has_a_limit(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    with pytest.raises(ApiError, match=r"job llama is starting after 0\.05 s; it goes on"):
        wait(cluster.api(), "llama", "default", timeout_s=0.05, seen=lambda status: None)


# --- logs ---


def test_logs_of_one_rank_wherever_it_runs(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    cluster.pod("p0", "trainer", index=0)
    cluster.pod("p1", "trainer", index=1)
    cluster.pod("c", "coordinator", index=0)
    cluster.logs = {
        "p0": ["[rank0] a", "[rank1] b", "[rank10] c"],
        "p1": ["[rank2] d", "[rank1] e"],
        "c": ["[rank1] no"],
    }
    found = list(pod_logs.stream(cluster.api(), "llama", "default", follow=False, rank=1))
    assert sorted(found) == [("p0", "[rank1] b"), ("p1", "[rank1] e")]


def test_following_ends_with_the_job_and_takes_new_pods_in(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    cluster.pod("p0", "trainer", index=0)
    cluster.logs = {"p0": ["one"], "p1": ["two"]}
    found = []
    for pod, line in pod_logs.stream(cluster.api(), "llama", "default", follow=True):
        found.append((pod, line))
        if pod == "p0":
            cluster.pod("p1", "trainer", index=1)
        else:
            cluster.put("jobsets", jobset(conditions=[condition("Completed")]))
    assert found == [("p0", "one"), ("p1", "two")]


def test_logs_that_may_not_be_read(cluster: Any) -> None:
    cluster.put("jobsets", jobset())
    cluster.pod("p0", "trainer", index=0)
    cluster.fail("GET", "/log", status=403)
    with pytest.raises(ApiError) as caught:
        list(pod_logs.stream(cluster.api(), "llama", "default", follow=False))
    assert caught.value.kind == "forbidden"


def test_logs_of_no_job(cluster: Any) -> None:
    with pytest.raises(ApiError, match="no job llama in namespace default"):
        list(pod_logs.stream(cluster.api(), "llama", "default", follow=False))


# --- collect ---


@pytest.fixture
def volume(cluster: Any, tmp_path: Path) -> Any:
    folder = tmp_path / "volume"
    (folder / "events").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "events" / "a.jsonl").write_bytes(b"x" * 300_000)
    (folder / "checkpoints" / "big").write_text("weights")
    (folder / "link").symlink_to("/etc/passwd")
    server = FolderServer(folder, "?", host="127.0.0.1", port=0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    cluster.proxied = ("127.0.0.1", server.server_address[1])
    create = cluster.__class__.put

    def word_of_the_pod() -> None:
        for thing in list(cluster.objects.values()):
            if thing["kind"] == "Pod":
                server.word = thing["spec"]["containers"][0]["env"][0]["value"]

    cluster.learn = word_of_the_pod
    yield folder, server
    server.shutdown()
    server.server_close()
    assert create is not None


def fetch(cluster: Any, out: Path, **options: Any) -> Any:
    api = cluster.api(timeout_s=5)
    make_pod = api.create

    def create(thing: dict[str, Any], **more: Any) -> Any:
        made = make_pod(thing, **more)
        cluster.learn()
        return made

    api.create = create
    return collect(api, make(), out, **options)


def test_collect_brings_the_run_without_its_checkpoints(cluster: Any, volume: Any, tmp_path: Path) -> None:
    got = fetch(cluster, tmp_path / "out")
    assert sorted(p.relative_to(got.folder).as_posix() for p in got.folder.rglob("*") if p.is_file()) == [
        "events/a.jsonl",
        "run.json",
    ]
    assert (got.num_files, got.num_bytes, got.num_there) == (2, 300_002, 0)
    assert cluster.objects == {}, "the collector's pod is gone"
    again = fetch(cluster, tmp_path / "out", checkpoints=True)
    assert (again.num_files, again.num_bytes, again.num_there) == (3, 7, 2)


def test_collect_goes_on_where_it_was_cut_off(cluster: Any, volume: Any, tmp_path: Path) -> None:
    cluster.cut_after = 100_000
    got = fetch(cluster, tmp_path / "out")
    assert (got.folder / "events" / "a.jsonl").read_bytes() == b"x" * 300_000
    assert list(got.folder.rglob("*.part")) == []


def test_collect_takes_its_pod_away_when_it_fails(cluster: Any, volume: Any, tmp_path: Path) -> None:
    cluster.fail("GET", "/proxy/", status=403)
    with pytest.raises(ApiError) as caught:
        fetch(cluster, tmp_path / "out")
    assert caught.value.kind == "forbidden"
    assert cluster.objects == {}


def test_a_collector_that_never_gets_ready(cluster: Any, volume: Any, tmp_path: Path) -> None:
    cluster.ready_after_gets = 10_000
    with pytest.raises(ApiError, match=r"is not ready after 0\.1 s"):
        fetch(cluster, tmp_path / "out", start_timeout_s=0.1)
    assert cluster.objects == {}


def test_no_path_leads_out_of_the_folder(cluster: Any, volume: Any, tmp_path: Path) -> None:
    from ridethrough.cluster.collect import _inside

    with pytest.raises(ApiError, match="leads out of"):
        _inside(tmp_path, "../evil")


# --- delete ---


def test_delete_takes_the_job_first_and_leaves_the_results(cluster: Any) -> None:
    api = cluster.api()
    submit(api, make())
    pod = cluster.pod("llama-trainer-0-0-a", "trainer", index=0)
    pod["owner"] = "llama"
    deleted = delete(api, "llama", "default")
    assert deleted[0] == "JobSet/llama"
    assert cluster.kinds() == ["PersistentVolumeClaim"]
    assert delete(api, "llama", "default", with_claim=True) == ["PersistentVolumeClaim/llama-shared"]
    assert delete(api, "llama", "default") == []


def test_delete_says_which_pods_do_not_end(cluster: Any) -> None:
    api = cluster.api()
    submit(api, make())
    cluster.pod("llama-trainer-0-0-a", "trainer", index=0)  # on a node that is gone
    with pytest.raises(ApiError, match="pods do not end: llama-trainer-0-0-a; is their node gone"):
        delete(api, "llama", "default", timeout_s=0.1)
    assert "Secret" in cluster.kinds(), "what the pods use stays while they are there"


def test_kinds_that_we_may_not_list_are_left_alone(cluster: Any) -> None:
    api = cluster.api()
    submit(api, make())
    cluster.fail("GET", "/podmonitors", status=403)
    said: list[str] = []
    delete(api, "llama", "default", say=said.append)
    assert "PodMonitor: may not be listed; left alone" in said
    assert cluster.kinds() == ["PersistentVolumeClaim"]


# --- doctor ---


def node(name: str, **allocatable: str) -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"node.kubernetes.io/instance-type": "p5.48xlarge"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": allocatable},
    }


def furnish(cluster: Any, num_nodes: int = 3) -> None:
    devices = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5Gi"}
    for number in range(num_nodes):
        cluster.put("nodes", node(f"n{number}", **devices), namespace="")
    cluster.put("csidrivers", {"metadata": {"name": "fsx.csi.aws.com"}}, namespace="")
    cluster.groups = {"/apis/jobset.x-k8s.io/v1alpha2": ["JobSet"]}


def findings(cluster: Any, spec: JobSpec | None) -> dict[str, doctor.Finding]:
    found = doctor.examine(cluster.api(), "default", spec)
    return {f.detail if f.item == "right" else f.item: f for f in found}


def test_a_cluster_that_offers_what_the_job_needs(cluster: Any) -> None:
    furnish(cluster)
    found = doctor.examine(cluster.api(), "default", make(profile="eks-p5"))
    assert [f for f in found if f.needed and f.verdict != "PASS"] == []
    assert doctor.ok(found)


@pytest.mark.parametrize(
    ("change", "item", "words"),
    [
        (lambda c: setattr(c, "version", ("1", "28")), "version", "Kubernetes 1.28; Jobs as rendered need 1.30"),
        (lambda c: c.groups.clear(), "kind JobSet", "not there: install JobSet"),
        (
            lambda c: c.objects.pop(("nodes", "", "n0")),
            "GPUs",
            "2 nodes with 8 or more of nvidia.com/gpu; 3 are needed",
        ),
        (lambda c: c.objects.pop(("csidrivers", "", "fsx.csi.aws.com")), "volume driver", "aws-fsx-csi-driver"),
        (lambda c: c.denied.add(("jobsets", "create")), "create jobsets.jobset.x-k8s.io: not allowed", "not allowed"),
        (
            lambda c: c.put(
                "resourcequotas",
                {
                    "metadata": {"name": "q"},
                    "status": {"hard": {"requests.nvidia.com/gpu": "16"}, "used": {"requests.nvidia.com/gpu": "8"}},
                },
            ),
            "quota",
            "q: requests.nvidia.com/gpu: 8 of 16 left, 24 are needed",
        ),
    ],
)
def test_what_is_missing_is_named(cluster: Any, change: Any, item: str, words: str) -> None:
    furnish(cluster)
    change(cluster)
    spec = make(profile="eks-p5")
    finding = findings(cluster, spec)[item]
    assert finding.verdict == "FAIL" and finding.needed and words in finding.detail
    assert not doctor.ok(doctor.examine(cluster.api(), "default", spec))


def test_what_we_may_not_see_is_unavailable_not_failed(cluster: Any) -> None:
    furnish(cluster)
    cluster.fail("GET", "/nodes", status=403)
    found = findings(cluster, make(profile="eks-p5"))
    assert found["nodes"].verdict == "UNAVAILABLE"
    cluster.fail("GET", "/nodes", status=403)
    assert doctor.ok(doctor.examine(cluster.api(), "default", make(profile="eks-p5")))
