"""A run's status for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ridethrough.report.durations import duration
from ridethrough.report.headline import headline
from ridethrough.report.status import RankNow, Status

_STYLE = {"good": "green", "warn": "yellow", "bad": "red", "plain": "default"}


def status_view(now: Status, rows: int = 16) -> RenderableType:
    """The headline, the figures, then at most `rows` ranks: all if they are few, else those farthest behind."""
    said = [Text(f"run {now.run_id}", style="bold")]
    said += [Text(text, style=_STYLE[kind]) for kind, text in headline(now)]
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in _facts(now):
        facts.add_row(name, escape(value))
    return Group(*said, facts, *([_ranks(now, rows)] if now.ranks else []))


def _facts(now: Status) -> list[tuple[str, str]]:
    step = f"{now.step}" + (f"/{now.total}" if now.total else "")
    if now.loss is not None:
        step += f"  loss {now.loss:.4f}"
    if now.step_s is not None:
        step += f"  {now.step_s:.3f} s a step"
    if now.tokens_per_s:
        step += f"  {now.tokens_per_s:,.0f} tokens/s"
    facts = [("step", step), ("generation", f"{now.generation}, {now.num_ranks} ranks, wall {duration(now.wall_s)}")]
    facts.append(("goodput", f"training {now.training_goodput:.2%}  infrastructure {now.infrastructure_goodput:.2%}"))
    facts += _checkpoint_facts(now)
    if now.max_restarts is not None:
        facts.append(("restarts", f"{now.restarts} of {now.max_restarts}"))
    return facts


def _checkpoint_facts(now: Status) -> list[tuple[str, str]]:
    facts = []
    for name, tier in now.saves.tiers.items():
        facts.append(
            (
                f"on {name}" if name == "disk" else f"in {name}",
                f"step {tier.step}, {duration(tier.age_s)} old, {tier.rollback_steps} steps behind",
            )
        )
    if not now.saves.tiers:
        facts.append(("checkpoints", "none yet"))
    if now.saves.host_bytes is not None:
        facts.append(("host memory", f"{now.saves.host_bytes / 1e9:.2f} GB of snapshots, all nodes"))
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
