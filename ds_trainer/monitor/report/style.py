"""The style sheet of the report: light and dark, from phone to desktop."""

from __future__ import annotations

_LIGHT = (
    "--page:#f6f7f9;--card:#fff;--text:#1c2128;--soft:#57606a;--line:#d9dee5;--good:#1a7f37;--bad:#b3261e;"
    "--warn:#8a5a00;--trained:#d7f0dc;--masked:#eceff3;"
    "--c0:#2563a8;--c1:#c2500b;--c2:#1b7f5c;--c3:#8447a8;--c4:#9a7416;--c5:#5f6670;"
)
_DARK = (
    "--page:#0f1318;--card:#181d24;--text:#e6eaf0;--soft:#9aa5b3;--line:#2c343f;--good:#56c271;--bad:#ff8078;"
    "--warn:#e3b341;--trained:#17402a;--masked:#262d37;"
    "--c0:#6ea8ef;--c1:#f0944d;--c2:#4cc59b;--c3:#c390e8;--c4:#d9b44a;--c5:#9aa5b3;"
)
_COLORS = "".join(
    f".c{n}{{stroke:var(--c{n})}}.dot.c{n},.f{n}{{fill:var(--c{n})}}.k{n}::before{{background:var(--c{n})}}"
    for n in range(6)
)
STYLE = f""":root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}}
main{{max-width:1120px;margin:0 auto;padding:16px}}
h1{{font-size:1.5rem;margin:.2em 0;overflow-wrap:anywhere}}
h2{{font-size:1.15rem;margin:0 0 .6em}}
h3{{font-size:.95rem;margin:1em 0 .3em}}
section,.card{{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin:0 0 16px}}
.cards{{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,240px),1fr));margin:0 0 16px}}
.card{{margin:0}}
.card h2{{font-size:.8rem;color:var(--soft);font-weight:600;margin:0}}
.big{{font-size:1.7rem;font-weight:650;line-height:1.25;overflow-wrap:anywhere}}
.soft{{color:var(--soft)}}.small{{font-size:.85rem}}
p{{margin:.3em 0;overflow-wrap:anywhere}}
.good{{color:var(--good)}}.bad{{color:var(--bad)}}.warn{{color:var(--warn)}}
ul{{margin:.3em 0;padding-left:1.2em}}li{{margin:.35em 0;overflow-wrap:anywhere}}
.charts{{display:grid;gap:16px;margin-top:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr))}}
figure{{margin:0;min-width:0}}figcaption{{font-weight:600;font-size:.9rem}}
svg{{display:block;width:100%;height:auto}}
.wide{{display:block}}.narrow{{display:none}}
@media (max-width:700px){{.wide{{display:none}}.narrow{{display:block}}main{{padding:10px}}}}
.line{{fill:none;stroke-width:1.8;stroke-linejoin:round}}.faint{{opacity:.35;stroke-width:1}}
.grid{{stroke:var(--line);stroke-width:1}}.axis{{stroke:var(--soft);stroke-width:1}}
.level{{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}}
.tick{{fill:var(--soft);font-size:11px}}.end{{text-anchor:end}}.mid{{text-anchor:middle}}
.spike{{fill:none;stroke:var(--bad);stroke-width:2}}.broken{{stroke:var(--bad);stroke-width:2.5;fill:none}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:.85rem}}
.key::before{{content:"";display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}}
.pale::before{{opacity:.4}}.hatched{{opacity:.4}}
.bar{{height:26px;border-radius:6px}}
.scroll{{overflow-x:auto;max-width:100%}}
table{{border-collapse:collapse;width:100%;font-size:.88rem}}
td,th{{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:break-word}}
th{{color:var(--soft);font-weight:600;white-space:nowrap}}.n{{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
pre,code{{font:.85em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
pre{{background:var(--page);border:1px solid var(--line);border-radius:6px;padding:10px;white-space:pre-wrap;
overflow-wrap:anywhere;margin:.4em 0}}
details{{margin:.5em 0}}summary{{cursor:pointer;color:var(--soft)}}
.sample{{background:var(--page);border:1px solid var(--line);border-radius:6px;padding:8px;margin:.4em 0;
white-space:pre-wrap;overflow-wrap:anywhere;font:.85em/1.6 ui-monospace,Menlo,Consolas,monospace}}
.trained{{background:var(--trained)}}.masked{{background:var(--masked);color:var(--soft)}}
.newrow{{border-left:3px solid var(--c1);padding-left:3px}}
@media (max-width:480px){{.big{{font-size:1.4rem}}th,td{{padding-right:6px}}}}
{_COLORS}"""
