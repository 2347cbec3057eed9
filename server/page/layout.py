"""The HTML page: its template, style and charts, in Python because a bundle carries no HTML."""

from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flwr_distill.server.page.drawings import Series, line_chart
from flwr_distill.strategies.common.sections import Figure, Section

SCROLLING = Markup('<div class="scroll">{}</div>')
"""Lets a wide drawing scroll on narrow pages."""

STYLE = """
:root { color-scheme: light dark; --paper: #f7f6f3; --panel: #ffffff; --ink: #1c2227;
  --soft: #5c6770; --line: #dcdfe1; --main: #2763a8; --faint: #8b979f; }
@media (prefers-color-scheme: dark) { :root { --paper: #13171a; --panel: #1b2024;
  --ink: #e4e8ea; --soft: #9ba7af; --line: #343c42; --main: #6aa5e6;
  --faint: #6f7b83; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 40px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 6px; }
p { margin: 0 0 12px; max-width: 72ch; }
.soft, figcaption, th, .tick, .axis { color: var(--soft); fill: var(--soft); }
code { font-size: .9em; overflow-wrap: anywhere; }
.figures { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
figure { margin: 0; padding: 14px; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure > svg { display: block; width: 100%; max-width: 560px; height: auto; margin: 0 auto; }
figcaption { font-size: .9rem; margin-top: 8px; max-width: 80ch; }
.scroll { overflow-x: auto; }
.scroll svg { display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 8px 0 0;
  list-style: none; font-size: .85rem; }
.legend li { overflow-wrap: anywhere; }
.legend li::before { content: ""; display: inline-block; width: 14px; height: 4px;
  border-radius: 2px; margin-right: 6px; vertical-align: middle; background: var(--c); }
.clusters { display: flex; flex-wrap: wrap; gap: 12px; align-items: center; }
.clusters svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .92rem; background: var(--panel); width: 100%; }
.table { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px;
  margin: 0 0 12px; background: var(--panel); }
th, td { text-align: left; padding: 5px 12px; border-bottom: 1px solid var(--line);
  vertical-align: top; font-variant-numeric: tabular-nums; }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 500; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.text { overflow-wrap: break-word; min-width: 8.5em; }
@media (max-width: 600px) { th, td { padding: 4px 6px; font-size: .82rem; }
  td.text { min-width: 5em; } td.number, th.number { white-space: normal; } }
.bar { min-width: 60px; width: 30%; }
@media (max-width: 600px) { .bar { display: none; } }
.bar span { display: block; height: 10px; margin-top: 7px; background: var(--main);
  border-radius: 2px; min-width: 1px; }
.numbers { display: grid; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; margin: 20px 0 0; padding: 4px 0;
  grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
.numbers div { padding: 8px 14px; }
.numbers dt { font-size: .82rem; color: var(--soft); }
.numbers dd { margin: 0; font-size: 1.2rem; font-weight: 600; overflow-wrap: anywhere; }
.sheet { max-width: 100%; background: #fff; padding: 6px; image-rendering: pixelated; }
.alarm { margin: 20px 0 0; padding: 4px 16px; background: var(--panel);
  border: 1px solid var(--line); border-left: 6px solid #cf4d45; border-radius: 8px; }
.alarm h2 { margin: 8px 0; color: #cf4d45; }
.alarm p { overflow-wrap: anywhere; }
summary { cursor: pointer; margin: 8px 0; }
.tick { font-size: 10.5px; } .axis { font-size: 11.5px; }
.grid { stroke: var(--line); stroke-width: 1; } .link { stroke: var(--faint); stroke-width: 1.4; }
.curve polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.curve circle { fill: var(--c); }
.curve.faint polyline { stroke-width: 1; opacity: .65; }
.curve.faint:hover polyline { stroke-width: 2.5; opacity: 1; }
.dot { fill: var(--main); }
.count { font-size: 9.5px; fill: var(--ink); pointer-events: none; }
rect { fill: var(--c); } rect.faded { opacity: .16; }
.node circle { fill: var(--panel); stroke: var(--c); stroke-width: 2; }
.node.head circle { fill: color-mix(in srgb, var(--c) 35%, var(--panel)); stroke-width: 3.5; }
.cluster { fill: none; stroke: var(--line); stroke-width: 1.5; }
.node text { font-size: 10.5px; text-anchor: middle; fill: var(--ink); }
.node.head text { font-weight: 700; }
.main { --c: var(--main); }
.faint, .s-none { --c: var(--faint); }
.s0 { --c: #3f7fc4; } .s1 { --c: #d9822b; } .s2 { --c: #3d9b56; } .s3 { --c: #cf4d45; }
.s4 { --c: #8f68bd; } .s5 { --c: #9a7350; } .s6 { --c: #d376ae; } .s7 { --c: #2b9cab; }
.s8 { --c: #8c9a2e; } .s9 { --c: #c2a000; }
"""

PAGE = """{% macro table_of(table) %}
<div class="table"><table>
<tr>{% for column in table.columns %}
<th{% if column.startswith("#") %} class="number"{% endif %}>{{ column.lstrip("#") }}</th>
{% endfor %}{% if table.bars %}<th class="bar"></th>{% endif %}</tr>
{% for row in table.rows %}
<tr>
{% for cell in row %}
<td class="{{ "number" if table.columns[loop.index0].startswith("#") else "text" }}">{{ cell }}</td>
{% endfor %}
{% if table.bars %}
<td class="bar"><span style="width: {{ "%.1f" | format(100 * table.bars[loop.index0]) }}%"></span>
</td>{% endif %}
</tr>
{% endfor %}
</table></div>
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>{{ style }}</style>
</head>
<body><main>
{% if back %}<p><a href="{{ back }}">Back to the federation</a></p>{% endif %}
<h1>{{ title }}</h1>
<p class="soft">{{ subtitle }}</p>
{% for section in sections if section.alarm %}
<section class="alarm">
<h2>{{ section.title }}</h2>
{% for line in section.text %}<p>{{ line }}</p>{% endfor %}
</section>
{% endfor %}
{% if numbers %}
<dl class="numbers">
{% for name, value in numbers %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% endif %}
{% for section in sections if not section.alarm %}
<section>
<h2>{{ section.title }}</h2>
{% for line in section.text %}<p>{{ line }}</p>{% endfor %}
{% if section.links %}
<p>{% for file, label in section.links %}<a href="{{ file }}">{{ label }}</a> {% endfor %}</p>
{% endif %}
{% for table in section.tables if not table.folded %}{{ table_of(table) }}{% endfor %}
{% if section.figures %}
<div class="figures">
{% for figure in section.figures %}
<figure{% if figure.wide %} class="wide"{% endif %}>
<h3>{{ figure.title }}</h3>
{{ figure.drawing }}
{% if figure.legend %}
<ul class="legend">
{% for style, label in figure.legend %}<li class="{{ style }}">{{ label }}</li>{% endfor %}
</ul>
{% endif %}
<figcaption>{{ figure.caption }}</figcaption>
</figure>
{% endfor %}
</div>
{% endif %}
{% for table in section.tables if table.folded %}
<details><summary>{{ table.folded }}</summary>{{ table_of(table) }}</details>
{% endfor %}
</section>
{% endfor %}
</main></body>
</html>
"""


def page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    numbers: Sequence[tuple[str, str]] = (),
    back: str = "",
) -> str:
    """Render a page; everything except `Markup` is escaped.

    `numbers` are pairs of name and value, shown first. `back` is where the dashboard has its first
    page; a file on a disk has none.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE).render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        numbers=numbers,
        back=back,
        style=Markup(STYLE),
    )


def chart(
    title: str,
    caption: str,
    series: Sequence[Series],
    y_label: str,
    *,
    x_label: str = "round",
    y_max: float | None = None,
) -> Figure:
    """Line chart with a legend of all but faint curves."""
    legend = [(curve.style, curve.label) for curve in series if curve.style != "faint"]
    drawing = line_chart(series, x_label, y_label, y_max)
    return Figure(title, caption, drawing, legend if len(series) > 1 else ())
