"""A small chart as SVG: lines, labelled points, a rule across."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from ..atomic import new_file

Point = tuple[float, float]

WIDTH, HEIGHT = 800, 440
LEFT, RIGHT, TOP, BOTTOM = 76, 640, 44, 388
LABEL_HEIGHT = 13
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2", "#7f7f7f")


@dataclass
class Axis:
    """Maps data to pixels. ``ticks`` None: decades on a log axis, else about six round numbers."""

    label: str
    log: bool = False
    ticks: Sequence[float] | None = None

    def span(self, values: Sequence[float]) -> tuple[float, float]:
        low, high = min(values), max(values)
        if self.log:
            return low / 1.3, high * 1.3
        room = (high - low or abs(high) or 1.0) * 0.06
        return (0.0 if low >= 0 else low - room), high + room

    def place(self, value: float, span: tuple[float, float]) -> float:
        """0 at the axis' start, 1 at its end."""
        low, high = (math.log(end) for end in span) if self.log else span
        return ((math.log(value) if self.log else value) - low) / (high - low)

    def marks(self, span: tuple[float, float]) -> list[float]:
        low, high = span
        if self.ticks is not None:
            return [tick for tick in self.ticks if low <= tick <= high]
        if self.log:
            return [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
        size = 10.0 ** math.floor(math.log10((high - low) / 6))
        step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 7)
        return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass
class Chart:
    """Add lines and points, then save. On a log axis all values must be above zero."""

    title: str
    x: Axis
    y: Axis
    _lines: list[tuple[str, list[Point]]] = field(default_factory=list)
    _points: list[tuple[str, Point, str]] = field(default_factory=list)
    _rules: list[tuple[str, float]] = field(default_factory=list)

    def line(self, name: str, points: Sequence[Point]) -> None:
        self._lines.append((name, list(points)))

    def point(self, name: str, at: Point, colour: int = 0) -> None:
        self._points.append((name, at, COLOURS[colour % len(COLOURS)]))

    def rule(self, name: str, y: float) -> None:
        """A dashed line across at ``y``."""
        self._rules.append((name, y))

    def save(self, path: str) -> None:
        with new_file(path) as temporary:
            temporary.write_text(self.svg(), encoding="utf-8")

    def svg(self) -> str:
        points = [point for _, line in self._lines for point in line] + [at for _, at, _ in self._points]
        if not points:
            raise ValueError("a chart needs at least one point")
        x_span = self.x.span([x for x, _ in points])
        y_span = self.y.span([y for _, y in points] + [y for _, y in self._rules])

        def to_x(value: float) -> float:
            return LEFT + (RIGHT - LEFT) * self.x.place(value, x_span)

        def to_y(value: float) -> float:
            return BOTTOM - (BOTTOM - TOP) * self.y.place(value, y_span)

        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            _text(LEFT, 24, self.title, size=15),
        ]
        for tick in self.x.marks(x_span):
            out.append(_segment(to_x(tick), TOP, to_x(tick), BOTTOM, "#ddd"))
            out.append(_text(to_x(tick), BOTTOM + 18, f"{tick:,.6g}", anchor="middle"))
        for tick in self.y.marks(y_span):
            out.append(_segment(LEFT, to_y(tick), RIGHT, to_y(tick), "#ddd"))
            out.append(_text(LEFT - 8, to_y(tick) + 4, f"{tick:,.6g}", anchor="end"))
        out.append(_text((LEFT + RIGHT) / 2, HEIGHT - 12, self.x.label, anchor="middle"))
        middle = (TOP + BOTTOM) / 2
        out.append(_text(18, middle, self.y.label, anchor="middle", extra=f' transform="rotate(-90 18 {middle:.0f})"'))

        labels = []
        for name, y in self._rules:
            out.append(_segment(LEFT, to_y(y), RIGHT, to_y(y), "#333", dash=True))
            labels.append((RIGHT + 10, to_y(y), name, "#333"))
        for index, (name, line) in enumerate(self._lines):
            colour = COLOURS[index % len(COLOURS)]
            path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            out += [_dot(to_x(x), to_y(y), colour) for x, y in line]
            labels.append((RIGHT + 10, to_y(line[-1][1]), name, colour))
        for name, (x, y), colour in self._points:
            out.append(_dot(to_x(x), to_y(y), colour, radius=5))
            labels.append((to_x(x) + 9, to_y(y), name, colour))
        out += [_text(x, y + 4, name, colour=colour) for x, y, name, colour in _apart(labels)]
        return "\n".join([*out, "</svg>", ""])


def _apart(labels: list[tuple[float, float, str, str]]) -> list[tuple[float, float, str, str]]:
    """Moves labels up or down until none covers another."""
    placed: list[tuple[float, float, str, str]] = []
    for x, y, name, colour in sorted(labels, key=lambda label: label[1]):
        while any(
            abs(y - other[1]) < LABEL_HEIGHT and x < other[0] + _width(other[2]) and other[0] < x + _width(name)
            for other in placed
        ):
            y += 1
        placed.append((x, y, name, colour))
    return placed


def _width(text: str) -> float:
    return 7.0 * len(text)


def _text(x, y, text, *, anchor="start", size=12, colour="#222", extra="") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{colour}"{extra}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _segment(x0, y0, x1, y1, colour, *, dash=False) -> str:
    style = f'stroke="{colour}"' + (' stroke-dasharray="5 4"' if dash else "")
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {style}/>'


def _dot(x, y, colour, radius=3) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'
