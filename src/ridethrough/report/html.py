"""The report of one run: a single HTML file that refers to nothing outside of itself."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from ridethrough.ledger.incidents import Incident
from ridethrough.ledger.partition import Partition
from ridethrough.ledger.rundir import write_private
from ridethrough.ledger.schema import STAGES, STATES
from ridethrough.ledger.summary import RunLedger, ledger_summary, read_run
from ridethrough.report.svg import MAX_LANES, recovery, step_curves, timeline
from ridethrough.report.terminal import counted_as, last_line, percent

# light, dark
_STATE_COLOURS = {
    "queued": ("#c9c9c9", "#4a4a4a"),
    "launch": ("#9fb4c7", "#566b7d"),
    "init": ("#6fa8dc", "#3f78ac"),
    "restore": ("#3d85c6", "#5a9bd8"),
    "step": ("#4c9f70", "#4fae79"),
    "lost_step": ("#e0a030", "#d99a2b"),
    "partial_step": ("#f2cf80", "#a07a2a"),
    "data_wait": ("#b4a7d6", "#75689c"),
    "snapshot_stall": ("#8e7cc3", "#9a88d0"),
    "eval": ("#76c7c0", "#3f9088"),
    "detect": ("#cc0000", "#e04040"),
    "teardown": ("#e06666", "#b04a4a"),
    "rebuild": ("#f4a3a3", "#8a4444"),
    "finish": ("#a2c4a9", "#567a5e"),
    "degraded": ("#7f6000", "#a98a2a"),
    "unattributed": ("#000000", "#ffffff"),
}
_STAGE_STATE = {stage: stage if stage in STATES else "step" for stage in STAGES}

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1c1c;--dim:#666;--line:#ddd;--mark:#c00;--good:#2c7a4b;--bad:#b00020}
@media (prefers-color-scheme:dark){:root{--bg:#15181b;--fg:#e6e6e6;--dim:#9aa0a6;--line:#33383d;--mark:#ff6b6b;
--good:#6fd39a;--bad:#ff7b7b}}
body{font:16px/1.5 system-ui,sans-serif;background:var(--bg);color:var(--fg);margin:0 auto;max-width:1100px}
body{padding:1rem}
h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p,dd{margin:.2rem 0}.dim{color:var(--dim)}code,pre{font-family:ui-monospace,monospace;overflow-wrap:anywhere}
pre{white-space:pre-wrap;font-size:.85rem}
.wide{overflow-x:auto}.wide svg{display:block;width:100%;min-width:640px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;margin:1rem 0}
.cards div{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .8rem}.cards b{display:block;font-size:1.3rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}tfoot td{font-weight:bold}
.verdict{font-weight:bold;font-size:1.1rem}.yes{color:var(--good)}.no,.warn{color:var(--bad)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;font-size:.85rem}
.sw{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.3rem;vertical-align:-1px}
svg text{font:12px system-ui,sans-serif;fill:var(--fg)}svg text.axis{fill:var(--dim);font-size:11px}
svg text.head{font-weight:bold}.grid{stroke:var(--line)}
.mark line{stroke:var(--mark);stroke-dasharray:3 2}.mark line.back{stroke-width:3;stroke-dasharray:none}
.mark text{fill:var(--mark);font-weight:bold}
.curve{fill:none;stroke:var(--c-step);stroke-width:1.6}.curve.lost{stroke:var(--c-lost_step);stroke-dasharray:4 3}
"""


def write_report(
    run_dir: Path | str,
    *,
    control_hash: str | None = None,
    end_ns: int | None = None,
    to: Path | None = None,
    plain: bool = False,
) -> Path:
    """Write `report.html` (mode 0600, replaced atomically) into the run's folder, or to `to`, and return its path.

    `plain`: SVG without any script, also where plotly is installed. Raises RunDirError or LedgerError as `read_run`
    does, OSError if the file cannot be written.
    """
    ledger = read_run(run_dir, end_ns)
    path = ledger.path / "report.html" if to is None else to
    write_private(path, render(ledger, control_hash=control_hash).encode())
    return path


def render(ledger: RunLedger, *, control_hash: str | None = None) -> str:
    """The page as text. `control_hash`: final hash of the undisturbed run, for the verdict."""
    data = ledger_summary(ledger, control_hash=control_hash)
    part, found = ledger.part, ledger.incidents
    title = f"ridethrough run {ledger.run['run_id']}"
    body = [
        _head(ledger, data, title),
        _verdict(data),
        _cards(part, data, found),
        f'<p class="warn">{escape(part.warning)}</p>' if part.warning else "",
        "<h2>Timeline</h2>",
        "" if part.slots <= MAX_LANES else f"<p>The first {MAX_LANES} of {part.slots} ranks.</p>",
        timeline(part, found),
        _legend({state: state for state in STATES if part.states_ns[state]}),
        "<h2>Steps</h2>",
        step_curves(ledger.past, found),
        "<h2>Recovery by stage</h2>",
        recovery(found),
        _legend(_STAGE_STATE) if found else "",
        "<h2>Where the time went</h2>",
        _ledger_table(part),
        "<h2>Incidents</h2>",
        _incidents(found),
        _classes(data["classes"]),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _style() -> str:
    def variables(which: int) -> str:
        return "".join(f"--c-{state}:{pair[which]};" for state, pair in _STATE_COLOURS.items())

    fills = "".join(f".s-{s}{{fill:var(--c-{s});background:var(--c-{s})}}" for s in STATES)
    fills += "".join(f".g-{g}{{fill:var(--c-{s});background:var(--c-{s})}}" for g, s in _STAGE_STATE.items())
    dark = f"@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"
    return f"{_STYLE}:root{{{variables(0)}}}{dark}{fills}"


def _head(ledger: RunLedger, data: dict[str, Any], title: str) -> str:
    run, result = ledger.run, ledger.run["result"]
    ended = "not ended" if result is None else f"exit {result['code']}: {result['reason']}"
    facts = [
        f"created {run['created']} on {run['host']}",
        ended,
        f"config {run['config_hash']}",
        f"fault schedule {run['schedule_hash'] or 'none'}",
        ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
    ]
    command = " ".join(run["command"])
    lines = "".join(f'<p class="dim">{escape(fact)}</p>' for fact in facts)
    return f"<h1>{escape(title)}</h1>{lines}<p><code>{escape(command)}</code></p>"


def _verdict(data: dict[str, Any]) -> str:
    equal, final = data["bitwise_equal"], data["final_hash"]
    text = "final parameters and optimizer equal to the undisturbed run, bit for bit: "
    if equal is None:
        said = f" Final hash <code>{escape(str(final))}</code>." if final else ""
        return f'<p class="dim">Not compared with an undisturbed run.{said}</p>'
    answer = f"yes ({final})" if equal else f"no ({final}, undisturbed {data['control_hash']})"
    return f'<p class="verdict {"yes" if equal else "no"}">{text}{escape(answer)}</p>'


def _cards(part: Partition, data: dict[str, Any], found: list[Incident]) -> str:
    recovered = sum(incident.recovered for incident in found)
    cards = [
        ("training goodput", f"{part.training_goodput:.2%}"),
        ("infrastructure goodput", f"{part.infrastructure_goodput:.2%}"),
        ("steps", str(data["steps"])),
        ("wall", f"{part.wall_ns / 1e9:.2f} s"),
        ("ranks", str(part.slots)),
        ("incidents, recovered", f"{len(found)}, {recovered}"),
    ]
    for name in ("final_loss", "val_loss"):
        if isinstance(data[name], (int, float)):
            cards.append((name.replace("_", " "), f"{data[name]:.5f}"))
    return '<div class="cards">' + "".join(f"<div><b>{b}</b>{a}</div>" for a, b in cards) + "</div>"


def _legend(names: dict[str, str]) -> str:
    items = "".join(f'<li><span class="sw s-{state}"></span>{name}</li>' for name, state in names.items())
    return f'<ul class="legend">{items}</ul>'


def _ledger_table(part: Partition) -> str:
    total = part.wall_ns * part.slots
    rows = "".join(
        f'<tr><td><span class="sw s-{state}"></span>{state}</td><td class="n">{ns / 1e9:.3f}</td>'
        f'<td class="n">{percent(ns, total)}</td><td>{counted_as(state)}</td>'
        f'<td class="dim">{escape(STATES[state])}</td></tr>'
        for state, ns in part.states_ns.items()
    )
    head = '<tr><th>state</th><th class="n">seconds</th><th class="n">%</th><th>counted as</th><th>what it is</th></tr>'
    foot = (
        f'<tr><td>sum</td><td class="n">{sum(part.states_ns.values()) / 1e9:.3f}</td><td class="n">100.00%</td>'
        f'<td colspan="2">= wall x slots: {part.wall_ns} ns x {part.slots} = {total} ns</td></tr>'
    )
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot></table></div>'


def _incidents(found: list[Incident]) -> str:
    if not found:
        return "<p>None.</p>"
    names = ["", "id", "class", "rank", "where", "rung", "seen by", "detected", "all out", "first step", "caught up"]
    names += ["resumed at", "steps lost", "attempts", "root cause"]
    rows = []
    for number, i in enumerate(found, 1):
        where = " of step ".join(str(part) for part in (i.phase, i.step) if part is not None) or "-"
        cells = [number, i.id, i.class_, i.rank, where, i.rung or "open", i.detected_by]
        cells += [_s(i.detected_s), _s(i.all_out_s), _s(i.first_step_s), _s(i.caught_up_s)]
        cells += [i.resumed_at, i.steps_lost, i.attempts]
        said = "".join(f"<td>{escape('-' if cell is None else str(cell))}</td>" for cell in cells)
        rows.append(f"<tr>{said}<td>{_cause(i)}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cause(incident: Incident) -> str:
    whole = (incident.root_cause or "").strip()
    effects = [f"rank {s.get('rank')}: {s.get('class')}: {last_line(s.get('cause'))}" for s in incident.secondary]
    if "\n" not in whole and not effects:
        return escape(whole or "-")
    more = whole + ("\n\neffects on others:\n" + "\n".join(effects) if effects else "")
    return f"<details><summary>{escape(last_line(whole))}</summary><pre>{escape(more)}</pre></details>"


def _classes(classes: dict[str, dict[str, Any]]) -> str:
    if not classes:
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{row["count"]}</td><td class="n">{row["recovery_rate"]:.0%}</td>'
        + "".join(f'<td class="n">{_s(row[key])}</td>' for key in ("p50_s", "p95_s", "p99_s", "max_s"))
        + "</tr>"
        for name, row in classes.items()
    )
    head = "".join(f'<th class="n">{n}</th>' for n in ("count", "recovered", "p50", "p95", "p99", "max"))
    return (
        "<h2>Fault to first step, per class</h2>"
        f'<div class="wide"><table><thead><tr><th>class</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
