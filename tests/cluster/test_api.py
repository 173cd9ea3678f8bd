"""Requests against a real HTTP server: each refusal has its own error, each retry is bounded."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from kubernetes import client

from ridethrough.cluster.api import MARK, Address, Api, ApiError, address

CONFIG_MAPS = Address("v1", "ConfigMap", "default")


def thing(name: str = "a", mark: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": "default"}
    if mark:
        metadata["annotations"] = {MARK: mark}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}


@pytest.mark.parametrize(
    ("api_version", "kind", "path"),
    [
        ("v1", "Pod", "/api/v1/namespaces/ns/pods/x"),
        ("v1", "PersistentVolume", "/api/v1/persistentvolumes/x"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ns/jobsets/x"),
        ("networking.k8s.io/v1", "NetworkPolicy", "/apis/networking.k8s.io/v1/namespaces/ns/networkpolicies/x"),
        ("scheduling.k8s.io/v1", "PriorityClass", "/apis/scheduling.k8s.io/v1/priorityclasses/x"),
    ],
)
def test_where_objects_live(api_version: str, kind: str, path: str) -> None:
    assert Address(api_version, kind, "ns").path("x") == path


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, "unauthorized", "log in anew"),
        (403, "forbidden", "`ridethrough k8s doctor` lists the rights"),
        (404, "not_found", "not there"),
        (409, "conflict", "is there already"),
        (410, "gone", "too old"),
        (422, "invalid", "not accepted"),
    ],
)
def test_a_refusal_is_told_at_once_and_by_its_name(cluster: Any, status: int, kind: str, words: str) -> None:
    cluster.fail("GET", "configmaps", status=status, times=9)
    with pytest.raises(ApiError, match=words) as caught:
        cluster.api().get(CONFIG_MAPS, "a")
    assert caught.value.kind == kind
    assert len(cluster.requests) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_asked_again(cluster: Any, status: int) -> None:
    cluster.put("configmaps", thing())
    cluster.fail("GET", "configmaps", status=status, times=4, headers={"Retry-After": "0"})
    assert cluster.api().get(CONFIG_MAPS, "a")["kind"] == "ConfigMap"
    assert len(cluster.requests) == 5


def test_but_not_for_ever(cluster: Any) -> None:
    cluster.fail("GET", "configmaps", status=503, times=99)
    with pytest.raises(ApiError, match="answers 503") as caught:
        cluster.api().get(CONFIG_MAPS, "a")
    assert caught.value.kind == "server"
    assert len(cluster.requests) == 5


def test_a_silent_server_is_a_time_out(cluster: Any) -> None:
    cluster.fail("GET", "configmaps", silent=True, times=99)
    with pytest.raises(ApiError, match=r"no answer within 0\.1 s") as caught:
        cluster.api(timeout_s=0.1).get(CONFIG_MAPS, "a")
    assert caught.value.kind == "timeout"
    assert len(cluster.requests) == 5


def test_a_time_out_that_passes_is_not_told(cluster: Any) -> None:
    cluster.put("configmaps", thing())
    cluster.fail("GET", "configmaps", silent=True)
    assert cluster.api(timeout_s=0.1).get(CONFIG_MAPS, "a")["kind"] == "ConfigMap"


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{taken.getsockname()[1]}"
        api = Api(client.ApiClient(configuration), sleep=lambda s: None)
        with pytest.raises(ApiError, match="cannot be reached") as caught:
            api.get(CONFIG_MAPS, "a")
    assert caught.value.kind == "unreachable"


def test_the_user_s_credentials_are_sent(cluster: Any) -> None:
    api = cluster.api()
    api._configuration.api_key = {}
    with pytest.raises(ApiError) as caught:
        api.get(CONFIG_MAPS, "a")
    assert caught.value.kind == "unauthorized"


def test_long_lists_come_in_pages(cluster: Any) -> None:
    cluster.page = 2
    for number in range(5):
        cluster.put("configmaps", thing(f"c{number}"))
    assert [c["metadata"]["name"] for c in cluster.api().list(CONFIG_MAPS)] == ["c0", "c1", "c2", "c3", "c4"]
    assert len(cluster.requests) == 3


def test_a_list_that_expires_begins_anew(cluster: Any) -> None:
    cluster.page = 2
    for number in range(3):
        cluster.put("configmaps", thing(f"c{number}"))
    api = cluster.api()
    cluster.fail("GET", "configmaps", status=410)
    assert len(api.list(CONFIG_MAPS)) == 3
    cluster.fail("GET", "configmaps", status=410, times=99)
    with pytest.raises(ApiError, match="changes faster") as caught:
        api.list(CONFIG_MAPS)
    assert caught.value.kind == "gone"


def test_a_lost_answer_does_not_make_an_object_twice(cluster: Any) -> None:
    cluster.fail("POST", "configmaps", after=True)
    made = cluster.api().create(thing(mark="mine"))
    assert made["metadata"]["annotations"] == {MARK: "mine"}
    assert cluster.requests == [
        "POST /api/v1/namespaces/default/configmaps",
        "POST /api/v1/namespaces/default/configmaps",
        "GET /api/v1/namespaces/default/configmaps/a",
    ]


def test_somebody_else_s_object_is_a_conflict_even_then(cluster: Any) -> None:
    cluster.put("configmaps", thing(mark="theirs"))
    cluster.fail("POST", "configmaps", silent=True)
    with pytest.raises(ApiError) as caught:
        cluster.api(timeout_s=0.1).create(thing(mark="mine"))
    assert caught.value.kind == "conflict"


def test_a_kind_that_the_cluster_does_not_know(cluster: Any) -> None:
    cluster.fail("POST", "jobsets", status=404)
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"}}
    with pytest.raises(ApiError, match="JobSet/a: the cluster has no such kind or namespace"):
        cluster.api().create(jobset)


def test_deleting_what_is_gone_is_no_error(cluster: Any) -> None:
    api = cluster.api()
    cluster.put("configmaps", thing())
    assert api.delete(address(thing()), "a") is True
    assert api.delete(address(thing()), "a") is False
