"""The report's tables: where the time went, incidents, classes, advice, stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ridethrough.ledger.incidents import Incident, place
from ridethrough.ledger.partition import Partition
from ridethrough.ledger.schema import STATES
from ridethrough.report.advice import Report
from ridethrough.report.stragglers import Straggler
from ridethrough.report.terminal import counted_as, last_line, percent

MOST_INCIDENTS = 400


def ledger_table(part: Partition) -> str:
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


def shares_bar(part: Partition) -> str:
    """All of the time in one bar, by state."""
    total = max(1, part.wall_ns * part.slots)
    pieces = "".join(
        f'<span class="s-{state}" style="width:{100 * ns / total:.3f}%" title="{state} {percent(ns, total)}">'
        f"{state if ns > 0.08 * total else ''}</span>"
        for state, ns in sorted(part.states_ns.items(), key=lambda item: -item[1])
        if ns
    )
    return f'<div class="bar" role="img" aria-label="Share of the time in each state">{pieces}</div>'


def about_table(about: dict[str, str]) -> str:
    return table(["", ""], [[escape(name), f"<code>{escape(text)}</code>"] for name, text in about.items()])


def incidents_table(found: list[Incident]) -> str:
    if not found:
        return "<p>None.</p>"
    names = [
        "",
        "id",
        "class",
        "injected",
        "rank",
        "where",
        "rung",
        "seen by",
        "detected",
        "all out",
        "first step",
        "caught up",
    ]
    names += ["resumed at", "steps lost", "attempts", "root cause"]
    numbered = list(enumerate(found, 1))
    if len(found) > MOST_INCIDENTS:  # what never recovered, then the slowest
        slowest = sorted(numbered, key=lambda n: (n[1].recovered, -(n[1].first_step_s or 0)))[:MOST_INCIDENTS]
        numbered = sorted(slowest, key=lambda n: n[0])
    rows = []
    for number, i in numbered:
        where = place(i.phase, i.step)
        cells = [number, i.id, i.class_, " ".join(i.injected) or "-", i.rank, where, i.rung or "open", i.detected_by]
        cells += [_s(i.detected_s), _s(i.all_out_s), _s(i.first_step_s), _s(i.caught_up_s)]
        cells += [i.resumed_at, i.steps_lost, i.attempts]
        said = "".join(f"<td>{escape('-' if cell is None else str(cell))}</td>" for cell in cells)
        rows.append(f"<tr>{said}<td>{_cause(i)}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    note = ""
    if len(numbered) < len(found):
        all_of_them = "<code>ridethrough runs export --what incidents</code> has all"
        note = f"<p>The {len(numbered)} slowest of {len(found)}; {all_of_them}.</p>"
    return f'{note}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cause(incident: Incident) -> str:
    whole = (incident.root_cause or "").strip()
    effects = [f"rank {s.get('rank')}: {s.get('class')}: {last_line(s.get('cause'))}" for s in incident.secondary]
    if "\n" not in whole and not effects:
        return escape(whole or "-")
    more = whole + ("\n\neffects on others:\n" + "\n".join(effects) if effects else "")
    return f"<details><summary>{escape(last_line(whole))}</summary><pre>{escape(more)}</pre></details>"


def classes_table(classes: dict[str, dict[str, Any]]) -> str:
    if not classes:
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{row["count"]}</td><td class="n">{row["recovery_rate"]:.0%}</td>'
        + "".join(f'<td class="n">{_s(row[key])}</td>' for key in ("p50_s", "p95_s", "p99_s", "max_s"))
        + "</tr>"
        for name, row in classes.items()
    )
    head = "".join(f'<th class="n">{n}</th>' for n in ("count", "recovered", "p50", "p95", "p99", "max"))
    return f'<div class="wide"><table><thead><tr><th>class</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def advice_section(report: Report) -> str:
    """Warnings, then every figure with its formula, inputs and source, then time limits and costs."""
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in report.warnings)
    rows = []
    for item in report.items:
        value = "not known" if item.value is None else f"{item.value:.4g} {item.unit}".rstrip()
        inputs = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in item.inputs.items())
        how = f"= {item.formula}\nfrom {inputs}\nsource: {item.source}"
        more = f"<details><summary>how</summary><pre>{escape(how)}</pre></details>" if item.value is not None else ""
        rows.append([f"{escape(item.name)}{more}", escape(value), escape(item.note)])
    limits = [
        [
            escape(r.phase),
            str(r.count),
            *(f"{v:.3g} s" for v in (r.p99_s, r.longest_s, r.now_s, r.proposed_s)),
            r.setting,
        ]
        for r in report.limits
    ]
    costs = [
        [escape(c.class_), str(c.count), f"{c.gpu_hours:.4f}", f"{c.gpu_hours_each:.5f}"]
        + [f"{c.money:,.2f}" if c.money is not None else "give --gpu-hour-price"]
        for c in report.costs
    ]
    out = warnings + table(["figure", "value", ""], rows)
    out += "<h3>Time limits</h3>"
    out += table(["phase", "seen", "p99", "longest", "default", "proposed", "setting"], limits, numbers=range(1, 6))
    if costs:
        out += "<h3>What the recoveries cost</h3>"
        out += table(["class", "incidents", "GPU hours", "each", "money"], costs, numbers=range(1, 5))
        out += '<p class="dim">Ranks x time from the fault until the lost steps were done again.</p>'
    return out


def stragglers_section(found: list[Straggler]) -> str:
    if not found:
        return "<p>No rank is an outlier in its step time or its waits (robust z above 5).</p>"
    rows = [
        [str(s.rank), s.measure, f"{s.seconds * 1e3:.2f} ms", f"{s.median_s * 1e3:.2f} ms", f"{min(s.z, 999):.0f}"]
        for s in found[:50]
    ]
    return table(["rank", "measure", "per step", "median rank", "z"], rows, numbers=range(2, 5))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML; columns of `numbers` are aligned to the right."""
    kind = dict.fromkeys(numbers, ' class="n"')
    names = "".join(f"<th{kind.get(p, '')}>{escape(name)}</th>" for p, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{kind.get(p, '')}>{cell}</td>" for p, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'
