"""The look of a report in light and in dark, and the few lines that answer the pointer."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --text: #1c2330; --soft: #5d6778; --line: #e2e6ec;
  --good: #157a3d; --bad: #b3261e; --mild: #8a5a00; --c0: #2563eb; --c1: #d9480f; --c2: #0b8a4b; --c3: #8b2fd6;
  --c4: #c2185b; --c5: #00788a; --c6: #7d6300; --c7: #59616e; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #11151c; --card: #1a2029; --text: #e4e8ef; --soft: #98a3b5; --line: #2c3542;
    --good: #5fd38d; --bad: #ff8a80; --mild: #f0bd5a; --c0: #7aa9ff; --c1: #ff9d66; --c2: #5ed39b; --c3: #c89bff;
    --c4: #ff8db8; --c5: #55d0de; --c6: #dfc14e; --c7: #aab3c0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; }
h2 { font-size: 17px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 18px 0 6px; color: var(--soft); font-weight: 600; }
p { margin: 4px 0; } .soft, small { color: var(--soft); font-weight: 400; }
.head { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; }
.status { border: 1px solid; border-radius: 99px; padding: 1px 12px; font-size: 13px; font-weight: 600; }
.finished { color: var(--good); } .failed { color: var(--bad); }
.stopped, .interrupted, .running { color: var(--mild); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.tiles div, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: 10px 14px; } .tiles b { display: block; font-size: 19px; line-height: 1.3; }
.tiles span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 10px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
text.y { text-anchor: end; } text.x { text-anchor: middle; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.epoch { stroke: var(--soft); stroke-dasharray: 1 4; opacity: .7; }
.cursor { stroke: var(--soft); visibility: hidden; }
.curve path { fill: none; stroke: currentColor; stroke-width: 1.7; stroke-linejoin: round; }
.curve circle { fill: currentColor; } .dashed path { stroke-dasharray: 5 3; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; padding-top: 6px; min-height: 28px; }
i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; background: currentColor;
  margin-right: 7px; vertical-align: middle; }
.legend b { font-variant-numeric: tabular-nums; } .legend em { color: var(--bad); font-style: normal; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 14px; }
.two > div { min-width: 0; } .card, .scroll { padding: 10px 14px; overflow-x: auto; }
.scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; white-space: nowrap; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } th:last-child, td:last-child { padding-right: 0; }
td { min-width: 70px; } td:first-child { min-width: 150px; }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); margin-bottom: 8px; }
footer { margin-top: 34px; color: var(--soft); font-size: 13px; }
@media (min-width: 700px) { td:first-child { white-space: nowrap; } }
@media print { body { background: #fff; } figure, section { break-inside: avoid; } }
"""

SCRIPT = """
for (const figure of document.querySelectorAll('figure')) {
  const svg = figure.querySelector('svg'), cursor = svg.querySelector('.cursor');
  const [low, high, start, end] = JSON.parse(svg.dataset.scale);
  const title = figure.querySelector('figcaption').appendChild(document.createElement('small'));
  const shown = [...figure.querySelectorAll('.legend b')];
  const curves = [...svg.querySelectorAll('.curve')].map(g => [g.dataset.steps, g.dataset.values].map(JSON.parse));
  const format = v => v === null || v === undefined ? '-' : Number(v.toPrecision(4)).toString();
  const leave = () => {
    cursor.style.visibility = 'hidden'; title.textContent = '';
    shown.forEach(b => { b.textContent = b.dataset.last; });
  };
  svg.addEventListener('pointerleave', leave);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = low + (at - start) / (end - start) * (high - low);
    const off = s => Math.abs(s - step);
    const nearest = steps => steps.reduce((best, s, i) => off(s) < off(steps[best]) ? i : best, 0);
    const found = curves.map(([steps]) => nearest(steps));
    const steps = curves.map(([steps], i) => steps[found[i]]).filter(s => s !== undefined);
    if (!steps.length || at < start - 8) return leave();
    const chosen = steps[nearest(steps)], x = start + (chosen - low) / (high - low) * (end - start);
    cursor.setAttribute('x1', x); cursor.setAttribute('x2', x); cursor.style.visibility = 'visible';
    title.textContent = ', at step ' + chosen;
    curves.forEach(([, values], i) => { shown[i].textContent = format(values[found[i]]); });
  });
}
"""
