"""Plots as inline SVG: axes with units, lines, points, bars, a legend. No script, no network.

Marks carry classes (`compute`, `p`, `fetch`, ...) whose colours are CSS variables of `STYLE`, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

__all__ = ["STYLE", "Axis", "Chart", "standalone", "ticks"]

STYLE = """
:root{--ink:#1c2430;--soft:#5b6675;--line:#d9dee5;--page:#f5f6f8;--card:#fff;
--compute:#2f7f86;--prep:#d99000;--fetch:#c8502a;--thrash:#9b5aa5;--best:#1f5fbf;--wait:#b8325f}
@media (prefers-color-scheme:dark){:root{--ink:#e8ebf0;--soft:#9aa6b6;--line:#38424f;--page:#12161c;--card:#1b212a;
--compute:#5fb7bd;--prep:#f0b23e;--fetch:#f07f55;--thrash:#cf8fd8;--best:#7fb0ff;--wait:#f27a9c}}
svg{display:block;width:100%;height:auto;overflow:visible;font-family:system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
svg text{fill:var(--ink);font-size:13px}
svg .soft{fill:var(--soft);font-size:12px}
svg .grid{stroke:var(--line);stroke-width:1}
svg .axis{stroke:var(--soft);stroke-width:1}
svg .line{fill:none;stroke:var(--c);stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}
svg .strong{stroke-width:3.5}
svg .dashed{stroke-dasharray:6 5}
svg .bar{fill:var(--c)}
svg .point{fill:var(--c);stroke:var(--card);stroke-width:2}
svg .hollow{fill:var(--card);stroke:var(--c);stroke-width:2.25}
.compute{--c:var(--compute)}.prep{--c:var(--prep)}.fetch{--c:var(--fetch)}.thrash{--c:var(--thrash)}.best{--c:var(--best)}
.wait{--c:var(--wait)}.ink{--c:var(--ink)}
"""

WIDTH, HEIGHT = 560, 340
_LEFT, _RIGHT, _BOTTOM = 62, 18, 48
_INDENT = 54
_HEAD, _ROW = 34, 19
"""Above the plot: the y axis's label, and each row of the legend."""
_LETTER = 7.1
"""Mean width of a letter of 13 px, on the generous side."""

Point = tuple[float, float]
Mark = Literal["line", "dashed", "strong", "bar", "point", "hollow"]


@dataclass(frozen=True)
class Axis:
    """What runs along it, from where to where."""

    label: str
    low: float
    high: float
    percent: bool = False
    whole: bool = False
    """It counts things: no ticks between whole numbers."""


def ticks(low: float, high: float, most: int = 6, least: float = 0.0) -> list[float]:
    """Round numbers from low to high: steps of 1, 2 or 5 times a power of ten, and no less than the least."""
    if high <= low:
        return [low]
    rough = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass
class Chart:
    """A plot under construction; `text()` is the SVG."""

    title: str
    summary: str
    """What it shows, for those who cannot see it."""
    x: Axis
    y: Axis
    _drawn: list[Callable[[], str]] = field(default_factory=list)
    _legend: list[tuple[str, str, Mark]] = field(default_factory=list)
    _top: float = 0.0

    def line(self, points: Sequence[Point], colour: str, label: str, mark: Mark = "line") -> None:
        """A line through points."""

        def drawn() -> str:
            path = "M" + "L".join(f"{self._x(x):.1f} {self._y(y):.1f}" for x, y in points)
            return f'<path class="line {mark} {colour}" d="{path}"><title>{escape(label)}</title></path>'

        self._add(drawn, colour, label, mark)

    def points(self, points: Sequence[tuple[float, float, str]], colour: str, label: str, mark: Mark = "point") -> None:
        """Circles; each has its own title."""

        def drawn() -> str:
            return "".join(
                f'<circle class="{mark} {colour}" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="6">'
                f"<title>{escape(title)}</title></circle>"
                for x, y, title in points
            )

        if points:
            self._add(drawn, colour, label, mark)

    def bars(self, columns: Sequence[tuple[float, float, float, float]], colour: str, label: str) -> None:
        """Columns (left, right, from, to)."""

        def drawn() -> str:
            return "".join(
                f'<rect class="bar {colour}" x="{self._x(left):.2f}" y="{self._y(high):.2f}" '
                f'width="{self._x(right) - self._x(left):.2f}" height="{self._y(low) - self._y(high):.2f}"/>'
                for left, right, low, high in columns
                if high > low
            )

        self._add(drawn, colour, label, "bar")

    def _add(self, drawn: Callable[[], str], colour: str, label: str, mark: Mark) -> None:
        self._drawn.append(drawn)
        self._legend.append((label, colour, mark))

    def text(self) -> str:
        """The plot as one SVG element."""
        key = self._key()  # first: the more rows it has, the lower the plot begins
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.summary)}</desc>"
            + "".join([*self._grid(), *(drawn() for drawn in self._drawn), *key])
            + "</svg>"
        )

    def _x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - self.x.low) / (self.x.high - self.x.low)

    def _y(self, value: float) -> float:
        room = HEIGHT - self._top - _BOTTOM
        return HEIGHT - _BOTTOM - room * (value - self.y.low) / (self.y.high - self.y.low)

    def _key(self) -> list[str]:
        """The legend, above the plot."""
        parts = []
        x, y = float(_LEFT - _INDENT), 14.0
        for label, colour, mark in self._legend:
            width = 28 + _LETTER * len(label) + 14
            if x + width > WIDTH + 14 and x > _LEFT:
                x, y = float(_LEFT - _INDENT), y + _ROW
            parts.append(_sample(x, y - 4, colour, mark))
            parts.append(f'<text x="{x + 28:.0f}" y="{y:.0f}">{escape(label)}</text>')
            x += width
        self._top = y + _HEAD
        return parts

    def _grid(self) -> list[str]:
        parts = []
        floor, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        for value in ticks(self.y.low, self.y.high):
            y = self._y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            parts.append(_text(_LEFT - 8, y + 4, _tick(value, self.y), "end"))
        for value in ticks(self.x.low, self.x.high, 8, 1.0 if self.x.whole else 0.0):
            x = self._x(value)
            parts.append(f'<path class="axis" d="M{x:.1f} {floor}v5"/>')
            parts.append(_text(x, floor + 19, _tick(value, self.x), "middle"))
        parts.append(f'<path class="axis" d="M{_LEFT} {floor}H{right}"/>')
        parts.append(_text((_LEFT + right) / 2, HEIGHT - 8, self.x.label, "middle"))
        parts.append(_text(_LEFT - _INDENT, self._top - 11, self.y.label, "start"))
        return parts


def standalone(plot: str) -> str:
    """A plot as a file of its own, with its colours and a background."""
    opened, rest = plot.split(">", 1)
    namespace = opened.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"').replace(
        f"0 0 {WIDTH} {HEIGHT}", f"-10 -10 {WIDTH + 20} {HEIGHT + 20}"
    )
    background = f'<rect x="-10" y="-10" width="{WIDTH + 20}" height="{HEIGHT + 20}" fill="var(--card)"/>'
    return f"{namespace}><style>{STYLE}svg{{overflow:hidden}}</style>{background}{rest}\n"


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text class="soft" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _tick(value: float, axis: Axis) -> str:
    if axis.percent:
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def _sample(x: float, y: float, colour: str, mark: Mark) -> str:
    """What stands before a label of the legend."""
    if mark == "bar":
        return f'<rect class="bar {colour}" x="{x + 6:.0f}" y="{y - 6:.0f}" width="12" height="12" rx="2"/>'
    if mark in ("point", "hollow"):
        return f'<circle class="{mark} {colour}" cx="{x + 12:.0f}" cy="{y:.0f}" r="6"/>'
    return f'<path class="line {mark} {colour}" d="M{x:.0f} {y:.0f}h22"/>'
