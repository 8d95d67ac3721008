"""The charts of a search as SVG text; as `svg`, they take their colours from the page's style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from littrainer.report.axes import Axis, value_axis
from littrainer.report.labels import as_html, shortened
from littrainer.report.search_panels import ABSENT_LABEL, ABSENT_SHARE, ObjectivePanel, ParallelPanel, Spot, Thread
from littrainer.report.svg import (
    HEIGHT,
    PLOT_HEIGHT,
    TOP,
    WIDTH,
    Plane,
    cross,
    marker,
    star,
    star_sample,
)
from littrainer.search.record import COMPLETE, PRUNED

# Of the palette, and of the markers: circle and diamond.
COMPLETE_LOOK, PRUNED_LOOK, FAILED_COLOUR = (0, 0), (4, 3), 1
STAR_SIZE, POINT_SIZE = 8.0, 3.6
# A finger needs more room than a point has.
REACH = 10
WIDE, TALL = 1080, 360
WIDE_TOP, WIDE_BOTTOM, WIDE_LEFT, WIDE_RIGHT = 58, 56, 60, 70
LONGEST_AXIS_NAME = 30
# A label's height, with its distance from the next one.
LABEL_HEIGHT = 15


def objective_chart(panel: ObjectivePanel) -> str:
    """An objective over the trials, with the best one so far as a line."""
    plane = Plane(panel.trials, panel.values)
    described = as_html(f"{shortened(panel.title)} over {len(panel.spots)} trials")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{described}">', *plane.grid("trial")]
    if panel.best:
        places = [f"{x:.1f},{y:.1f}" for x, y in _stairs(panel, plane)]
        parts.append(f'<g class="curve neutral"><polyline points="{" ".join(places)}"/></g>')
    # What is best lies above the others.
    for spot in sorted(panel.spots, key=lambda spot: spot.trial in panel.stars):
        parts.append(_spot(spot, plane, spot.trial in panel.stars))
    return "".join([*parts, "</svg>"])


def _stairs(panel: ObjectivePanel, plane: Plane) -> Iterator[tuple[float, float]]:
    last = None
    for number, value in panel.best:
        if last is not None:
            yield plane.x(number), last
        last = plane.y(value)
        yield plane.x(number), last
    if last is not None:
        yield plane.x(max(spot.x for spot in panel.spots)), last


def _spot(spot: Spot, plane: Plane, best: bool) -> str:
    x = plane.x(spot.x)
    if spot.value is None:
        y = TOP + PLOT_HEIGHT - 6.0
        colour = PRUNED_LOOK[0] if spot.state == PRUNED else FAILED_COLOUR
        return _group(spot.trial, colour, x, y, f'<path class="missing" d="{cross(x, y, 3.5)}"/>')
    y = plane.y(spot.value)
    colour, kind = COMPLETE_LOOK if spot.state == COMPLETE else PRUNED_LOOK
    mark = f'<path class="best" d="{star(x, y, STAR_SIZE)}"/>' if best else marker(x, y, kind, POINT_SIZE)
    return _group(spot.trial, colour, x, y, mark)


def _group(trial: int, colour: int, x: float, y: float, mark: str) -> str:
    reach = f'<circle class="reach" cx="{x:.1f}" cy="{y:.1f}" r="{REACH}"/>'
    return f'<g class="curve spot c{colour}" data-trial="{trial}">{reach}{mark}</g>'


def trade_off_chart(points: Sequence[tuple[int, float, float]], stars: frozenset[int], names: Sequence[str]) -> str:
    """Two objectives against each other; the trials that none surpasses are stars, joined by a line."""
    plane = Plane(value_axis([x for _, x, _ in points]), value_axis([y for _, _, y in points]))
    described = as_html(f"{shortened(names[1])} against {shortened(names[0])}, {len(points)} trials")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{described}">']
    parts += plane.grid(shortened(names[0]))
    front = sorted((plane.x(x), plane.y(y)) for trial, x, y in points if trial in stars)
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    parts.append(f'<g class="curve neutral"><polyline points="{joined}" stroke-dasharray="2 3"/></g>')
    for trial, x, y in sorted(points, key=lambda point: point[0] in stars):
        colour, kind = COMPLETE_LOOK
        left, top = plane.x(x), plane.y(y)
        mark = marker(left, top, kind, POINT_SIZE)
        if trial in stars:
            mark = f'<path class="best" d="{star(left, top, STAR_SIZE)}"/>'
        parts.append(_group(trial, colour, left, top, mark))
    return "".join([*parts, "</svg>"])


def parallel_chart(panel: ParallelPanel) -> str:
    """Trials as lines across one axis for each parameter, and the objectives at the right."""
    places = axis_places(len(panel.axes), WIDE_LEFT, WIDE - WIDE_RIGHT)
    height = TALL - WIDE_TOP - WIDE_BOTTOM
    described = as_html(f"{len(panel.threads)} trials across {len(panel.axes)} axes")
    parts = [f'<svg class="wide" viewBox="0 0 {WIDE} {TALL}" role="img" aria-label="{described}">']
    parts += [_thread(thread, places, height) for thread in panel.threads]
    for number, (x, name, axis) in enumerate(zip(places, panel.names, panel.axes, strict=True)):
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{WIDE_TOP}" y2="{WIDE_TOP + height}"/>')
        # Neighbours at different heights have room for longer names.
        y = WIDE_TOP - (34 if number % 2 and len(places) > 5 else 16)
        anchor = {0: "start", len(places) - 1: "end"}.get(number, "middle")
        moved = {0: -WIDE_LEFT + 4, len(places) - 1: WIDE_RIGHT - 4}.get(number, 0)
        short = name if len(name) <= LONGEST_AXIS_NAME else f"{name[: LONGEST_AXIS_NAME - 3]}..."
        parts.append(
            f'<text class="name" x="{x + moved:.1f}" y="{y}" text-anchor="{anchor}">'
            f"<title>{as_html(shortened(name))}</title>{as_html(short)}</text>"
        )
        parts += _labels(axis, x, height, at_the_right=number == len(places) - 1)
        if panel.incomplete[number]:
            below = WIDE_TOP + height * (1 - ABSENT_SHARE) + 16
            place = f'x="{x:.1f}" y="{below:.1f}" text-anchor="middle"'
            parts.append(f'<text class="tick halo" {place}>{ABSENT_LABEL}</text>')
    return "".join([*parts, "</svg>"])


def axis_places(count: int, left: float, right: float) -> list[float]:
    """Where that many axes stand between two ends."""
    return [left + (right - left) * number / max(1, count - 1) for number in range(count)]


def spaced_ticks(axis: Axis, height: float, between: float) -> Iterator[tuple[float, str]]:
    """The shares and labels of those ticks of an axis of some height that do not lie over each other."""
    last = None
    for value, label in zip(axis.ticks, axis.labels, strict=True):
        share = axis.share(value)
        if last is None or (share - last) * height >= between:
            last = share
            yield share, label


def _labels(axis: Axis, x: float, height: float, at_the_right: bool) -> Iterator[str]:
    anchor, moved = ("start", 7) if at_the_right else ("end", -7)
    for share, label in spaced_ticks(axis, height, LABEL_HEIGHT):
        y = WIDE_TOP + height * (1 - share)
        short = label if len(label) <= 12 else f"{label[:10]}..."
        yield f'<line class="axis" x1="{x - 4:.1f}" x2="{x + 4:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text class="tick halo" x="{x + moved:.1f}" y="{y:.1f}" dy="0.35em" text-anchor="{anchor}">'
            f"{as_html(short)}</text>"
        )


def _thread(thread: Thread, places: Sequence[float], height: float) -> str:
    points = " ".join(
        f"{x:.1f},{WIDE_TOP + height * (1 - share):.1f}" for x, share in zip(places, thread.shares, strict=True)
    )
    kind = "thread best-thread" if thread.best else f"thread g{thread.grade}"
    lines = f'<polyline class="reach" points="{points}"/><polyline points="{points}"/>'
    return f'<g class="{kind}" data-trial="{thread.trial}">{lines}</g>'


def spot_sample(kind: str) -> str:
    """The mark of a kind of trials, for the legend."""
    if kind == "best":
        return star_sample()
    if kind == "best so far":
        line = '<polyline points="1,6 29,6"/>'
        return f'<svg class="curve neutral" viewBox="0 0 30 12" aria-hidden="true">{line}</svg>'
    if kind in (COMPLETE, PRUNED):
        colour, shape = COMPLETE_LOOK if kind == COMPLETE else PRUNED_LOOK
        mark = marker(7, 6, shape)
    else:
        colour, mark = FAILED_COLOUR, f'<path class="missing" d="{cross(7, 6, 3.5)}"/>'
    return f'<svg class="curve spot star c{colour}" viewBox="0 0 14 12" aria-hidden="true">{mark}</svg>'
