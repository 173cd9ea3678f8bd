"""Whether this launch hosts the coordinator at the endpoint or joins the one that is there."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
from typing import Literal

from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.wire import WireError
from ridethrough.launch import ports
from ridethrough.launch.channel import Channel
from ridethrough.launch.tls import TlsFiles

_PORT_WAIT_S = 8.0
_PAUSE_S = 0.25
_PROBE_S = 2.0
_BACKLOG = 1024


class EndpointError(Exception):
    """The endpoint cannot be used; the message is one line with its name. `code`: the launch's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


async def settle(
    host: str, port: int, *, must_host: bool, limit_s: float, tls: TlsFiles | None
) -> socket.socket | None:
    """Waits until the name resolves (at most `limit_s`); a port that something else holds is waited for a little.

    The caller hosts if the name is this machine's and the port was free: it gets the socket, which listens already, so
    that of two launches at the same moment one hosts. None: join the coordinator there. Raises EndpointError.
    """
    began_s = time.monotonic()
    held_since_s: float | None = None
    told = False
    while True:
        try:
            addresses = await _resolve(host, port)
        except OSError as error:
            if not told:
                print(f"ridethrough: {host} is not resolvable ({_reason(error)}); trying again", file=sys.stderr)
                told = True
            if time.monotonic() - began_s > limit_s:
                raise EndpointError(
                    f"{host} is not resolvable after {limit_s:.0f} s: {_reason(error)}", ExitCode.RESTARTS_EXHAUSTED
                ) from error
            await asyncio.sleep(_PAUSE_S)
            continue
        answer = _listen(addresses)
        if isinstance(answer, socket.socket):
            return answer
        if answer == "elsewhere" and not must_host:
            return None
        if answer == "elsewhere":
            raise EndpointError(f"is_host: {host} is no address of this machine", ExitCode.USAGE)
        if not must_host and await _coordinator_answers(host, port, tls):
            return None
        held_since_s = held_since_s or time.monotonic()
        if time.monotonic() - held_since_s > _PORT_WAIT_S:
            raise EndpointError(f"port {port} of {host} is in use by {ports.holder(port)}", ExitCode.USAGE)
        await asyncio.sleep(_PAUSE_S)


async def _resolve(host: str, port: int) -> list[tuple[int, str, int]]:
    """(family, address, port), resolved anew each time: behind a name may be another machine than before."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(int(family), str(where[0]), int(where[1])) for family, _, _, _, where in found]


def _listen(addresses: list[tuple[int, str, int]]) -> socket.socket | Literal["in use", "elsewhere"]:
    for family, address, port in addresses:
        try:
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no such family here
            continue
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
            listening.listen(_BACKLOG)  # two may bind as long as none listens
            return listening
        except OSError as error:
            listening.close()
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return "in use"
    return "elsewhere"


async def _coordinator_answers(host: str, port: int, tls: TlsFiles | None) -> bool:
    context = tls.client() if tls is not None else None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=context), _PROBE_S)
    except (OSError, asyncio.TimeoutError):
        return False
    channel = Channel(reader, writer)
    try:
        asked = await asyncio.wait_for(channel.introduce(), _PROBE_S)
        channel.send({"t": "bye"})
        return asked.get("t") == "challenge"
    except (OSError, WireError, LookupError, ValueError, asyncio.TimeoutError):
        return False
    finally:
        await channel.close()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
