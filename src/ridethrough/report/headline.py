"""What one asks first of a run, in a few sentences: is it well, where did the time go, what did the faults cost.

for kind, sentence in headline(status): print(sentence)      # kind: good, warn, bad or plain
"""

from __future__ import annotations

from ridethrough.ledger.incidents import place
from ridethrough.report.durations import duration
from ridethrough.report.status import Status
from ridethrough.report.terminal import last_line

_SHOWN = 5  # of the states that time was lost in


def headline(now: Status, gpu_hour_price: float | None = None) -> list[tuple[str, str]]:
    """Sentences with how they are meant; `gpu_hour_price` adds what the faults cost in money."""
    said = [_state(now)]
    if now.wall_s:
        said.append(("plain", _time(now)))
    if now.num_incidents:
        kind = "good" if now.num_recovered == now.num_incidents else "bad" if now.state in ("ended", "died") else "warn"
        said.append((kind, _faults(now, gpu_hour_price)))
    if now.recurring_rank is not None:
        said.append(("bad", f"Rank {now.recurring_rank} causes most of the incidents: look at its host."))
    if now.unattributed > 0.005:
        said.append(("warn", f"{now.unattributed:.2%} of the time is unattributed."))
    return said + [("warn", f"Straggler: {straggler.line()}.") for straggler in now.stragglers[:3]]


def _state(now: Status) -> tuple[str, str]:
    step = f"step {now.step:,}" + (f" of {now.total:,}" if now.total else "")
    if now.state == "ended":
        return ("good", f"Done: {step}.") if not now.code else ("bad", f"Ended with code {now.code}: {now.reason}.")
    if now.state == "died":
        return "bad", f"Died after {step}, without a result."
    if now.open_incident is not None:
        i = now.open_incident
        where = f"{i['class']} of rank {i['rank']} in {place(i['phase'], i['step'])}"
        where += f" (injected: {' '.join(i['injected'])})" if i["injected"] else ""
        return "warn", f"Recovering from {where}: {last_line(i['root_cause'])}"
    left = f", {duration(now.eta_s)} left" if now.eta_s is not None else ""
    return ("good", f"Running: {step}{left}.") if now.state == "running" else ("warn", "Starting.")


def _time(now: Status) -> str:
    lost = [f"{share:.1%} {state}" for state, share in list(now.lost.items())[:_SHOWN]]
    others = f" and {len(now.lost) - _SHOWN} smaller ones" if len(now.lost) > _SHOWN else ""
    rest = f"; the rest: {', '.join(lost)}{others}" if lost else ""
    return f"{now.training_goodput:.1%} of {duration(now.wall_s)} went into steps that count{rest}."


def _faults(now: Status, price: float | None) -> str:
    causes = ", ".join(f"{count} {name}" for name, count in now.causes.items())
    count = f"{now.num_incidents} incident{'s' * (now.num_incidents > 1)} ({causes})"
    injected = f", {'all' if now.num_injected == now.num_incidents else now.num_injected} injected"
    text = f"{count}{injected if now.num_injected else ''}; {now.num_recovered} recovered, {now.steps_lost} steps lost."
    if now.recovery_p50_s is not None and now.recovery_max_s is not None:
        text += f" Back to training {duration(now.recovery_p50_s)} after the fault (median),"
        text += f" {duration(now.recovery_max_s)} at most."
        each = now.cost_gpu_h / now.num_recovered
        text += f" A fault cost {each:.3g} GPU hours"
        text += f", {each * price:,.3g} in money ({now.cost_gpu_h * price:,.3g} all together)." if price else "."
    return text
