"""The report of one run: a single HTML file that refers to nothing outside of itself.

With plotly (extra `report`) its script is inside, and the figures can be zoomed and hovered; without it, or if asked
for, they are plain SVG and no script runs at all. A content security policy lets nothing else load or run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib import resources, util
from pathlib import Path
from typing import Any

from ridethrough.ledger.incidents import Incident
from ridethrough.ledger.partition import Partition
from ridethrough.ledger.rundir import write_private
from ridethrough.ledger.schema import STATES
from ridethrough.ledger.summary import RunLedger, ledger_summary, read_run
from ridethrough.report.advice import advise
from ridethrough.report.durations import duration
from ridethrough.report.figures import figures
from ridethrough.report.headline import headline
from ridethrough.report.html_style import STAGE_STATE, style
from ridethrough.report.html_tables import (
    about_table,
    advice_section,
    classes_table,
    incidents_table,
    ledger_table,
    shares_bar,
    stragglers_section,
)
from ridethrough.report.live import life
from ridethrough.report.status import Status, status_of
from ridethrough.report.stragglers import rank_times, stragglers
from ridethrough.report.svg import MAX_LANES, recovery, save_curves, step_curves, timeline
from ridethrough.report.view import about


def write_report(
    run_dir: Path | str,
    *,
    control_hash: str | None = None,
    to: Path | None = None,
    plain: bool = False,
    gpu_hour_price: float | None = None,
) -> Path:
    """Write `report.html` (mode 0600, replaced atomically) into the run's folder, or to `to`, and return its path.

    `plain`: SVG without any script, also where plotly is installed. Raises RunDirError or LedgerError as `read_run`
    does, OSError if the file cannot be written.
    """
    alive = life(Path(run_dir))
    ledger = read_run(run_dir, alive.end_ns)
    now = status_of(ledger, running=alive.running)
    path = ledger.path / "report.html" if to is None else to
    page = render(ledger, now, control_hash=control_hash, plain=plain, gpu_hour_price=gpu_hour_price)
    write_private(path, page.encode())
    return path


def render(
    ledger: RunLedger,
    now: Status,
    *,
    control_hash: str | None = None,
    plain: bool = False,
    gpu_hour_price: float | None = None,
) -> str:
    """The page as text. `control_hash`: final hash of the undisturbed run, for the verdict."""
    data = ledger_summary(ledger, control_hash=control_hash)
    part, found = ledger.part, ledger.incidents
    library = None if plain else plotly_script()
    title = f"ridethrough run {ledger.run['run_id']}"
    sections = [
        (
            "Timeline",
            _timeline(part, found, library is not None) + _legend({s: s for s in STATES if part.states_ns[s]}),
        ),
        ("Steps", _steps(ledger, library is not None)),
        ("Recovery", _recovery(found, data["classes"], library is not None)),
        ("Where the time went", ledger_table(part)),
        ("Checkpoints", _saves(ledger, library is not None)),
        ("What to change", advice_section(advise(ledger, gpu_hour_price=gpu_hour_price))),
        ("Stragglers", stragglers_section(stragglers(rank_times(ledger.steps, None)))),
        ("Incidents", incidents_table(found)),
        ("About this run", about_table(about(ledger))),
    ]
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, _ in sections)
    said = "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in headline(now, gpu_hour_price))
    body = f'<h1>{escape(title)}</h1><div class="headline">{said}{_verdict(data)}</div>'
    body += shares_bar(part) + _cards(part, data, found)
    body += f'<nav aria-label="Sections">{links}</nav>'
    body += "".join(f'<h2 id="{_anchor(name)}">{name}</h2>{content}' for name, content in sections)
    return _page(title, body, figures(ledger) if library is not None else None, library)


@cache
def plotly_script() -> str | None:
    """plotly.js as it comes with the package, read without importing it; None where it is not installed."""
    found = util.find_spec("plotly")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        file = Path(folder) / "package_data" / "plotly.min.js"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _page(title: str, body: str, data: dict[str, Any] | None, library: str | None) -> str:
    scripts, allowed = "", ""
    if data is not None and library is not None:
        drawing = resources.files("ridethrough.report").joinpath("figures.js").read_text(encoding="utf-8")
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        scripts = f'<script type="application/json" id="figures">{text}</script>'
        scripts += f"<script>{library}</script><script>{drawing}</script>"
        hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in (library, drawing))
        allowed = f"; script-src {hashes}; img-src data: blob:"
    policy = f"default-src 'none'; style-src 'unsafe-inline'{allowed}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style()}</style></head><body>{body}{scripts}</body></html>\n"
    )


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _figure(name: str, label: str) -> str:
    return f'<div class="fig" id="fig-{name}" tabindex="0" role="figure" aria-label="{escape(label)}"></div>'


def _timeline(part: Partition, found: list[Incident], live: bool) -> str:
    if live:
        hint = "In a figure: left and right move, + and - zoom, 0 shows all; drag to zoom, double click to go back."
        return _figure("timeline", "Timeline of every rank by state") + f'<p class="hint">{hint}</p>'
    note = "" if part.slots <= MAX_LANES else f"<p>The first {MAX_LANES} of {part.slots} ranks.</p>"
    return note + timeline(part, found)


def _steps(ledger: RunLedger, live: bool) -> str:
    if not live or not ledger.steps:
        return step_curves(ledger.past, ledger.incidents)
    names = f"<p>Rank {min(ledger.steps)}; dotted: steps that were rolled back.</p>"
    return names + _figure("time", "Step time over steps") + _figure("loss", "Loss over steps")


def _recovery(found: list[Incident], classes: dict[str, Any], live: bool) -> str:
    if not found:
        return "<p>No incident.</p>"
    drawn = _figure("recovery", "Recovery of each incident by stage") if live else recovery(found)
    spread = _figure("classes", "Fault to first step, per class") if live else ""
    per_class = f"<h3>Fault to first step, per class</h3>{spread}{classes_table(classes)}"
    return drawn + _legend(STAGE_STATE) + per_class


def _saves(ledger: RunLedger, live: bool) -> str:
    if not any(event["kind"] == "save" for event in ledger.events):
        return "<p>No save.</p>"
    return _figure("saves", "Age of the newest state on disk, write times and stalls") if live else save_curves(ledger)


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
        ("steps", f"{data['steps']:,}"),
        ("wall", duration(part.wall_ns / 1e9)),
        ("ranks", f"{part.slots:,}"),
        ("incidents recovered", f"{recovered} of {len(found)}"),
    ]
    for name in ("final_loss", "val_loss"):
        if isinstance(data[name], (int, float)):
            cards.append((name.replace("_", " "), f"{data[name]:.5f}"))
    return '<div class="cards">' + "".join(f"<div><b>{b}</b>{a}</div>" for a, b in cards) + "</div>"


def _legend(names: dict[str, str]) -> str:
    items = "".join(f'<li><span class="sw s-{state}"></span>{name}</li>' for name, state in names.items())
    return f'<ul class="legend">{items}</ul>'
