"""A run's status for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from ridethrough.report.status import RankNow, Status
from ridethrough.report.terminal import last_line

_COLOUR = {"running": "green", "ended": "green", "starting": "yellow", "recovering": "yellow", "died": "red"}


def status_view(now: Status, rows: int = 16) -> RenderableType:
    """Facts first, then at most `rows` ranks: all if they are few, else those that differ from the rest."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in _facts(now):
        facts.add_row(name, value)
    return Group(facts, _ranks(now, rows)) if now.ranks else Group(facts)


def _facts(now: Status) -> list[tuple[str, str]]:
    colour = _COLOUR[now.state]
    ended = f", code {now.code}: {escape(now.reason or '')}" if now.code is not None else ""
    facts = [("run", f"{escape(now.run_id)}  [{colour}]{now.state}[/]{ended}")]
    step = f"{now.step}" + (f"/{now.total}" if now.total else "")
    if now.loss is not None:
        step += f"  loss {now.loss:.4f}"
    if now.step_s is not None:
        step += f"  {now.step_s:.3f} s a step"
    if now.tokens_per_s:
        step += f"  {now.tokens_per_s:,.0f} tokens/s"
    if now.eta_s is not None:
        step += f"  {duration(now.eta_s)} left"
    facts.append(("step", step))
    facts.append(("generation", f"{now.generation}, {now.num_ranks} ranks, wall {duration(now.wall_s)}"))
    goodput = f"training {now.training_goodput:.2%}  infrastructure {now.infrastructure_goodput:.2%}"
    facts.append(("goodput", goodput + (f"  unattributed {now.unattributed:.2%}" if now.unattributed > 0.005 else "")))
    facts += _checkpoint_facts(now)
    facts.append(("incidents", _incidents(now)))
    if now.max_restarts is not None:
        facts.append(("restarts", f"{now.restarts} of {now.max_restarts}"))
    if now.recurring_rank is not None:
        facts.append(("recurring", f"[red]rank {now.recurring_rank} causes most of the incidents[/]"))
    if now.open_incident is not None:
        i = now.open_incident
        where = f"{i['class']} of rank {i['rank']} in {i['phase']} of step {i['step']}"
        where += f" (injected: {' '.join(i['injected'])})" if i["injected"] else ""
        facts.append(("open incident", f"[yellow]{escape(where)}: {escape(last_line(i['root_cause']))}[/]"))
    for straggler in now.stragglers[:3]:
        facts.append(("straggler", f"[yellow]{escape(straggler.line())}[/]"))
    return facts


def _incidents(now: Status) -> str:
    if not now.num_incidents:
        return "none"
    causes = ", ".join(f"{count} {name}" for name, count in now.causes.items())
    injected = f", {now.num_injected} injected" if now.num_injected else ""
    return f"{now.num_incidents} ({causes}){injected}, {now.num_recovered} recovered, {now.steps_lost} steps lost"


def _checkpoint_facts(now: Status) -> list[tuple[str, str]]:
    facts = []
    for name, tier in now.saves.tiers.items():
        facts.append(
            (f"in {name}", f"step {tier.step}, {duration(tier.age_s)} old, {tier.rollback_steps} steps behind")
        )
    if not now.saves.tiers:
        facts.append(("checkpoints", "none yet"))
    if now.saves.backlog or now.saves.num_superseded or now.saves.num_failed:
        facts.append(
            (
                "backlog",
                f"{len(now.saves.backlog)} saves waiting for storage, {now.saves.num_superseded} superseded, "
                f"{now.saves.num_failed} failed",
            )
        )
    return facts


def _ranks(now: Status, rows: int) -> Table:
    shown = interesting(now.ranks, rows)
    title = f"ranks ({len(shown)} of {len(now.ranks)})" if len(shown) < len(now.ranks) else None
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for name in ("rank", "state", "last step", "since", "s a step"):
        table.add_column(name, justify="left" if name == "state" else "right")
    slow = {s.rank for s in now.stragglers}
    for rank in shown:
        step_s = f"{rank.step_s:.3f}" if rank.step_s is not None else "-"
        style = "yellow" if rank.rank in slow else None
        table.add_row(str(rank.rank), rank.state, str(rank.step), duration(rank.since_s), step_s, style=style)
    return table


def interesting(ranks: list[RankNow], rows: int) -> list[RankNow]:
    """All if there are few; else those farthest behind, in the order of ranks."""
    if len(ranks) <= rows:
        return ranks
    behind = sorted(ranks, key=lambda rank: (rank.step, -rank.since_s, rank.rank))[:rows]
    return sorted(behind, key=lambda rank: rank.rank)


def duration(seconds: float) -> str:
    """For example `4.2 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"
