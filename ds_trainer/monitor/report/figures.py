"""The sections with figures: curves, sources, time, memory, ranks, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from ds_trainer.monitor.memory import BYTES_PER_GB
from ds_trainer.monitor.metrics_file import LOSSES
from ds_trainer.monitor.report.charts import SERIES, Chart, Series, draw, histogram, shares, smoothed
from ds_trainer.monitor.report.html import rows_table, section, shown, table
from ds_trainer.monitor.report.run_files import is_number
from ds_trainer.utils.units import counted, human_bytes, human_count, human_duration

_FORMATS: dict[str, Callable[[float], str]] = {
    "learning_rate": lambda value: f"{value:.2g}",
    "tokens_per_second": human_count,
    "samples_per_second": human_count,
    "num_input_tokens_seen": human_count,
    "mfu": lambda value: f"{100 * value:.3g} %",
    "data_wait": lambda value: f"{100 * value:.3g} %",
    "memory_gb": lambda value: f"{value:.3g}",
}
_MAIN = ("grad_norm", "learning_rate", "tokens_per_second", "mfu")
_ELSEWHERE = (*LOSSES, "memory_gb")


def format_of(name: str) -> Callable[[float], str]:
    """How a logged value is written on an axis."""
    return _FORMATS.get(name, lambda value: f"{value:.4g}")


def curves_section(report: Mapping[str, Any]) -> str:
    """The loss, then everything else that was logged, with spikes."""
    curves, evaluations, spikes = report["curves"], report["evaluations"], report["spikes"]
    if not curves and not evaluations and not spikes:
        return section("Curves", '<p class="soft">Nothing was logged.</p>')
    parts = [
        f'<div class="{kind}">{draw(chart)}</div>'
        for kind, wide in (("wide", True), ("narrow", False))
        for chart in loss_charts(report, wide)
    ]
    charts = [draw(quantity_chart(name, curves[name], spikes)) for name in _MAIN if name in curves]
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    rest = [name for name in curves if name not in _MAIN and name not in _ELSEWHERE and len(curves[name]) > 1]
    if rest:
        more = "".join(draw(quantity_chart(name, curves[name], spikes)) for name in rest)
        opened = " open" if any(name.startswith("loss") for name in rest) else ""
        parts.append(f'<details{opened}><summary>More curves</summary><div class="charts">{more}</div></details>')
    if spikes:
        parts.append(_spike_table(spikes))
    return section("Curves", "".join(parts))


def loss_charts(report: Mapping[str, Any], wide: bool = True, levels: Sequence[tuple[str, float]] = ()) -> list[Chart]:
    """Training and evaluation losses over steps: one chart, or two if they are not of one kind.

    Args:
        report: the curves, evaluations and spikes of a run.
        wide: whether charts are twice as wide.
        levels: losses to compare with, ``(label, loss)``.
    """
    name = next((name for name in LOSSES if name in report["curves"]), "loss")
    points, evaluations = report["curves"].get(name, []), report["evaluations"]
    trend = smoothed(points)
    series = [Series("training", points, 0, faint=trend is not None)] if points else []
    series += [Series("training, smoothed", trend, 0)] if trend else []
    evaluated = [
        Series(shown(name), found, 1 + n, dots=len(found) < 60) for n, (name, found) in enumerate(evaluations.items())
    ]
    title, marks = f"{shown(name).capitalize()} over optimizer steps", _marks(name, report["spikes"])
    if name == "loss" or not evaluated:
        return [Chart(title, [*series, *evaluated], levels=levels, marks=marks, wide=wide)]
    other = Chart("Cross-entropy of evaluations over optimizer steps", evaluated, levels=levels, wide=wide)
    return [Chart(title, series, marks=marks, wide=wide), other]


def quantity_chart(name: str, points: Any, spikes: Any) -> Chart:
    """Something else that was logged."""
    return Chart(shown(name), [Series("", points, 0)], format_of(name), marks=_marks(name, spikes))


def _marks(name: str, spikes: Any) -> list[tuple[float, float | None, str]]:
    return [(spike["step"], spike["value"], _spike_text(spike)) for spike in spikes if spike["name"] == name]


def _spike_text(spike: Mapping[str, Any]) -> str:
    value = "not finite" if spike["value"] is None else f"{spike['value']:.4g}"
    return f"step {spike['step']:,}: {shown(spike['name'])} {value}, usually {_usual(spike)}"


def _usual(spike: Mapping[str, Any]) -> str:
    return "never finite" if spike["usual"] is None else f"{spike['usual']:.4g}"


def _spike_table(spikes: Any) -> str:
    rows = []
    for spike in spikes:
        steps = (
            f"{spike['step']:,}"
            if spike["first_step"] == spike["step"]
            else f"{spike['first_step']:,} to {spike['step']:,}"
        )
        value = "not finite" if spike["value"] is None else f"{spike['value']:.4g}"
        samples = "not known"
        if spike["samples"] is not None:
            more = f" and {spike['more']:,} more" if spike["more"] else ""
            samples = f"epoch {spike['epoch'] + 1}: {', '.join(map(str, spike['samples']))}{more}"
        rows.append((steps, shown(spike["name"]), value, _usual(spike), samples))
    head = ("steps", "value", "was", "usually", "positions in the dataset")
    return f"<h3>Spikes, and the samples of their steps</h3>{table(head, rows)}"


def time_section(time: Mapping[str, Any]) -> str:
    """Where each second went."""
    if not time["parts"]:
        return section("Where the time went", '<p class="soft">Not recorded for this run.</p>')
    rows = [(part["name"], part["share"], human_duration(part["seconds"])) for part in time["parts"]]
    notes = ["Seconds of the main process since it was started. Communication is what the host waits for other ranks."]
    if time["host_times"]:
        notes.append(
            "On a GPU the host runs ahead: forward and backward are the time to launch them, and the wait for the "
            "device counts where the host waits, mostly in the optimizer."
        )
    if time["between_processes_seconds"] > 0:
        notes.append(f"Between its processes the job had none for {human_duration(time['between_processes_seconds'])}.")
    if time["repeated_steps"]:
        notes.append(f"Repeated after restarts: {counted(time['repeated_steps'], 'step')}.")
    body = shares(rows) + "".join(f'<p class="soft small">{note}</p>' for note in notes)
    return section("Where the time went", body + _profile(time["profile"]))


def _profile(profile: Mapping[str, Any] | None) -> str:
    parts = (profile or {}).get("parts")
    if not isinstance(parts, Mapping) or not parts:
        return ""
    whole = sum(parts.values()) or 1.0
    rows = [(str(name), seconds / whole, f"{1000 * seconds:.2f} ms") for name, seconds in parts.items() if seconds > 0]
    return f"<h3>Profiled steps, mean of {(profile or {}).get('steps', '?')}</h3>{shares(rows)}"


def memory_section(report: Mapping[str, Any]) -> str:
    """Memory over time, against the limit and the plan."""
    memory, points = report["memory"], report["curves"].get("memory_gb", [])
    if not points:
        return ""
    limit, predicted = memory["limit_bytes"], memory["predicted_bytes"]
    levels = []
    if limit and (memory["on_gpu"] or memory["peak_bytes"] > 0.3 * limit):
        levels.append(("limit", limit / BYTES_PER_GB))
    if predicted and not memory["predicted_is_tensors"]:
        levels.append(("planned", predicted / BYTES_PER_GB))
    what = "peak of a device" if memory["on_gpu"] else "resident memory of the main process"
    chart = draw(
        Chart(f"Memory in GB: {what}", [Series("", points, 0)], format_of("memory_gb"), levels, from_zero=True)
    )
    texts = [f"most {human_bytes(memory['peak_bytes'])}"]
    if limit:
        whose = "a device" if memory["on_gpu"] else "this rank's share of the machine"
        texts.append(f"limit {human_bytes(limit)} ({whose})")
    if predicted:
        kind = "tensors alone" if memory["predicted_is_tensors"] else "whole device"
        texts.append(f"planned {human_bytes(predicted)} ({kind})")
    if memory["prediction_incomplete"]:
        texts.append(f"the plan lacks activations, because {memory['prediction_incomplete']}")
    return section("Memory", f'<div class="charts">{chart}</div><p class="soft small">{"; ".join(texts)}</p>')


def ranks_section(ranks: Mapping[str, Any] | None) -> str:
    """Step times of the ranks."""
    if not ranks:
        return ""
    heads = ("rank", "host", "step", "data", "waiting for others", "work")
    parts = ("step", "data", "communication", "work")
    rows = [
        (str(row["rank"]), row["host"], *(f"{1000 * row[part]:.1f} ms" if part in row else "" for part in parts))
        for row in ranks["rows"]
    ]
    text = f"Means of {ranks['windows']} windows of steps, {counted(ranks['world_size'], 'rank')}. "
    if ranks["notable"]:
        text += (
            f"In {ranks['notable']} windows a rank held up the others; last rank {ranks['slowest']}: {ranks['cause']}."
        )
    else:
        text += "No rank held up the others."
    return section("Ranks", f"{table(heads, rows)}<p class='soft small'>{text}</p>")


def experts_section(loads: Mapping[str, Mapping[str, float]]) -> str:
    """The last loads of divided experts; empty without them."""
    if not loads:
        return ""
    names = "entropy of the load", "share of the busiest expert", "experts without tokens", "exchange, ms a step"
    rows = [
        (name, f"{load['entropy']:.3f}", f"{100 * load['busiest_share']:.2g} %", f"{load['dead']:.0f}", f"{ms:.3g}")
        for name, load in loads.items()
        if (ms := 1000 * load.get("exchange_seconds", 0.0)) >= 0 and {"entropy", "busiest_share", "dead"} <= load.keys()
    ]
    text = (
        "Since the log before the last one, over all ranks. An entropy of 1 is an even load. Exchanges are those of "
        "the main process, with its waits for other ranks."
    )
    return section("Experts", f"{table(('layer', *names), rows)}<p class='soft small'>{text}</p>")


_MOST_SAMPLES, _MOST_CHARACTERS, _MOST_SOURCES = 20, 6000, 200


def data_section(data: Mapping[str, Any] | None) -> str:
    """The data card: counts, lengths and colored samples; empty without data.

    ``data_card.json`` in the output directory has what prepared the data. All keys are optional::

        {"figures": {"samples": 12000, "trained share": "61 %"},
         "sources": [{"name": "chats.jsonl", "samples": 8000, "tokens": 3100000, "truncated": 12}],
         "lengths": {"edges": [0, 128, 256, 512], "counts": [10, 200, 31]},
         "samples": [{"source": "chats.jsonl:3", "pieces": [{"text": "<|user|>Hi", "trained": false}, ...]}]}

    A piece with ``"new_row": true`` begins another sample within a packed row.
    """
    if not data:
        return ""
    parts = []
    figures, sources, lengths = data.get("figures"), data.get("sources"), data.get("lengths")
    if isinstance(figures, Mapping):
        parts.append(rows_table((str(name), _number(value)) for name, value in figures.items()))
    sources = [one for one in sources if isinstance(one, Mapping)] if isinstance(sources, list) else []
    if sources:
        names = list(dict.fromkeys(name for source in sources for name in source))
        rows = [[_number(source.get(name, "")) for name in names] for source in sources[:_MOST_SOURCES]]
        parts.append(f"<h3>Sources</h3>{table(names, rows)}")
    if isinstance(lengths, Mapping):
        bars = histogram("Tokens of a sample", _numbers(lengths.get("edges")), _numbers(lengths.get("counts")))
        parts.append(f'<div class="charts">{bars}</div>')
    samples = data.get("samples")
    if isinstance(samples, list) and samples:
        parts.append('<h3>Samples</h3><p class="small"><span class="trained">trained on</span> '
                     '<span class="masked">masked</span></p>')  # fmt: skip
        parts += [_sample(sample) for sample in samples[:_MOST_SAMPLES] if isinstance(sample, Mapping)]
    return section("Data", "".join(parts)) if parts else ""


def _sample(sample: Mapping[str, Any]) -> str:
    pieces, room = [], _MOST_CHARACTERS
    given = sample.get("pieces")
    for piece in given if isinstance(given, list) else ():
        if not isinstance(piece, Mapping):
            continue
        text = str(piece.get("text", ""))[:room]
        room -= len(text)
        kind = "trained" if piece.get("trained") else "masked"
        pieces.append(f'<span class="{kind}{" newrow" if piece.get("new_row") else ""}">{escape(text)}</span>')
        if room <= 0:
            pieces.append(" ...")
            break
    source = escape(str(sample.get("source", "")))
    return f'<div class="soft small">{source}</div><div class="sample">{"".join(pieces)}</div>'


def _numbers(values: Any) -> list[float]:
    """``values`` if they are numbers, else none."""
    return values if isinstance(values, list) and all(map(is_number, values)) else []


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


_MOST_ROWS = 100


def source_section(losses: Mapping[str, Mapping[str, Any]]) -> str:
    """The section; empty without losses.

    Args:
        losses: curves by source, by the name of the loss (``loss``, ``eval_loss``).
    """
    if not losses:
        return ""
    names = list(dict.fromkeys(name for by_source in losses.values() for name in by_source))
    charts = [_source_chart(loss, by_source) for loss, by_source in losses.items()]
    heads = ["source", *(f"{shown(loss)}: {what}" for loss in losses for what in ("first", "lowest", "last"))]
    rows = [
        [name, *(text for by_source in losses.values() for text in _first_lowest_last(by_source.get(name)))]
        for name in names
    ]
    more = "" if len(names) <= _MOST_ROWS else f'<p class="soft small">{len(names) - _MOST_ROWS:,} more sources.</p>'
    body = f'<div class="charts">{"".join(charts)}</div>{table(heads, rows[:_MOST_ROWS])}{more}'
    return section("Loss of each source", body)


def _source_chart(loss: str, by_source: Mapping[str, Any]) -> str:
    """The curves of as many sources as there are colors, those with the highest last loss."""
    names = sorted(by_source, key=lambda name: -by_source[name][-1][1])[:SERIES]
    series = [Series(name, by_source[name], n, dots=len(by_source[name]) < 2) for n, name in enumerate(names)]
    title = (
        shown(loss) if len(by_source) <= SERIES else f"{shown(loss)}, the {SERIES} highest of {len(by_source)} sources"
    )
    return draw(Chart(title, series))


def _first_lowest_last(points: Any) -> list[str]:
    if not points:
        return ["", "", ""]
    values = [value for _, value in points]
    return [f"{value:.4g}" for value in (values[0], min(values), values[-1])]
