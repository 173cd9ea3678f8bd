"""Sends an alert to a web address as JSON: a few tries, each with a limit, and a line when it is given up."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request

from ridethrough.report.alerts import Alert

_TRIES = 3
_TIMEOUT_S = 10.0
_WAIT_S = 1.0


class WebhookError(ValueError):
    """The address can't be used, or did not take the alert; the message never holds more of it than the host."""


def check_url(url: str) -> None:
    """Raises WebhookError unless it is an http(s) address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise WebhookError("--webhook: give an address that begins with http:// or https://")


def send(url: str, alert: Alert, *, wait_s: float = _WAIT_S) -> None:
    """POST the alert. `text` is what Slack and Mattermost show; the rest is for programs. Raises WebhookError after
    three tries."""
    check_url(url)
    body = json.dumps({**alert.as_json(), "text": f"[{alert.severity}] {alert.run_id}: {alert.text}"}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    host, trouble = urllib.parse.urlsplit(url).hostname, ""
    for attempt in range(_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                return
        except urllib.error.HTTPError as error:
            trouble = f"answered {error.code}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError) as error:
            trouble = str(getattr(error, "reason", None) or error)
        if attempt + 1 < _TRIES:
            time.sleep(wait_s * 2**attempt)
    raise WebhookError(f"the webhook at {host} {trouble}: an alert of kind {alert.kind} was not delivered")
