"""Line and bar charts as inline SVG, so that a page with charts needs no chart library (decisions/706)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_MAX_POINTS = 400  # per line: more would be indistinguishable and only make the page larger
_TARGET_TICKS = 5


@dataclass(frozen=True)
class Line:
    """One curve: its name and its points, (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]

    def downsample(self) -> "Line":
        """Return every nth point and the last one, at most _MAX_POINTS and one."""
        step = math.ceil(len(self.points) / _MAX_POINTS)
        return self if step <= 1 else Line(self.name, (*self.points[:-1:step], self.points[-1]))


@dataclass(frozen=True)
class _Axis:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def spanning(cls, values: Iterable[float], *, start: float, end: float) -> "_Axis":
        """Return an axis that contains all values, with a margin at both ends."""
        all_values = list(values)
        low, high = min(all_values), max(all_values)
        margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        return cls(low - margin, high + margin, start, end)

    def pixel(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)

    def ticks(self) -> Iterator[float]:
        """Yield multiples of 1, 2 or 5 times a power of ten, about _TARGET_TICKS of them."""
        rough = (self.high - self.low) / _TARGET_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        yield from (index * step for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1))


def draw_lines(title: str, lines: Sequence[Line], *, x_name: str) -> str:
    """Return a chart of the lines as an HTML figure; points with a value that is not finite are left out."""
    finite = [
        Line(line.name, tuple(point for point in line.points if all(map(math.isfinite, point)))) for line in lines
    ]
    drawable = [line.downsample() for line in finite if line.points]
    if not drawable:
        return _figure(title, "", "nothing was measured")
    x_axis = _Axis.spanning((x for line in drawable for x, _ in line.points), start=_LEFT, end=_WIDTH - _RIGHT)
    y_axis = _Axis.spanning((y for line in drawable for _, y in line.points), start=_HEIGHT - _BOTTOM, end=_TOP)
    elements = [
        *_grid(x_axis, y_axis, x_name),
        *(_polyline(line, x_axis, y_axis, index) for index, line in enumerate(drawable)),
    ]
    return _figure(title, "".join(elements), _legend([line.name for line in drawable]))


def draw_bars(
    title: str, bars: Sequence[tuple[str, float]], *, limit: tuple[str, float] | None = None, unit: str = ""
) -> str:
    """Return a bar chart as an HTML figure, with a dashed line at the limit."""
    if not bars:
        return _figure(title, "", "nothing was measured")
    highest = max(*(value for _, value in bars), limit[1] if limit else 0.0, 1e-9)
    y_axis = _Axis(0.0, highest * 1.05, _HEIGHT - _BOTTOM, _TOP)
    slot = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    elements = [*_horizontal_grid(y_axis)]
    for index, (name, value) in enumerate(bars):
        left, top = _LEFT + index * slot, y_axis.pixel(value)
        tooltip = f"<title>{escape(name)}: {_short(value)} {escape(unit)}</title>"
        elements.append(
            f'<rect class="bar" x="{left + slot * 0.1:.2f}" y="{top}" width="{slot * 0.8:.2f}"'
            f' height="{_HEIGHT - _BOTTOM - top:.2f}">{tooltip}</rect>'
        )
        if index % math.ceil(len(bars) / 16) == 0:
            elements.append(_text(left + slot / 2, _HEIGHT - _BOTTOM + 16, name, anchor="middle"))
    if limit:
        elements.append(f'<path class="limit" d="M{_LEFT} {y_axis.pixel(limit[1])}H{_WIDTH - _RIGHT}"/>')
    caption = f"dashed: {escape(limit[0])}, {_short(limit[1])} {escape(unit)}" if limit else escape(unit)
    return _figure(title, "".join(elements), caption)


def _polyline(line: Line, x_axis: _Axis, y_axis: _Axis, index: int) -> str:
    pixels = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in line.points]
    path = "M" + "L".join(f"{left} {top}" for left, top in pixels)
    dots = "".join(
        f'<circle cx="{left}" cy="{top}" r="2.2"><title>{escape(line.name)} {_short(x)}: {_short(y)}</title></circle>'
        for (left, top), (x, y) in zip(pixels, line.points, strict=True)
    )
    return f'<g class="line line-{index}"><path d="{path}"/>{dots}</g>'


def _grid(x_axis: _Axis, y_axis: _Axis, x_name: str) -> Iterator[str]:
    yield from _horizontal_grid(y_axis)
    for value in x_axis.ticks():
        yield _text(x_axis.pixel(value), _HEIGHT - _BOTTOM + 16, _short(value), anchor="middle")
    yield _text(_WIDTH - _RIGHT, _HEIGHT - 2, x_name, anchor="end")


def _horizontal_grid(y_axis: _Axis) -> Iterator[str]:
    for value in y_axis.ticks():
        yield f'<path class="grid" d="M{_LEFT} {y_axis.pixel(value)}H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 6, y_axis.pixel(value) + 4, _short(value), anchor="end")


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(title: str, elements: str, caption: str) -> str:
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img"'
        f' aria-label="{escape(title)}">{elements}</svg>'
    )
    return f"<figure><h2>{escape(title)}</h2>{svg if elements else ''}<figcaption>{caption}</figcaption></figure>"


def _legend(names: Sequence[str]) -> str:
    return " ".join(f'<span class="key key-{index}">{escape(name)}</span>' for index, name in enumerate(names))


def _short(value: float) -> str:
    """Format with four significant digits: 1234567 -> 1.235e+06, 0.30000000000000004 -> 0.3."""
    return f"{value:.4g}"
