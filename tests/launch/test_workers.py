"""What a worker's last words say."""

from __future__ import annotations

from ridethrough.launch.workers import last_error


def test_the_last_traceback_counts_also_behind_torchs_prefix() -> None:
    tail = [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "KeyError: 'first'",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "train.py", line 8, in <module>',
        "[rank1]:     raise ValueError('lr=-1')",
        "[rank1]: ValueError: lr=-1",
        "said later",
    ]
    assert last_error(tail) == "ValueError: lr=-1 (train.py:8)"
    assert last_error(["no traceback"]) == ""
