"""The page of a report: one HTML file without scripts, network or other files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ds_trainer.monitor.report.charts import CHART_STYLE, DARK, LIGHT, SERIES
from ds_trainer.monitor.report.figures import (
    curves_section,
    data_section,
    experts_section,
    memory_section,
    ranks_section,
    source_section,
    time_section,
)
from ds_trainer.monitor.report.html import card, rows_table, section, shown, table
from ds_trainer.utils.units import counted, human_count, human_duration

_GOOD, _BAD, _OPEN = ("finished",), ("failed", "diverged", "killed"), ("stopped", "running", "unknown")
_STATES = {
    "finished": "Finished", "failed": "Failed", "diverged": "Diverged", "killed": "Killed",
    "stopped": "Stopped early", "running": "Running", "unknown": "Unknown"
}  # fmt: skip

_KEYS = "".join(f".k{n}::before{{background:var(--c{n})}}" for n in range(SERIES))
_STYLE = f""":root{{color-scheme:light dark;{LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}
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
.legend{{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:.85rem}}
.key::before{{content:"";display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}}
.pale::before{{opacity:.4}}
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
{CHART_STYLE}{_KEYS}"""


def html_page(title: str, body: Sequence[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def report_page(report: Mapping[str, Any]) -> str:
    """The page of :func:`ds_trainer.monitor.report.contents.report_of`."""
    summary = report["summary"]
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(report["made"]))
    body = [
        f"<h1>{escape(report['name'])}</h1>",
        f'<p class="soft small">{escape(report["directory"])}, report of {made}</p>',
        f'<div class="cards">{"".join(first_cards(summary))}</div>',
        _advice(summary["advice"]),
        _failure(summary["outcome"]),
        curves_section(report),
        source_section(report["sources"]),
        time_section(report["time"]),
        memory_section(report),
        ranks_section(report["ranks"]),
        experts_section(report["experts"]),
        data_section(report["data"]),
        _results(report["results"]),
        _checks(report["checks"]),
        _incidents(report),
        _settings(report),
    ]
    return html_page(f"{report['name']}: report of a training", body)


def state_class(state: str) -> str:
    """The color class of a state."""
    return "good" if state in _GOOD else "bad" if state in _BAD else "warn"


def state_name(state: str) -> str:
    """The state as a person says it."""
    return _STATES.get(state, state)


def first_cards(summary: Mapping[str, Any]) -> list[str]:
    """Did it work, how good, how fast, what it cost."""
    outcome = summary["outcome"]
    state = f'<span class="{state_class(outcome["state"])}">{escape(state_name(outcome["state"]))}</span>'
    return [
        card("Did it work?", state, [outcome["text"]]),
        card("How good?", *quality_texts(summary["quality"])),
        card("How fast?", *speed_texts(summary["speed"])),
        card("What did it cost?", *cost_texts(summary["cost"])),
    ]


def quality_texts(quality: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The figure and the lines of the card."""
    lines: list[str] = []
    no_loss = "loss not finite" if quality["loss_not_finite"] else "no loss logged"
    big = no_loss if quality["recent_loss"] is None else f"loss {quality['recent_loss']:.4g}"
    if quality["recent_loss"] is not None:
        lines.append(f"training loss {quality['first_loss']:.4g} at the start, {quality['last_loss']:.4g} at the end")
    for name, points in quality["evaluations"].items():
        best = f"{points['best']:.4g} at step {points['best_step']:,.0f}"
        if not lines or big.startswith("loss"):
            big = f"{shown(name)} {points['last']:.4g}"
        lines.append(f"{shown(name)}: best {best}, last {points['last']:.4g}")
    lines += [f"{shown(name)}: {value:.4g}" for name, value in list(quality["metrics"].items())[:6]]
    if not quality["evaluations"]:
        lines.append("nothing was evaluated")
    return escape(big), lines


def speed_texts(speed: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The figure and the lines of the card."""
    tokens, samples, step = speed["tokens_per_second"], speed["samples_per_second"], speed["step_seconds"]
    big = f"{human_count(tokens)} tokens/s" if tokens else f"{human_count(samples)} samples/s" if samples else "unknown"
    lines: list[str] = []
    if step:
        predicted = speed["predicted_step_seconds"]
        plan = f" (predicted {human_seconds(predicted[1])})" if predicted else ""
        lines.append(f"{human_seconds(step)} per step{plan}")
    if speed["mfu"] is not None:
        lines.append(f"MFU {100 * speed['mfu']:.1f} %, {speed['tflops_per_device']:.3g} TFLOP/s per device")
    elif speed["tflops_per_device"] is not None:
        why = "no MFU: the peak of the device is not known"
        lines.append(f"{speed['tflops_per_device']:.3g} TFLOP/s per device; {why}")
    if speed["data_wait"] is not None:
        lines.append(f"{100 * speed['data_wait']:.1f} % of the time of steps waits for data")
    return escape(big), lines


def human_seconds(seconds: float) -> str:
    """``84 ms`` or ``1.2 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else human_duration(seconds)


def cost_texts(cost: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The figure and the lines of the card."""
    hours = cost["device_hours"]
    big = f"{hours:.3g} device hours" if hours is not None else human_duration(cost["wall_seconds"])
    lines = []
    if cost["devices"]:
        devices = f"{cost['devices']:,} device{'s' if cost['devices'] != 1 else ''}"
        lines.append(f"{human_duration(cost['wall_seconds'])} on {devices}")
    if cost["price"] is not None:
        big = f"{cost['price']:,.2f}"
        lines.append(f"{hours:.3g} device hours at {cost['device_hour_price']:,.4g} each")
    else:
        lines.append("price: set report_device_hour_price, or pass --device-hour-price")
    return escape(big), lines


def _advice(advice: Sequence[Mapping[str, str]]) -> str:
    if not advice:
        return section("What to change next", '<p class="soft">Nothing in this run asks for a change.</p>')
    items = (
        f"<li><b>{escape(one['change'])}</b> <span class='soft'>{escape(one['why'])}</span></li>" for one in advice
    )
    return section("What to change next", f"<ul>{''.join(items)}</ul>")


def _failure(outcome: Mapping[str, Any]) -> str:
    if not outcome["details"]:
        return ""
    code = (
        f"<p class='soft'>Exit code {escape(str(outcome['exit_code']))}.</p>"
        if outcome["exit_code"] is not None
        else ""
    )
    return section("The error", f"<pre>{escape(outcome['details'][-6000:])}</pre>{code}")


def _results(results: Mapping[str, Any] | None) -> str:
    if not results:
        return ""
    parts = []
    evaluation = results.get("evaluation") or {}
    if evaluation.get("verdict"):
        parts.append(f"<p>{escape(str(evaluation['verdict']))}</p>")
    sample = results.get("sample") or {}
    if sample.get("text"):
        text = f"{sample.get('prompt') or ''}{sample['text']}"[:4000]
        parts.append(f'<h3>Sample of the saved model</h3><div class="sample">{escape(text)}</div>')
    return section("Results of the recipe", "".join(parts)) if parts else ""


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    if not checks:
        text = (
            "No check was recorded: the self-test runs once per installation, and weights are compared with their "
            "files if there are any."
        )
        return section("What was proven", f'<p class="soft">{text}</p>')
    return section("What was proven", rows_table([(str(one["check"]), str(one["text"])) for one in checks]))


def _incidents(report: Mapping[str, Any]) -> str:
    rows = [
        (_clock(one.get("time")), str(one["kind"]), _step(one.get("step")), str(one["text"])[:2000])
        for one in report["incidents"]
    ]
    parts = [table(("time", "kind", "step", "what"), rows)] if rows else ['<p class="soft">None.</p>']
    if report["incident_files"]:
        files = "".join(f"<li><code>{escape(name)}</code></li>" for name in report["incident_files"][:50])
        parts.append(f"<h3>Details in</h3><ul>{files}</ul>")
    processes = [
        (
            _clock(one["began"]), f"{one['first_step']:,} to {one['last_step']:,}", str(one["host"] or ""),
            f"{one['devices'] or ''}", human_duration(max(0.0, one["ended"] - one["began"])), str(one["outcome"])
        )
        for one in report["processes"]
    ]  # fmt: skip
    if processes:
        head = ("began", "steps", "host", "devices", "time", "end")
        parts.append(f"<h3>Processes that trained this run</h3>{table(head, processes)}")
    return section("Incidents and restarts", "".join(parts))


def _settings(report: Mapping[str, Any]) -> str:
    parts: list[str] = []
    if report["command"]:
        parts.append(f"<pre>{escape(report['command'])}</pre>")
    rows = [
        (str(one["name"]), _value(one["value"]), _value(one["default"]), str(one["origin"]))
        for one in report["arguments"]
    ]
    if rows:
        head = ("argument", "value", "default", "from")
        parts.append(f"<h3>Arguments that differ from their defaults</h3>{table(head, rows)}")
    git = report["git"]
    facts = [("working directory", str(report["working_directory"]))] if report["working_directory"] else []
    if git:
        changed = f", {counted(git['changed_files'], 'file')} changed" if git["changed_files"] else ", no changes"
        facts.append(("git", f"{git['commit'][:12]} on {git['branch']}{changed}"))
    facts += [(name, str(text)) for name, text in report["machine"].items() if text]
    facts += [(name, str(number)) for name, number in report["versions"].items()]
    if facts:
        parts.append(f"<h3>Machine and versions</h3>{rows_table(facts)}")
    if report["header"]:
        header = [(str(row[0]), str(row[1])) for row in report["header"] if len(row) == 2]
        parts.append(f"<details><summary>Header of the run</summary>{rows_table(header)}</details>")
    return section("Command and settings", "".join(parts) or '<p class="soft">Not recorded.</p>')


def _value(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _step(step: Any) -> str:
    return f"{step:,}" if isinstance(step, (int, float)) else ""


def _clock(seconds: Any) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds)) if isinstance(seconds, (int, float)) else ""
