"""The report's style sheet: light and dark, phone and desk, from one set of colours."""

from __future__ import annotations

from ridethrough.ledger.schema import STAGES, STATES

# light, dark
STATE_COLOURS = {
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
STAGE_STATE = {stage: stage if stage in STATES else "step" for stage in STAGES}

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1c1c;--dim:#666;--line:#ddd;--mark:#c00;--good:#2c7a4b;--bad:#b00020;
--warn:#8a5a00}
@media (prefers-color-scheme:dark){:root{--bg:#15181b;--fg:#e6e6e6;--dim:#9aa0a6;--line:#33383d;--mark:#ff6b6b;
--good:#6fd39a;--bad:#ff7b7b;--warn:#e0b060}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;background:var(--bg);color:var(--fg);margin:0 auto;max-width:1100px}
body{padding:1rem}
h1{font-size:1.4rem;margin:.2rem 0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .5rem}
h3{font-size:1rem;margin:1.2rem 0 .3rem}h2:target{text-decoration:underline}
p,dd{margin:.2rem 0}.dim{color:var(--dim)}code,pre{font-family:ui-monospace,monospace;overflow-wrap:anywhere}
pre{white-space:pre-wrap;font-size:.85rem}
nav{display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.9rem;margin:.6rem 0}a{color:inherit}
:focus-visible{outline:3px solid var(--c-restore);outline-offset:2px}
.wide{overflow-x:auto}.wide svg{display:block;width:100%;min-width:640px}
.fig{width:100%;min-height:220px}.hint{font-size:.8rem;color:var(--dim)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;margin:1rem 0}
.cards div{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .8rem}.cards b{display:block;font-size:1.3rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}tfoot td{font-weight:bold}
.headline{font-size:1.05rem;margin:.4rem 0}.headline p:first-child{font-weight:bold;font-size:1.2rem}
.bar{display:flex;height:1.7rem;border-radius:.4rem;overflow:hidden;margin:.8rem 0}
.bar span{font-size:.75rem;line-height:1.7rem;text-align:center;overflow:hidden;white-space:nowrap;color:#000}
.good{color:var(--good)}.bad{color:var(--bad)}
.verdict{font-weight:bold;font-size:1.1rem}.yes{color:var(--good)}.no{color:var(--bad)}.warn{color:var(--warn)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;font-size:.85rem}
.sw{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.3rem;vertical-align:-1px}
svg text{font:12px system-ui,sans-serif;fill:var(--fg)}svg text.axis{fill:var(--dim);font-size:11px}
svg text.head{font-weight:bold}.grid{stroke:var(--line)}
.mark line{stroke:var(--mark);stroke-dasharray:3 2}.mark line.back{stroke-width:3;stroke-dasharray:none}
.mark text{fill:var(--mark);font-weight:bold}
.curve{fill:none;stroke:var(--c-step);stroke-width:1.6}.curve.lost{stroke:var(--c-lost_step);stroke-dasharray:4 3}
@media print{nav,.hint{display:none}}
"""


def style() -> str:
    """The whole sheet, with a variable and a class for each state and stage."""

    def variables(which: int) -> str:
        return "".join(f"--c-{state}:{pair[which]};" for state, pair in STATE_COLOURS.items())

    fills = "".join(f".s-{s}{{fill:var(--c-{s});background:var(--c-{s})}}" for s in STATES)
    fills += "".join(f".g-{g}{{fill:var(--c-{s});background:var(--c-{s})}}" for g, s in STAGE_STATE.items())
    dark = f"@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"
    return f"{_STYLE}:root{{{variables(0)}}}{dark}{fills}"
