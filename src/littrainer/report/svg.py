"""One chart as SVG text, which stands in the page and takes its colours from the page's style."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from littrainer.report.axes import Axis, step_axis, value_axis
from littrainer.report.history import Point
from littrainer.report.labels import as_html, shortened
from littrainer.report.panels import ALWAYS_LINEAR, Curve, Entry, Panel

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 44
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
COLOURS = 7
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2 1 2")
MARKERS = 5
# With more points than this a curve has no markers, which would cover it.
MOST_MARKED = 30
# With more points than this a curve is drawn thin, for it turns at every one of them.
DENSE_FROM = 300
# More points than twice this many columns cannot be told apart on a screen.
COLUMNS = 500
# With more curves than have room in this many points all are drawn in fewer columns, though not in fewer than those.
MOST_POINTS = 60_000
FEWEST_COLUMNS = 50


class Plane:
    """Two axes and the rectangle between them, in the units of the drawing."""

    def __init__(self, across: Axis, up: Axis) -> None:
        self.across, self.up = across, up

    def x(self, value: float) -> float:
        """Where a value of the axis below stands."""
        return LEFT + PLOT_WIDTH * self.across.share(value)

    def y(self, value: float) -> float:
        """Where a value of the axis at the left stands."""
        return TOP + PLOT_HEIGHT * (1 - self.up.share(value))

    def grid(self, name: str) -> Iterator[str]:
        """Lines and labels of both axes; the name is that of the axis below."""
        bottom, right = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
        for value, label in zip(self.up.ticks, self.up.labels, strict=True):
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="tick" x="{LEFT - 7}" y="{y:.1f}" dy="0.35em" text-anchor="end">{label}</text>'
        yield f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        for value, label in zip(self.across.ticks, self.across.labels, strict=True):
            x = self.x(value)
            # A label at the very end would reach beyond the drawing.
            anchor = "end" if x > right - 8 and len(label) > 3 else "middle"
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{label}</text>'
        middle = LEFT + PLOT_WIDTH / 2
        yield f'<text class="name" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{as_html(name)}</text>'


class Frame(Plane):
    """The axes that the curves of a chart share.

    Parameters:
        panel: the chart.
        steps: the axis of optimizer steps.
        scale: of the value axis, as `value_axis` takes it.
        columns: in how many columns the points of a curve are told apart.
    """

    def __init__(self, panel: Panel, steps: Axis, scale: str, columns: int = COLUMNS) -> None:
        points = [point for curve in panel.curves for point in curve.points]
        finite = [point.value for point in points if math.isfinite(point.value)]
        self.steps = steps
        self.columns = columns
        chosen = "linear" if scale == "auto" and panel.metric in ALWAYS_LINEAR else scale
        self.values: Axis = value_axis(finite, chosen)
        super().__init__(steps, self.values)


def frames_of(panels: list[Panel], scale: str) -> list[Frame]:
    """The axes of all charts; that of the steps is the same in each."""
    steps = [point.step for panel in panels for curve in panel.curves for point in curve.points]
    axis = step_axis(steps) if steps else None
    curves = sum(len(panel.curves) for panel in panels)
    columns = max(FEWEST_COLUMNS, min(COLUMNS, MOST_POINTS // (2 * max(1, curves))))
    return [Frame(panel, axis, scale, columns) for panel in panels if axis is not None]


def chart(panel: Panel, frame: Frame) -> str:
    """The SVG text of a chart."""
    described = as_html(f"{shortened(panel.title)} over optimizer steps, {len(panel.curves)} curves")
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{described}">',
        *frame.grid("optimizer step"),
        *(part for curve in panel.curves for part in _curve(curve, frame)),
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{TOP + PLOT_HEIGHT}" visibility="hidden"/>',
        "</svg>",
    ]
    return "".join(parts)


def _curve(curve: Curve, frame: Frame) -> Iterator[str]:
    look = curve.look
    dense = " dense" if len(curve.points) > DENSE_FROM else ""
    yield f'<g class="curve c{look.colour % COLOURS}{dense}" data-run="{curve.run}">'
    points = thinned(curve.points, frame)
    for stretch in stretches(points):
        places = [f"{frame.x(point.step):.1f},{frame.y(point.value):.1f}" for point in stretch]
        dash = DASHES[look.dash % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<polyline points="{" ".join(places)}"{dashed}/>'
        if len(stretch) == 1 or len(curve.points) <= MOST_MARKED:
            for point in stretch:
                yield marker(frame.x(point.step), frame.y(point.value), look.marker)
    for point in points:
        if not math.isfinite(point.value):
            yield f'<path class="missing" d="{cross(frame.x(point.step), TOP + PLOT_HEIGHT - 6, 3.5)}"/>'
    if curve.best is not None:
        yield f'<path class="best" d="{star(frame.x(curve.best.step), frame.y(curve.best.value), 8.5)}"/>'
    yield "</g>"


def marker(x: float, y: float, kind: int, size: float = 3.2) -> str:
    """The mark of one point; each kind has another shape."""
    kind %= MARKERS
    if kind == 0:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    shapes: Sequence[Sequence[tuple[float, float]]] = (
        [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
        [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
        [(0, 1.2), (1.1, -0.8), (-1.1, -0.8)],
    )
    return f'<path class="mark" d="{_closed((x + size * dx, y + size * dy) for dx, dy in shapes[kind - 1])}"/>'


def sample(entry: Entry) -> str:
    """A short piece of a curve, for the legend."""
    dash = DASHES[entry.dash % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    mark = "" if entry.marker is None else marker(15, 6, entry.marker)
    kind = "neutral" if entry.colour is None else f"c{entry.colour % COLOURS}"
    line = f'<polyline points="1,6 29,6"{dashed}/>'
    return f'<svg class="curve {kind}" viewBox="0 0 30 12" aria-hidden="true">{line}{mark}</svg>'


def star_sample() -> str:
    """The mark of the best evaluation, for the legend."""
    drawn = f'<path class="best" d="{star(7, 6.5, 6)}"/>'
    return f'<svg class="curve star" viewBox="0 0 14 12" aria-hidden="true">{drawn}</svg>'


def stretches(points: Iterable[Point]) -> list[list[Point]]:
    """The runs of finite values between others, each of which is drawn as a line."""
    found: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.value):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def thinned(points: list[Point], frame: Frame) -> list[Point]:
    """The points that shape a curve as it is seen: of those that share a column, the lowest, the highest and a gap."""
    if len(points) <= 2 * frame.columns:
        return points
    columns: dict[int, list[Point]] = {}
    gaps: dict[int, Point] = {}
    for point in points:
        column = int(frame.columns * frame.steps.share(point.step))
        if math.isfinite(point.value):
            columns.setdefault(column, []).append(point)
        else:
            gaps.setdefault(column, point)
    extremes = [extreme(shared, key=lambda point: point.value) for shared in columns.values() for extreme in (min, max)]
    return sorted({*gaps.values(), *extremes, points[0], points[-1]}, key=lambda point: point.step)


def _closed(corners: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in corners) + "Z"


def cross(x: float, y: float, size: float) -> str:
    """The path of a cross, for what has no value."""
    return (
        f"M{x - size:.1f},{y - size:.1f}L{x + size:.1f},{y + size:.1f}"
        f"M{x - size:.1f},{y + size:.1f}L{x + size:.1f},{y - size:.1f}"
    )


def star(x: float, y: float, size: float) -> str:
    """The path of a star, for what is best."""
    corners = []
    for number in range(10):
        reach = size if number % 2 == 0 else size * 0.42
        angle = math.pi * number / 5
        corners.append((x + reach * math.sin(angle), y - reach * math.cos(angle)))
    return _closed(corners)
