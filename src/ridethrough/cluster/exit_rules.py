"""What an orchestrator does with each exit status of the launcher: derived from the one table of exit codes.

A pod that was disrupted (preempted, drained, evicted, its node lost) or that says "preempted, state saved" never counts
against the program; a code whose advice is "do not retry" ends the job at once; everything else counts.
"""

from __future__ import annotations

from typing import Any

from ridethrough.generation.exit_codes import EXIT_CODES, ExitCode

FATAL_CODES = tuple(sorted(int(row.code) for row in EXIT_CODES if row.retry == "no"))
"""Ending the job at once: another attempt would end the same way."""

UNCOUNTED_CODES = (int(ExitCode.PREEMPTED),)
"""Replaced without using up the program's retries."""


def pod_failure_policy(container: str) -> dict[str, Any]:
    """`spec.podFailurePolicy` of a Job whose main container is `container`.

    Order matters, the first rule that matches wins: a disrupted pod may have ended with any code. Kubernetes allows
    this policy only with `restartPolicy: Never`.
    """
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": container, "operator": "In", "values": list(FATAL_CODES)},
            },
            {
                "action": "Ignore",
                "onExitCodes": {"containerName": container, "operator": "In", "values": list(UNCOUNTED_CODES)},
            },
        ]
    }


def jobset_failure_policy(job_restarts: int) -> dict[str, Any]:
    """`spec.failurePolicy` of the JobSet: what a failed child Job means.

    Reason PodFailurePolicy is set by the rule FailJob alone, so it means a fatal code. Disruptions never fail a Job
    (`pod_failure_policy` ignores them), so they cannot use up `maxRestarts`. What is left, too many failed pods
    (BackoffLimitExceeded), starts the whole set again, `job_restarts` times in all.
    """
    return {
        "maxRestarts": job_restarts,
        "rules": [
            {"name": "fatal", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            {"name": "too_many_failures", "action": "RestartJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]},
        ],
    }
