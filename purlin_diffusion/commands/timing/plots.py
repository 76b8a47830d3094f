"""Plots as SVG text, in the page's own colours (page.css), that grow and shrink with the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from purlin_diffusion.commands.timing.profile import Profile
from purlin_diffusion.commands.timing.rows import Row

WIDTH, BAR, GAP = 420, 18, 44  # of the drawing; a bar's height; from one row to the next
EDGE = 130  # room right of the longest bar, for its figure


def bars(rows: Sequence[Row]) -> str:
    """A bar a mode, as long as a picture takes, with a whisker from the least to the most."""
    spreads = [(row, row.whole_s) for row in rows if row.whole_s]
    longest = max((spread.most for _, spread in spreads), default=1.0)
    scale = (WIDTH - EDGE) / longest
    parts = []
    for index, (row, spread) in enumerate(spreads):
        top = index * GAP
        parts += [
            f'<text x="0" y="{top + 13}">{escape(row.mode.title)}</text>',
            f'<rect class="{row.mode.kind}" x="0" y="{top + 18}" width="{spread.median * scale:.1f}" height="{BAR}" rx="2"/>',
            line(spread.least * scale, spread.most * scale, top + 18 + BAR / 2),
            f'<text class="figure" x="{spread.most * scale + 8:.1f}" y="{top + 32}">{spread.median * 1e3:.0f} ms{gain(row)}</text>',
        ]
    return svg(parts, len(spreads) * GAP, "Milliseconds a picture, a bar a mode")


def gain(row: Row) -> str:
    return f", {row.speedup:.2f}x" if row.speedup is not None else ""


def line(start: float, end: float, y: float) -> str:
    return f'<line class="whisker" x1="{start:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}"/>'


def timeline(profile: Profile) -> str:
    """A lane a kind of work, over the milliseconds of one step."""
    scale = WIDTH / max(profile.step_ms, 1e-9)
    parts: list[str] = []
    for index, (name, spans) in enumerate(profile.lanes.items()):
        top = index * GAP
        busy = sum(end - start for start, end in spans)
        share = f"{name}: {busy:.2f} of {profile.step_ms:.2f} ms"
        parts.append(f'<text x="0" y="{top + 13}">{escape(share)}</text>')
        parts.append(f'<rect class="lane" x="0" y="{top + 18}" width="{WIDTH}" height="{BAR}"/>')
        parts += (
            f'<rect class="{name.split()[0]}" x="{start * scale:.2f}" y="{top + 18}"'
            f' width="{max(0.5, (end - start) * scale):.2f}" height="{BAR}"/>'
            for start, end in spans
        )
    return svg(parts, len(profile.lanes) * GAP, "One step: when exchanges run")


def svg(parts: Iterable[str], height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
