"""A run as one page that needs nothing beside it: no network, no script; for a phone or a desk, by day or by night."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from purlin_diffusion.commands.machine import versions
from purlin_diffusion.commands.timing.plots import bars, timeline
from purlin_diffusion.commands.timing.record import commit, gpu_names
from purlin_diffusion.commands.timing.rows import Result, Row
from purlin_diffusion.commands.timing.table import (
    DETAILS,
    HOST,
    HOST_SAYS,
    TITLES,
    TRUTH,
    TRUTH_SAYS,
    details,
    ended_early,
    headline,
    host_lines,
    likeness,
    names_by_how,
    reasons,
    truths,
    unwatchable,
)
from purlin_diffusion.commands.timing.warmth import said, unlike

STYLE = Path(__file__).with_name("page.css")


def page(*results: Result) -> str:
    """HTML, of one run: its sizes, one after the other."""
    options = results[0].options
    title = f"Latency of {options.model} on {options.ranks} rank{'s' * (options.ranks > 1)}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(part for result in results for part in of_size(result)),
            f"<p>{escape(where(results[0]))}</p></body></html>\n",
        ]
    )


def of_size(result: Result) -> Iterator[str]:
    yield paragraphs(headline(result).splitlines())
    yield from sections(result)


def sections(result: Result) -> Iterator[str]:
    if result.measured:
        yield from figures(result)
    if missing := reasons(result.rows):
        items = (f"<li><b>{escape(why)}</b><br>{escape(who)}</li>" for why, who in missing)
        yield f'<h2>What was not, and why</h2><ol class="why">{"".join(items)}</ol>'


def figures(result: Result) -> Iterator[str]:
    yield "<h2>Milliseconds a picture</h2>" + bars(result.measured)
    yield "<p>Bars are medians, lines go from the least to the most; then how many times as fast as the best of one rank, eager.</p>"
    yield table(TITLES, names_by_how(result))
    yield "<h2>What was measured</h2>" + table(DETAILS, [details(row) for row in result.measured])
    yield paragraphs([*said(result.warmth), *unlike(result.warmth), *ended_early(result)])
    if true := truths(result):
        yield f"<h2>Errors</h2><p>{escape(TRUTH_SAYS)}</p>" + table(TRUTH, true)
    if hosts := host_lines(result):
        yield f"<h2>The host</h2><p>{escape(HOST_SAYS)}</p>" + table(HOST, hosts)
    yield "<h2>One step</h2>" + timelines(result.measured) + paragraphs([*unwatchable(result), *unwatched(result)])
    if shown := [row for row in result.measured if row.picture]:
        yield f'<h2>The same picture</h2><div class="pictures">{"".join(map(figure, shown))}</div>'


def paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def unwatched(result: Result) -> list[str]:
    """Which modes nobody looked at, and why."""
    names = [row.mode.title for row in result.measured if not row.profile and not row.note]
    why = "the run ended before" if result.asked.watch else "--no-watch"
    return [f"Not looked at ({why}): {'; '.join(names)}"] if names else []


def timelines(rows: Sequence[Row]) -> str:
    """Of those that were looked at."""
    plots = [
        f"<h3>{escape(row.mode.title)}</h3>{timeline(row.profile)}" for row in rows if row.profile and row.profile.lanes
    ]
    if not any(row.profile for row in rows):
        return ""
    if not plots:
        return "<p>No exchange was seen: on one rank there is none, and of other libraries' only those on GPUs can be seen.</p>"
    return "".join(plots) + (
        "<p>The first rank, in a call of its own (on a GPU under torch's profiler, which slows the step itself);"
        " waiting for other ranks counts as exchange.</p>"
    )


def figure(row: Row) -> str:
    """The first rank's picture and how far it is from that of one rank."""
    source = base64.b64encode(row.picture or b"").decode()
    apart = f"difference: {likeness(row)}" if row.likeness else "the reference"
    caption = f"{escape(row.mode.title)}<br>{escape(apart)}"
    return f'<figure><img alt="{escape(row.mode.title)}" src="data:image/png;base64,{source}"><figcaption>{caption}</figcaption></figure>'


def where(result: Result) -> str:
    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"GPUs: {gpu_names()}. Commit {result.asked.commit or commit()}. {known}."
