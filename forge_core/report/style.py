"""The style sheet of a report. Its colours are the variables of ``themes``."""

STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0; border-bottom: 2px solid var(--grid); overflow-wrap: anywhere; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
h4 { margin: 1rem 0 .4rem; }
h5 { font-size: .95rem; margin: 0; }
a { color: var(--blue); text-decoration: none; }
a:hover { text-decoration: underline; }
.muted, figcaption, dt { color: var(--muted); font-size: .85rem; }
nav > ul { padding: 0; list-style: none; }
nav ul ul { display: inline; padding: 0; }
nav ul ul li { display: inline; margin-left: .8em; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; max-width: 1040px; display: block; }
figure.reward svg, figure.components svg { max-width: 820px; }
figure.staleness svg { max-width: 600px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--grid);
  overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 600; }
.problem { color: var(--red); overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 1rem; }
article { border: 1px solid var(--grid); border-radius: 6px; padding: .8rem; min-width: 0; }
article dl { margin: .5rem 0; } article dd { margin: 0 0 .5rem; } article p { margin: 0; overflow-wrap: anywhere; }
.components { margin: .2rem 0; padding: 0; list-style: none; color: var(--muted); font-size: .85rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace;
  max-height: 22rem; overflow-y: auto; unicode-bidi: isolate; }
@media print { nav { display: none; } pre { max-height: none; } }
"""
