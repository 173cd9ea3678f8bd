// Draws the report's figures from the JSON beside it. Colours come from the page's style sheet, so that light and dark
// are one drawing; drawn again when the reader's preference changes. A figure in focus obeys the keyboard:
// left and right move, + and - zoom, 0 shows all.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("figures").textContent);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (state) => style("--c-" + state);
  const config = { responsive: true, displaylogo: false, scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

  const layout = (more) => Object.assign({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--fg"), size: 12 },
    margin: { l: 56, r: 12, t: 28, b: 40 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--dim"), activecolor: style("--fg") }, hovermode: "closest", dragmode: "zoom", showlegend: false,
    hoverlabel: { bgcolor: style("--bg"), bordercolor: style("--line"), font: { color: style("--fg") } },
  }, more);
  const axis = (title, more) => Object.assign({ title: { text: title }, gridcolor: style("--line"),
    zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true }, more);

  const timeline = () => {
    const t = data.timeline, traces = [];
    const ranks = axis("rank", { autorange: "reversed", showgrid: false, dtick: t.slots <= 20 ? 1 : undefined });
    if (t.kind === "bars") {
      for (const state of data.states) {
        const bar = t.bars[state];
        if (bar) traces.push({ type: "bar", orientation: "h", name: state, x: bar.x, base: bar.base, y: bar.y,
          marker: { color: colour(state), line: { width: 0 } }, width: 0.85,
          customdata: bar.x, hovertemplate: "rank %{y}: " + state + " %{customdata:.3f} s from %{base:.3f} s<extra></extra>" });
      }
    } else {
      const raw = atob(t.cells), step = data.wall_s / t.columns, z = [], text = data.codes;
      for (let slot = 0; slot < t.slots; slot++) {
        const row = new Array(t.columns);
        for (let c = 0; c < t.columns; c++) row[c] = raw.charCodeAt(slot * t.columns + c);
        z.push(row);
      }
      const scale = [], n = data.codes.length;
      data.codes.forEach((state, i) => { scale.push([i / n, colour(state)], [(i + 1) / n, colour(state)]); });
      traces.push({ type: "heatmap", z, x0: step / 2, dx: step, zmin: -0.5, zmax: n - 0.5, colorscale: scale,
        showscale: false, zsmooth: false, hovertemplate: "rank %{y}, %{x:.1f} s<extra></extra>" });
    }
    const at = data.marks.map((m) => m.t);
    traces.push({ type: "scatter", mode: "markers", x: at, y: data.marks.map((m) => m.rank ?? 0),
      text: data.marks.map((m) => m.text), hovertemplate: "incident %{text}<extra></extra>",
      marker: { symbol: "x", size: data.marks.length > 60 ? 6 : 10, color: style("--mark"), line: { width: 1, color: style("--bg") } } });
    return [traces, layout({ barmode: "overlay", xaxis: axis("seconds from the start", { range: [0, data.wall_s] }), yaxis: ranks,
      height: Math.min(640, Math.max(220, 90 + t.slots * 22)) })];
  };

  const curve = (name, title) => () => {
    const line = (points, what, state, dash) => ({ type: "scatter", mode: "lines", x: points.step, y: points[name], connectgaps: false,
      name: what, line: { color: colour(state), width: 1.6, dash }, hovertemplate: what + " step %{x}: %{y}<extra></extra>" });
    const traces = [line(data.steps.kept, "kept", "step"), line(data.steps.lost, "rolled back", "lost_step", "dot")];
    return [traces, layout({ height: 260, xaxis: axis("step"), yaxis: axis(title, name === "time" ? { rangemode: "tozero" } : {}) })];
  };

  const recovery = () => {
    const r = data.recovery, states = { first_step: "step" };
    const traces = Object.keys(r.stages).map((stage) => ({ type: "bar", name: stage, x: r.n, y: r.stages[stage], text: r.text,
      textposition: "none", marker: { color: colour(states[stage] || stage), line: { width: 0 } },
      hovertemplate: "%{text}<br>" + stage + " %{y:.3f} s<extra></extra>" }));
    return [traces, layout({ barmode: "stack", bargap: r.n.length > 60 ? 0 : 0.2, height: 300, xaxis: axis("incident", { dtick: r.n.length <= 20 ? 1 : undefined }),
      yaxis: axis("seconds from the fault") })];
  };

  const classes = () => {
    const traces = Object.entries(data.recovery.classes).map(([name, values]) => ({ type: "box", name, y: values,
      boxpoints: values.length > 200 ? "outliers" : "all", jitter: 0.4, pointpos: 0, marker: { color: colour("detect"), size: 6, opacity: 0.7 },
      line: { color: style("--fg"), width: 1 }, fillcolor: "rgba(0,0,0,0)", hovertemplate: name + " %{y:.3f} s<extra></extra>" }));
    return [traces, layout({ height: 280, xaxis: axis(""), yaxis: axis("fault to first step (s)", { rangemode: "tozero" }) })];
  };

  const saves = () => {
    const s = data.saves;
    const traces = [
      { type: "scatter", mode: "lines", name: "age of the newest state on disk", x: s.age.map((p) => p[0]), y: s.age.map((p) => p[1]),
        line: { color: colour("restore"), width: 1.4 }, hovertemplate: "%{y:.2f} s old<extra></extra>" },
      { type: "scatter", mode: "markers", name: "write time", x: s.write.map((p) => p[0]), y: s.write.map((p) => p[1]), text: s.write.map((p) => "step " + p[2]),
        marker: { color: colour("finish"), size: 6 }, hovertemplate: "%{text} written in %{y:.3f} s<extra></extra>" },
      { type: "scatter", mode: "markers", name: "training blocked", x: s.stall.map((p) => p[0]), y: s.stall.map((p) => p[1]),
        marker: { color: colour("snapshot_stall"), size: 5, symbol: "diamond" }, hovertemplate: "blocked for %{y:.4f} s<extra></extra>" },
    ].filter((trace) => trace.x.length);
    return [traces, layout({ height: 280, showlegend: true, legend: { orientation: "h", y: 1.15 }, margin: { l: 56, r: 12, t: 40, b: 40 },
      xaxis: axis("seconds from the start", { range: [0, data.wall_s] }), yaxis: axis("seconds", { rangemode: "tozero" }) })];
  };

  const drawings = { "fig-timeline": timeline, "fig-time": curve("time", "step time (s)"), "fig-loss": curve("loss", "loss"),
    "fig-recovery": recovery, "fig-classes": classes, "fig-saves": saves };

  const move = (figure, key) => {
    const range = figure._fullLayout.xaxis.range.map(Number), width = range[1] - range[0], middle = (range[0] + range[1]) / 2;
    const to = { ArrowLeft: range.map((v) => v - width / 5), ArrowRight: range.map((v) => v + width / 5),
      "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4], "-": [middle - width, middle + width] }[key];
    if (to) { Plotly.relayout(figure, { "xaxis.range": to }); return true; }
    if (key === "0" || key === "Home") {
      const all = figure.id === "fig-timeline" || figure.id === "fig-saves";
      Plotly.relayout(figure, all ? { "xaxis.range": [0, data.wall_s] } : { "xaxis.autorange": true });
      return true;
    }
    return false;
  };

  const draw = (first) => {
    for (const [id, make] of Object.entries(drawings)) {
      const figure = document.getElementById(id);
      if (!figure) continue;
      const [traces, how] = make();
      Plotly.react(figure, traces, how, config);
      if (first) figure.addEventListener("keydown", (event) => { if (!event.ctrlKey && !event.metaKey && move(figure, event.key)) event.preventDefault(); });
    }
    document.documentElement.dataset.drawn = "yes";
  };
  draw(true);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(false));
})();
