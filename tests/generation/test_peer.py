"""Only processes of our own user are heard on a Unix socket."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

import pytest

from ridethrough.generation.peer import is_ours, peer_credentials


def accepted(user: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The connection of another process, which has become this user before."""
    name = f"\0ridethrough-{secrets.token_hex(8)}"
    code = f"import os, socket; os.setuid({user}); s = socket.socket(socket.AF_UNIX); s.connect({name!r}); s.recv(1)"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        server.settimeout(30)
        process = subprocess.Popen([sys.executable, "-c", code])
        connection, _ = server.accept()
    return connection, process


def test_a_process_of_ours() -> None:
    connection, process = accepted(os.getuid())
    with connection:
        assert peer_credentials(connection) == (process.pid, os.getuid())
        assert is_ours(connection)
    assert process.wait(30) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_somebody_else() -> None:
    connection, process = accepted(65534)
    with connection:
        assert peer_credentials(connection) == (process.pid, 65534)
        assert not is_ours(connection)
    process.wait(30)
