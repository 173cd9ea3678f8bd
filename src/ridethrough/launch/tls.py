"""TLS between agents and coordinator, with certificates on both sides.

The CA is the job's own: whoever holds a certificate of it may be an agent or the coordinator. So names in certificates
are not compared with host names, which change with every pod; one certificate may serve all machines. The token is
asked for all the same.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class TlsFiles(BaseModel):
    """PEM files: this machine's certificate, its key, and the CA of everybody's."""

    model_config = ConfigDict(extra="forbid")

    cert: Path
    key: Path
    ca: Path

    def server(self) -> ssl.SSLContext:
        """For the coordinator. Raises OSError (also for what is no certificate)."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """For an agent. Raises OSError (also for what is no certificate)."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.cert, self.key)
        context.load_verify_locations(self.ca)
        return context


def read_tls(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """None if no file is given. Raises ValueError if some are missing or of no use."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ValueError("TLS needs --tls-cert, --tls-key and --tls-ca: give all three, or none")
    files = TlsFiles(cert=cert, key=key, ca=ca)
    try:
        files.client()
    except OSError as error:
        raise ValueError(f"--tls-cert {cert}, --tls-key {key}, --tls-ca {ca}: {error}; give PEM files") from error
    return files


def is_refusal(error: BaseException) -> bool:
    """The other end's certificate, or ours for the other end, is not of the job's CA: another try will not help."""
    broken_off = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    return isinstance(error, ssl.SSLError) and not isinstance(error, broken_off)
