"""Small inline SVG: the timeline of every rank, step time and loss with rollbacks, recovery by stage.

Colours come from classes that the page's style sheet defines for light and dark. Nothing refers to another file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from ridethrough.ledger.history import History
from ridethrough.ledger.incidents import Incident
from ridethrough.ledger.partition import Partition
from ridethrough.ledger.schema import STAGES
from ridethrough.ledger.steps import Floats, Ints
from ridethrough.ledger.summary import RunLedger
from ridethrough.report.figures import save_times, thinned

WIDTH = 1000
_POINTS = 1200  # of a curve
MAX_LANES = 128
_MOST_BARS = 60
_PIECES = 12_000  # of all lanes together
_MARKS = 300


def timeline(part: Partition, incidents: Sequence[Incident]) -> str:
    """One lane per rank, coloured by state, with a mark at each incident. The first `MAX_LANES` ranks."""
    lanes = part.pictures[:MAX_LANES]
    left, top, height = 60, 24, 22 if len(lanes) <= 16 else 9
    bottom = top + len(lanes) * (height + 3)
    scale = (WIDTH - left - 14) / max(1, part.wall_ns)

    def x(t_ns: float) -> float:
        return left + (t_ns - part.start_ns) * scale

    out = []
    columns = max(100, _PIECES // max(1, len(lanes)))
    for slot, lane in enumerate(lane.sampled(part.start_ns, columns) for lane in lanes):
        y = top + slot * (height + 3)
        out.append(
            f'<text class="axis" x="{left - 6}" y="{y + height * 0.75:.0f}" text-anchor="end">rank {slot}</text>'
        )
        for state, t0, t1 in lane.pieces(part.start_ns):
            width = max(x(t1) - x(t0), 0.3)
            tip = f"rank {slot}: {state} {(t1 - t0) / 1e9:.3f} s from {(t0 - part.start_ns) / 1e9:.3f} s"
            out.append(
                f'<rect class="s-{state}" x="{x(t0):.2f}" y="{y}" width="{width:.2f}" height="{height}">'
                f"<title>{tip}</title></rect>"
            )
    for number, incident in _marked(incidents):
        at = x(incident.fault_ns)
        tip = escape(f"incident {incident.id}: {incident.class_} of rank {incident.rank} at step {incident.step}")
        out.append(
            f'<g class="mark"><title>{tip}</title><line x1="{at:.2f}" x2="{at:.2f}" y1="{top - 6}" y2="{bottom}"/>'
            f'<text x="{at:.2f}" y="{top - 9}" text-anchor="middle">{number}</text></g>'
        )
    out += _axis_x(left, WIDTH - 14, bottom + 4, 0, part.wall_ns / 1e9, " s")
    return _svg(bottom + 26, "Timeline of every rank by state", out)


def _marked(incidents: Sequence[Incident]) -> list[tuple[int, Incident]]:
    """Incidents with their numbers; of too many to draw the slowest."""
    numbered = list(enumerate(incidents, 1))
    if len(numbered) <= _MARKS:
        return numbered
    return sorted(sorted(numbered, key=lambda n: -sum(n[1].stages_s.values()))[:_MARKS], key=lambda n: n[0])


def step_curves(past: History, incidents: Sequence[Incident]) -> str:
    """Step time and loss over steps, one line per generation; an arrow back where a recovery rolled back to."""
    rank = min((rank for generation in past.generations for rank in generation.steps), default=None)
    if rank is None:
        return "<p>No step was finished.</p>"
    runs = [generation.steps[rank] for generation in past.generations if rank in generation.steps]
    parts = [
        _curve("Step time (s)", [(r.step, (r.t1_ns - r.t0_ns) / 1e9) for r in runs], incidents, zero=True),
        _curve("Loss", [(r.step, v) for r in runs if (v := r.metric("loss")) is not None], incidents, zero=False),
    ]
    return f"<p>Rank {rank}.</p>" + "".join(parts)


def _curve(
    title: str,
    runs: Sequence[tuple[Ints, Floats]],
    incidents: Sequence[Incident],
    zero: bool,
) -> str:
    finite = [(steps[some], found[some]) for steps, found in runs if (some := np.isfinite(found)).any()]
    if not finite:
        return ""
    longest = max(sum(len(steps) for steps, _ in finite) // _POINTS, 1)
    series = [_thinned(*points, longest) for points in finite]
    values = [v for points in series for _, v in points]
    left, top, right, bottom = 60, 40, WIDTH - 14, 200
    low, high = (0.0 if zero else min(values)), max(values)
    high = high if high > low else low + 1.0
    last = max(s for points in series for s, _ in points)

    def x(step: float) -> float:
        return left + (right - left) * step / max(1, last)

    def y(v: float) -> float:
        return bottom - (bottom - top) * (v - low) / (high - low)

    out = [f'<text class="head" x="{left}" y="13">{escape(title)}</text>']
    for place, points in enumerate(series):
        kept = next((s[0][0] - 1 for s in series[place + 1 :] if s), None)
        lost = [p for p in points if kept is not None and p[0] > kept]
        good = [p for p in points if kept is None or p[0] <= kept]
        for name, line in (("curve", good), ("curve lost", [*good[-1:], *lost] if lost else [])):
            if line:
                path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in line)
                out.append(f'<polyline class="{name}" points="{path}"/>')
    for number, i in _marked(incidents):
        if i.resumed_at is None or i.steps_lost is None:
            continue
        back, at = x(i.resumed_at), x(i.resumed_at + i.steps_lost)
        tip = escape(f"incident {i.id}: {i.steps_lost} steps lost, resumed at step {i.resumed_at}")
        out.append(
            f'<g class="mark"><title>{tip}</title><line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>'
            f'<line class="back" x1="{back:.1f}" x2="{at:.1f}" y1="{top}" y2="{top}"/>'
            f'<text x="{at:.1f}" y="{top - 4}" text-anchor="middle">{number}</text></g>'
        )
    for v in (low, (low + high) / 2, high):
        out.append(f'<text class="axis" x="{left - 6}" y="{y(v) + 4:.0f}" text-anchor="end">{v:.4g}</text>')
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>')
    out += _axis_x(left, right, bottom + 2, 0, last, "")
    return _svg(bottom + 26, f"{title} over steps", out)


def _thinned(steps: Ints, values: Floats, every: int) -> list[tuple[int, float]]:
    """Some of the points, with all peaks."""
    places = thinned(values, every)
    return list(zip(steps[places].tolist(), values[places].tolist(), strict=True))


def recovery(incidents: Sequence[Incident]) -> str:
    """A bar per incident from the fault to the first step done, divided into its stages."""
    if not incidents:
        return "<p>No incident.</p>"
    left, height = 200, 20
    longest = max((sum(i.stages_s.values()) for i in incidents), default=0.0) or 1.0
    scale = (WIDTH - left - 80) / longest
    out = []
    note = ""
    if len(incidents) > _MOST_BARS:
        note = f"<p>The {_MOST_BARS} slowest of {len(incidents)}.</p>"
        incidents = sorted(incidents, key=lambda i: -sum(i.stages_s.values()))[:_MOST_BARS]
    for number, incident in enumerate(incidents):
        y, at = 4 + number * (height + 6), float(left)
        label = escape(f"{number + 1}: {incident.class_}, rank {incident.rank}")
        out.append(f'<text class="axis" x="{left - 6}" y="{y + 14}" text-anchor="end">{label}</text>')
        for stage in STAGES:
            seconds = incident.stages_s.get(stage, 0.0)
            if seconds > 0:
                tip = f"{stage} {seconds:.3f} s"
                out.append(
                    f'<rect class="g-{stage}" x="{at:.2f}" y="{y}" width="{max(seconds * scale, 0.3):.2f}" '
                    f'height="{height}"><title>{tip}</title></rect>'
                )
                at += seconds * scale
        whole = sum(incident.stages_s.values())
        took = f"{whole:.2f} s" if incident.recovered else f"{whole:.2f} s, not recovered"
        out.append(f'<text class="axis" x="{at + 6:.1f}" y="{y + 14}">{took}</text>')
    return note + _svg(8 + len(incidents) * (height + 6), "Recovery of each incident by stage", out)


def save_curves(ledger: RunLedger) -> str:
    """The age of the newest state on disk over time, with the time that each write took."""
    times = save_times(ledger)
    points = [*times["age"], *((t, seconds) for t, seconds, _ in times["write"]), *times["stall"]]
    if not points:
        return "<p>No save was committed.</p>"
    left, top, right, bottom = 60, 26, WIDTH - 14, 200
    wall, high = ledger.part.wall_ns / 1e9, max(y for _, y in points) or 1.0

    def at(t: float, y: float) -> str:
        return f"{left + (right - left) * t / wall:.1f},{bottom - (bottom - top) * y / high:.1f}"

    out = [f'<text class="head" x="{left}" y="13">Age of the newest state on disk (line), write times (dots), s</text>']
    out.append(f'<polyline class="curve" points="{" ".join(at(t, y) for t, y in times["age"])}"/>')
    for state, dots in (("finish", [p[:2] for p in times["write"]]), ("snapshot_stall", times["stall"])):
        for t, y in dots[:: max(1, len(dots) // 500)]:
            cx, cy = at(t, y).split(",")
            out.append(f'<circle class="s-{state}" cx="{cx}" cy="{cy}" r="3"><title>{y:.4f} s</title></circle>')
    for y in (0.0, high / 2, high):
        line = float(at(0, y).split(",")[1]) + 4
        out.append(f'<text class="axis" x="{left - 6}" y="{line:.0f}" text-anchor="end">{y:.3g}</text>')
    out += _axis_x(left, right, bottom + 2, 0, wall, " s")
    return _svg(bottom + 26, "Age of the newest state on disk", out)


def _axis_x(left: float, right: float, y: float, low: float, high: float, unit: str) -> list[str]:
    step = _nice((high - low) / 8)
    out = [f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>']
    for n in range(int((high - low) / step) + 1):
        at = left + (right - left) * n * step / max(high - low, 1e-12)
        out.append(f'<text class="axis" x="{at:.1f}" y="{y + 14}" text-anchor="middle">{low + n * step:g}{unit}</text>')
    return out


def _nice(value: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.999))


def _svg(height: float, label: str, content: Sequence[str]) -> str:
    return (
        f'<div class="wide"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(content)
        + "</svg></div>"
    )
