"""The report's style sheet: light and dark, no fonts or files from elsewhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #14171c; --muted: #667085; --grid: #e4e7ec; --line: #e4e7ec; --soft: #f0f2f5;
  --c1: #2f6fed; --c2: #e07a1f; --c3: #0f9d7a; --c4: #8b5cf6; --c5: #e23d6d; --c6: #0e93b8;
  --up: #0c8a5f; --down: #cf2f56; --warn: #b26a00; --warned: #fff7e8;
  --sans: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Code", "JetBrains Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #161b22; --ink: #e8ebf0; --muted: #98a2b3; --grid: #2a313c; --line: #252c36;
    --soft: #1d232c;
    --c1: #6da2ff; --c2: #f5a254; --c3: #3ccfa4; --c4: #b196ff; --c5: #ff7a9c; --c6: #4cc5e6;
    --up: #45d19b; --down: #ff7a97; --warn: #f0b23e; --warned: #241d10;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--sans); }
header, main { max-width: 1180px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 40px; }
main { padding-bottom: 72px; }
.brand { margin: 0; font: 600 13px var(--mono); letter-spacing: .04em; color: var(--c1); }
h1 { margin: 4px 0 10px; font-size: 34px; line-height: 1.15; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 52px 0 14px; font-size: 21px; letter-spacing: -.01em; }
h3 { margin: 0; font-size: 14px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 0; }
.chips { display: flex; flex-wrap: wrap; gap: 8px; }
.chips span { padding: 2px 10px; border-radius: 99px; background: var(--soft); border: 1px solid var(--line);
  color: var(--muted); font-size: 13px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 20px; margin-top: 22px; padding-top: 12px;
  border-top: 1px solid var(--line); font-size: 13.5px; }
nav a { color: var(--muted); text-decoration: none; }
nav a:hover { color: var(--c1); }
.lead { max-width: 105ch; margin-bottom: 16px; color: var(--muted); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px; }
.note { color: var(--muted); font-size: 12.5px; line-height: 1.4; }
.cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(245px, 1fr)); }
.cards h3 { color: var(--muted); font-weight: 500; font-size: 13px; }
.big { margin: 4px 0 6px; font-size: 28px; font-weight: 650; line-height: 1.15; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.big i { padding: 0 .25em; font-style: normal; font-weight: 400; color: var(--muted); }
.three, .four { display: grid; gap: 14px; }
.three { grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); }
.four { grid-template-columns: repeat(auto-fill, minmax(245px, 1fr)); margin-top: 14px; }
.three + figure, .scroll + .scroll { margin-top: 14px; }
figure { margin: 0; min-width: 0; display: flex; flex-direction: column; }
figure svg { display: block; width: 100%; height: auto; margin-top: auto; padding-top: 10px; overflow: visible; }
figure .note { margin-top: 2px; }
svg * { stroke-linejoin: round; }
svg text { font-family: var(--sans); }
.wide { overflow-x: auto; }
.wide svg { min-width: 1000px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-top: 4px; font-size: 12.5px; color: var(--muted); }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; margin-right: 6px; border-radius: 50%;
  background: var(--color); }
.k1, .b1 { --color: var(--c1); } .k2, .b2 { --color: var(--c2); } .k3, .b3 { --color: var(--c3); }
.k4, .b4 { --color: var(--c4); } .k5, .b5 { --color: var(--c5); } .k6, .b6 { --color: var(--c6); }
.warning { margin-bottom: 14px; background: var(--warned); border-color: var(--warn); }
.warning h3 { color: var(--warn); }
.warning ul { margin: 6px 0; padding: 0; list-style: none; font-size: 14px; }
.scroll { overflow-x: auto; padding: 4px 18px; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; }
th { padding: 10px 14px 8px 0; text-align: left; font-weight: 500; font-size: 12.5px; color: var(--muted);
  white-space: nowrap; }
td { padding: 7px 14px 7px 0; border-top: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
.num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.texts td { line-height: 1.4; overflow-wrap: anywhere; min-width: 120px; }
.texts td.num { min-width: 0; }
.text { max-height: 16.8em; overflow-y: auto; white-space: pre-wrap; }
.texts td.num.up, .texts td.num.down { font-weight: 600; }
.aside { color: var(--muted); }
.up { color: var(--up); } .down { color: var(--down); } .same { color: var(--muted); }
code, .code .text { font: 12.5px/1.4 var(--mono); }
.texts .code { width: 27%; }
.range { width: 34%; vertical-align: middle; }
.track { position: relative; height: 8px; border-radius: 4px; background: var(--soft); }
.span { position: absolute; top: 0; bottom: 0; min-width: 2px; border-radius: 4px; }
.span.up { background: var(--up); } .span.down { background: var(--down); }
.tick { position: absolute; top: -3px; bottom: -3px; width: 2px; margin-left: -1px; border-radius: 1px;
  background: var(--ink); }
.gantt { display: grid; gap: 7px; padding-top: 18px; padding-bottom: 18px; }
.call { display: grid; grid-template-columns: minmax(150px, 330px) 1fr 68px 44px; gap: 12px; align-items: center;
  font-size: 13.5px; }
.what { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: var(--muted); }
.what b { margin-right: 6px; font: 600 12.5px var(--mono); color: var(--ink); }
.lane { position: relative; height: 18px; border-radius: 5px; background: var(--soft); }
.bar { position: absolute; top: 0; bottom: 0; min-width: 2px; border-radius: 4px; background: var(--color); }
details { margin-bottom: 12px; }
summary { padding: 6px 0; cursor: pointer; font-weight: 600; font-size: 14px; }
summary:hover { color: var(--c1); }
pre { margin: 0; overflow-x: auto; font: 12.5px/1.5 var(--mono); max-height: 480px; }
@media (max-width: 700px) {
  .call { grid-template-columns: 1fr 60px 38px; gap: 2px 8px; }
  .call .lane { grid-column: 1 / -1; order: 1; height: 10px; }
  .big { font-size: 26px; }
  .range { display: none; }
  header, main { padding-left: 14px; padding-right: 14px; }
}
@media print { body { background: none; } .card { break-inside: avoid; } nav { display: none; } }
"""
