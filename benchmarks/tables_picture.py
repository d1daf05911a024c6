"""Picture of errors relative to the stack's: SVG as text, so that every machine writes the same."""

import math
from html import escape

LOWEST, HIGHEST = 2 / 3, 3 / 2  # of the axis: equal factors on both sides of the stack
TICKS = (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4)
# In pixels of a narrow phone; wider screens enlarge all of it.
WIDTH, MARGIN, TOP, ROW, BOTTOM = 360, 14, 84, 27, 20
LANE = 20  # of the marks, below the name of their table
# Colour (Okabe and Ito's, for all eyes), shape, and height in the lane, since close errors overlap.
OTHERS = ("#aaa", "M-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0z", 0)
MARKS = {
    "default": ("#0072b2", "M-3.5-3.5h7v7h-7z", -4),
    "CatBoost tuned": ("#d55e00", "M0-4.5 4.5 3.5h-9z", -1.5),
    "LightGBM tuned": ("#009e73", "M0-5 5 0 0 5-5 0z", 1.5),
    "GPBoost boosting": ("#cc79a7", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", 4),
}
STYLE = (
    "text{font:11px sans-serif;fill:#222;stroke:#fff;stroke-width:3px;paint-order:stroke} "
    "path{stroke:#fff;stroke-width:.6} .row{stroke:#ddd} "
    ".middle{text-anchor:middle} .end{text-anchor:end} .tick{stroke:#ccc} "
    ".stack{stroke:#222;stroke-width:1.4} .far{stroke:#222;stroke-width:1.4;fill:none}"
)


def picture(rows):
    """SVG with a row for each table, given its name and the methods' errors over the stack's."""
    bottom = TOP + ROW * len(rows)
    height = bottom + BOTTOM
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>')  # on dark pages, too
    parts += [f'<path class="row" d="M0 {y}h{WIDTH}"/>' for y in range(TOP, bottom + 1, ROW)]
    parts += [*_legend(), *_axis(bottom)]
    for place, (name, ratios) in enumerate(rows):
        parts += _row(name, ratios, TOP + ROW * place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend():
    for place, name in enumerate([*MARKS, "other methods", "stacking"]):
        x, y = MARGIN + 150 * (place % 2), 12 + 17 * (place // 2)
        stack = f'<path class="stack" d="M{x} {y - 6}v12"/>'
        yield stack if name == "stacking" else _mark(name, x, y)
        yield _text(name, x + 10, y + 4)


def _axis(bottom):
    yield _text("← smaller error than the stack", 4, TOP - 18)
    yield _text("larger error →", WIDTH - 4, TOP - 18, "end")
    for tick in TICKS:
        x, kind = _position(tick), "stack" if tick == 1 else "tick"
        yield f'<path class="{kind}" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield from (_text(f"{tick:g}", x, y, "middle") for y in (TOP - 4, bottom + 13))


def _row(name, ratios, y):
    """The name of a table; its marks, those with a colour on top; arrows where some are beyond."""
    yield _text(escape(name), 4, y + 11)
    for method in [*(each for each in ratios if each not in MARKS), *MARKS]:
        if method in ratios:
            yield _mark(method, _position(ratios[method]), y + LANE, lane=True)
    if max(ratios.values()) > HIGHEST:
        yield f'<path class="far" d="M{WIDTH - 7} {y + LANE - 4}l4 4-4 4"/>'
    if min(ratios.values()) < LOWEST:
        yield f'<path class="far" d="M7 {y + LANE - 4}l-4 4 4 4"/>'


def _position(ratio):
    """Where a ratio is drawn, at the end of the axis if it is beyond."""
    inside = min(max(ratio, LOWEST), HIGHEST)
    return MARGIN + (WIDTH - 2 * MARGIN) * math.log(inside / LOWEST) / math.log(HIGHEST / LOWEST)


def _mark(method, x, y, lane=False):
    colour, shape, height = MARKS.get(method, OTHERS)
    return f'<path fill="{colour}" transform="translate({x:.1f} {y + lane * height})" d="{shape}"/>'


def _text(text, x, y, anchor="start"):
    return f'<text class="{anchor}" x="{x:.1f}" y="{y}">{text}</text>'
