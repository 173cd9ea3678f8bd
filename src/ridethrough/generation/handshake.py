"""Both ends of a connection prove that they know the job's token, without sending it. Pure: bytes in, bytes out.

    coordinator -> agent    challenge{nonce}
    agent -> coordinator    answer{nonce, mac = HMAC-SHA256(token, "agent" | theirs | ours)}
    coordinator -> agent    proof{mac = HMAC-SHA256(token, "coordinator" | theirs | ours)}

It keeps strangers out; it does not hide or sign what follows. On a network that others can tap or alter, use TLS.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from typing import Any

from ridethrough.generation.messages import PROTOCOL
from ridethrough.version import __version__

TOKEN_VARIABLE = "RIDETHROUGH_TOKEN"
_NONCE_BYTES = 16


class Refused(ConnectionError):
    """The other end is not one of ours; the message says why."""


def read_token(path: Path | None) -> str:
    """The job's token from a file, else from RIDETHROUGH_TOKEN; empty if there is none. Raises ValueError."""
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(f"--token-file {path} cannot be read ({error.strerror}); give the job's token") from error
    if len(token) < 16:
        raise ValueError(
            f"--token-file {path}: a token has at least 16 characters; make one with `openssl rand -hex 32`"
        )
    return token


def new_token() -> str:
    """A token for one job."""
    return secrets.token_hex(32)


def challenge() -> dict[str, Any]:
    """The coordinator's first words."""
    return {
        "t": "challenge",
        "nonce": secrets.token_hex(_NONCE_BYTES),
        "protocol": PROTOCOL,
        "version": __version__,
    }


def answer(token: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The agent's reply. Raises Refused if the coordinator speaks another protocol."""
    _same_protocol(asked, "the coordinator", "this agent")
    ours = secrets.token_hex(_NONCE_BYTES)
    return {
        "t": "answer",
        "nonce": ours,
        "mac": _mac(token, "agent", str(asked.get("nonce")), ours),
        "protocol": PROTOCOL,
        "version": __version__,
    }


def prove(token: str, asked: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's proof, after the agent's is checked. Raises Refused."""
    _same_protocol(answered, "the agent", "this coordinator")
    theirs = str(answered.get("nonce"))
    expected = _mac(token, "agent", str(asked["nonce"]), theirs)
    if not hmac.compare_digest(expected, str(answered.get("mac"))):
        raise Refused("the agent does not know this job's token: give both the same --token-file")
    return {"t": "proof", "mac": _mac(token, "coordinator", theirs, str(asked["nonce"]))}


def check_proof(token: str, asked: dict[str, Any], answered: dict[str, Any], proof: dict[str, Any]) -> None:
    """The agent's check of the coordinator. Raises Refused."""
    if proof.get("t") == "refused":
        raise Refused(str(proof.get("why")))
    expected = _mac(token, "coordinator", str(answered["nonce"]), str(asked["nonce"]))
    if not hmac.compare_digest(expected, str(proof.get("mac"))):
        raise Refused("the coordinator does not know this job's token: is it another job's?")


def _mac(token: str, who: str, theirs: str, ours: str) -> str:
    return hmac.new(token.encode(), f"{who}|{theirs}|{ours}".encode(), "sha256").hexdigest()


def _same_protocol(message: dict[str, Any], them: str, us: str) -> None:
    if message.get("protocol") != PROTOCOL:
        raise Refused(
            f"{them} (version {message.get('version')}) speaks protocol {message.get('protocol')}, {us} "
            f"(version {__version__}) speaks {PROTOCOL}: install one version everywhere"
        )
