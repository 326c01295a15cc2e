"""Draw line and bar charts as inline SVG, without a chart library (decisions/706)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_MAX_POINTS = 400  # maximum per line; more points could not be distinguished
_TARGET_TICKS = 5


@dataclass(frozen=True)
class Line:
    """A named line of a chart; each point is (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]

    def downsample(self) -> "Line":
        """Return a line with every nth point and the last point, at most _MAX_POINTS + 1."""
        step = math.ceil(len(self.points) / _MAX_POINTS)
        return self if step <= 1 else Line(self.name, (*self.points[:-1:step], self.points[-1]))


@dataclass(frozen=True)
class _Axis:
    """Maps values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def from_values(cls, values: Iterable[float], *, start: float, end: float) -> "_Axis":
        """Build an axis that contains all values, with a margin at both ends."""
        all_values = list(values)
        low, high = min(all_values), max(all_values)
        margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        return cls(low - margin, high + margin, start, end)

    def to_pixel(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)

    def compute_ticks(self) -> Iterator[float]:
        """Yield multiples of 1, 2 or 5 times a power of ten, about _TARGET_TICKS of them."""
        rough_step = (self.high - self.low) / _TARGET_TICKS
        power = 10.0 ** math.floor(math.log10(rough_step))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough_step * 0.999)
        yield from (index * step for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1))


def draw_lines(title: str, lines: Sequence[Line], *, x_name: str) -> str:
    """Draw a line chart as an HTML figure; omit points that are not finite."""
    finite_lines = [
        Line(line.name, tuple(point for point in line.points if all(map(math.isfinite, point)))) for line in lines
    ]
    drawable_lines = [line.downsample() for line in finite_lines if line.points]
    if not drawable_lines:
        return _render_figure(title, "", "nothing was measured")
    x_axis = _Axis.from_values((x for line in drawable_lines for x, _ in line.points), start=_LEFT, end=_WIDTH - _RIGHT)
    y_axis = _Axis.from_values(
        (y for line in drawable_lines for _, y in line.points), start=_HEIGHT - _BOTTOM, end=_TOP
    )
    elements = [
        *_draw_grid(x_axis, y_axis, x_name),
        *(_draw_polyline(line, x_axis, y_axis, index) for index, line in enumerate(drawable_lines)),
    ]
    return _render_figure(title, "".join(elements), _render_legend([line.name for line in drawable_lines]))


def draw_bars(
    title: str, bars: Sequence[tuple[str, float]], *, limit: tuple[str, float] | None = None, unit: str = ""
) -> str:
    """Draw a bar chart as an HTML figure, with a dashed line at the limit."""
    if not bars:
        return _render_figure(title, "", "nothing was measured")
    highest = max(*(value for _, value in bars), limit[1] if limit else 0.0, 1e-9)
    y_axis = _Axis(0.0, highest * 1.05, _HEIGHT - _BOTTOM, _TOP)
    slot = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    elements = [*_draw_horizontal_lines(y_axis)]
    for index, (name, value) in enumerate(bars):
        left, top = _LEFT + index * slot, y_axis.to_pixel(value)
        tooltip = f"<title>{escape(name)}: {_format_number(value)} {escape(unit)}</title>"
        elements.append(
            f'<rect class="bar" x="{left + slot * 0.1:.2f}" y="{top}" width="{slot * 0.8:.2f}"'
            f' height="{_HEIGHT - _BOTTOM - top:.2f}">{tooltip}</rect>'
        )
        if index % math.ceil(len(bars) / 16) == 0:
            elements.append(_draw_text(left + slot / 2, _HEIGHT - _BOTTOM + 16, name, anchor="middle"))
    if limit:
        elements.append(f'<path class="limit" d="M{_LEFT} {y_axis.to_pixel(limit[1])}H{_WIDTH - _RIGHT}"/>')
    caption = f"dashed: {escape(limit[0])}, {_format_number(limit[1])} {escape(unit)}" if limit else escape(unit)
    return _render_figure(title, "".join(elements), caption)


def _draw_polyline(line: Line, x_axis: _Axis, y_axis: _Axis, index: int) -> str:
    pixels = [(x_axis.to_pixel(x), y_axis.to_pixel(y)) for x, y in line.points]
    path = "M" + "L".join(f"{left} {top}" for left, top in pixels)
    dots = "".join(
        f'<circle cx="{left}" cy="{top}" r="2.2"><title>{escape(line.name)}'
        f" {_format_number(x)}: {_format_number(y)}</title></circle>"
        for (left, top), (x, y) in zip(pixels, line.points, strict=True)
    )
    return f'<g class="line line-{index}"><path d="{path}"/>{dots}</g>'


def _draw_grid(x_axis: _Axis, y_axis: _Axis, x_name: str) -> Iterator[str]:
    yield from _draw_horizontal_lines(y_axis)
    for value in x_axis.compute_ticks():
        yield _draw_text(x_axis.to_pixel(value), _HEIGHT - _BOTTOM + 16, _format_number(value), anchor="middle")
    yield _draw_text(_WIDTH - _RIGHT, _HEIGHT - 2, x_name, anchor="end")


def _draw_horizontal_lines(y_axis: _Axis) -> Iterator[str]:
    for value in y_axis.compute_ticks():
        yield f'<path class="grid" d="M{_LEFT} {y_axis.to_pixel(value)}H{_WIDTH - _RIGHT}"/>'
        yield _draw_text(_LEFT - 6, y_axis.to_pixel(value) + 4, _format_number(value), anchor="end")


def _draw_text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _render_figure(title: str, elements: str, caption: str) -> str:
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img"'
        f' aria-label="{escape(title)}">{elements}</svg>'
    )
    return f"<figure><h2>{escape(title)}</h2>{svg if elements else ''}<figcaption>{caption}</figcaption></figure>"


def _render_legend(names: Sequence[str]) -> str:
    return " ".join(f'<span class="key key-{index}">{escape(name)}</span>' for index, name in enumerate(names))


def _format_number(value: float) -> str:
    """Format with four significant digits, or as an integer: 1234567 -> 1.235e+06, 12345.6 -> 12346, 0.30004 -> 0.3."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"
