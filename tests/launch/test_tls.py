"""TLS between agents and coordinator: with a certificate of the job's CA, and with others."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch_job import SCRIPTS, expected, free_port, wait_until

from ridethrough.launch.tls import read_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")


def make_ca(folder: Path, name: str) -> Path:
    """A CA with one certificate: NAME-ca.pem, NAME.pem, NAME.key."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *curve, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem", "-subj", f"/CN={name} CA")
    openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    ca = ["-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-days", "2"]
    openssl("x509", "-req", "-in", f"{name}.csr", *ca, "-out", f"{name}.pem")
    return folder / name


def options(files: Path) -> list[str]:
    return ["--tls-cert", f"{files}.pem", "--tls-key", f"{files}.key", "--tls-ca", f"{files}-ca.pem"]


@pytest.mark.ranks
def test_a_job_with_certificates_and_those_who_have_none_of_its_ca(job: Any) -> None:
    ours, others = make_ca(job.folder, "job"), make_ca(job.folder, "other")
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    shared = ["--nnodes", "2", "--nproc-per-node", "1", "--token-file", str(job.token), "--runs", "runs"]
    shared += ["--run-id", "a"]

    def agent(name: str, *tls: str) -> Any:
        script = [str(SCRIPTS / "count.py"), str(job.out), "40"]
        return job.start("run", *shared, "--rdzv-endpoint", endpoint, "--join", *tls, *script, name=name)

    coordinator = job.start("coordinator", "--bind", endpoint, *shared, *options(ours), name="coordinator")
    wait_until(lambda: "listening" in job.text("coordinator"), job.text)
    assert job.wait(agent("stranger", *options(others))) == 2, job.text()
    assert "--tls-ca" in job.text("stranger")
    with pytest.raises((ConnectionError, ssl.SSLError)):
        _speak_without_certificate(port)
    agents = [agent(name, *options(ours)) for name in "ab"]
    assert [job.wait(p) for p in (coordinator, *agents)] == [0, 0, 0], job.text()
    assert job.results() == [expected(40, 2)] * 2


def _speak_without_certificate(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as sock:
        if not sock.recv(1):
            raise ConnectionError("closed without a word")


def test_some_of_the_files_are_not_enough(tmp_path: Path) -> None:
    files = make_ca(tmp_path, "job")
    assert read_tls(None, None, None) is None
    with pytest.raises(ValueError, match="all three"):
        read_tls(Path(f"{files}.pem"), None, None)
    with pytest.raises(ValueError, match="PEM"):
        read_tls(Path(f"{files}.pem"), Path(f"{files}-ca.key"), Path(f"{files}-ca.pem"))
