"""Charts as inline SVG: drawn here, so that a page that holds them needs nothing else."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_MOST_POINTS = 400  # more are not seen, and the page grows
_TICKS = 5


@dataclass(frozen=True)
class Line:
    """One curve: its name and its points, (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]

    def thinned(self) -> "Line":
        """Every so many points, the last always."""
        step = math.ceil(len(self.points) / _MOST_POINTS)
        return self if step <= 1 else Line(self.name, (*self.points[:-1:step], self.points[-1]))


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Iterable[float], *, start: float, end: float) -> "_Axis":
        """Of all values; of one alone there is room on both sides."""
        found = list(values)
        low, high = min(found), max(found)
        room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, start, end)

    def pixel(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)

    def ticks(self) -> Iterator[float]:
        """Round numbers."""
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        yield from (number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1))


def draw_lines(title: str, lines: Sequence[Line], *, x_name: str) -> str:
    """Points that are no number are left out."""
    kept = [Line(line.name, tuple(point for point in line.points if all(map(math.isfinite, point)))) for line in lines]
    kept = [line.thinned() for line in kept if line.points]
    if not kept:
        return _figure(title, "", "nothing was measured")
    x = _Axis.over((each for line in kept for each, _ in line.points), start=_LEFT, end=_WIDTH - _RIGHT)
    y = _Axis.over((each for line in kept for _, each in line.points), start=_HEIGHT - _BOTTOM, end=_TOP)
    drawn = [*_grid(x, y, x_name), *(_draw(line, x, y, number) for number, line in enumerate(kept))]
    return _figure(title, "".join(drawn), _legend([line.name for line in kept]))


def draw_bars(
    title: str, bars: Sequence[tuple[str, float]], *, limit: tuple[str, float] | None = None, unit: str = ""
) -> str:
    """A bar per name, and a dashed line at the limit."""
    if not bars:
        return _figure(title, "", "nothing was measured")
    highest = max(*(value for _, value in bars), limit[1] if limit else 0.0, 1e-9)
    y = _Axis(0.0, highest * 1.05, _HEIGHT - _BOTTOM, _TOP)
    room = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    drawn = [*_horizontal(y)]
    for number, (name, value) in enumerate(bars):
        left, top = _LEFT + number * room, y.pixel(value)
        said = f"<title>{escape(name)}: {_short(value)} {escape(unit)}</title>"
        drawn.append(
            f'<rect class="bar" x="{left + room * 0.1:.2f}" y="{top}" width="{room * 0.8:.2f}"'
            f' height="{_HEIGHT - _BOTTOM - top:.2f}">{said}</rect>'
        )
        if number % math.ceil(len(bars) / 16) == 0:
            drawn.append(_text(left + room / 2, _HEIGHT - _BOTTOM + 16, name, anchor="middle"))
    if limit:
        drawn.append(f'<path class="limit" d="M{_LEFT} {y.pixel(limit[1])}H{_WIDTH - _RIGHT}"/>')
    told = f"dashed: {escape(limit[0])}, {_short(limit[1])} {escape(unit)}" if limit else escape(unit)
    return _figure(title, "".join(drawn), told)


def _draw(line: Line, x: _Axis, y: _Axis, number: int) -> str:
    pixels = [(x.pixel(first), y.pixel(second)) for first, second in line.points]
    path = "M" + "L".join(f"{first} {second}" for first, second in pixels)
    dots = "".join(
        f'<circle cx="{left}" cy="{top}" r="2.2"><title>{escape(line.name)} {_short(first)}: {_short(second)}</title>'
        "</circle>"
        for (left, top), (first, second) in zip(pixels, line.points, strict=True)
    )
    return f'<g class="line line-{number}"><path d="{path}"/>{dots}</g>'


def _grid(x: _Axis, y: _Axis, x_name: str) -> Iterator[str]:
    yield from _horizontal(y)
    for value in x.ticks():
        yield _text(x.pixel(value), _HEIGHT - _BOTTOM + 16, _short(value), anchor="middle")
    yield _text(_WIDTH - _RIGHT, _HEIGHT - 2, x_name, anchor="end")


def _horizontal(y: _Axis) -> Iterator[str]:
    for value in y.ticks():
        yield f'<path class="grid" d="M{_LEFT} {y.pixel(value)}H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 6, y.pixel(value) + 4, _short(value), anchor="end")


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(title: str, drawn: str, caption: str) -> str:
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img"'
        f' aria-label="{escape(title)}">{drawn}</svg>'
    )
    return f"<figure><h2>{escape(title)}</h2>{picture if drawn else ''}<figcaption>{caption}</figcaption></figure>"


def _legend(names: Sequence[str]) -> str:
    return " ".join(f'<span class="key key-{number}">{escape(name)}</span>' for number, name in enumerate(names))


def _short(value: float) -> str:
    """1234567 -> 1.235e+06, 0.30000000000000004 -> 0.3."""
    return f"{value:.4g}"
