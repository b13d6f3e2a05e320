"""Draw two pictures of the README: the work with and without a cache, and one step.

    python assets/draw.py

Writes work.svg and step.svg next to this file. They have their own background, because a picture in a README
cannot see whether the page around it is light or dark.
"""

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPT, TEXT = "O Romeo, ", "they say"
STYLE = """
text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.mono { font-family: ui-monospace, Menlo, Consolas, monospace }
.small { font-size: 13.5px } .title { font-size: 16px; font-weight: 600 } .quiet { fill: #59636e }
.middle { text-anchor: middle } .end { text-anchor: end }
.page { fill: #fff } .frame { fill: none; stroke: #d1d9e0 } .line { stroke: #59636e; fill: none; stroke-width: 1.5 }
.computed { fill: #bf3989 } .cached { fill: #54aeff; opacity: .35 } .new { fill: #bf3989 }
.box { fill: #ddf4ff; stroke: #54aeff } .weights { fill: #fff8c5; stroke: #d4a72c }
"""


def svg(width, height, title, parts):
    edge = 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-edge} {-edge} {width + 2 * edge} {height + 2 * edge}" '
        f'role="img" xml:space="preserve"><title>{escape(title)}</title><style>{STYLE}</style>\n'
        f'<rect x="{-edge}" y="{-edge}" width="{width + 2 * edge}" height="{height + 2 * edge}" class="page"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x, y, content, kind=""):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def rect(x, y, width, height, kind, radius=0):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" class="{kind}"/>'


# -- the work ----------------------------------------------------------------------------------------------------------


def work():
    """Draw which positions each step computes: a triangle without the cache, the prompt and a diagonal with it."""
    sequence, cell = PROMPT + TEXT, 20
    T, N = len(PROMPT), len(sequence)
    steps, size = range(T, N), N * cell
    parts = []
    for left, kv_cache in ((60, False), (60 + size + 125, True)):
        parts.append(text(left, 24, f"{'with' if kv_cache else 'without'} the cache", "title"))
        for position, char in enumerate(sequence[:-1]):
            parts.append(text(left + (position + 0.5) * cell, 62, char.replace(" ", "␣"), "mono middle"))
        for row, end in enumerate(steps):
            y = 74 + row * cell
            name = f"step {row + 1}" if not kv_cache else f"decode {row}" if row else "prefill"
            parts.append(text(left - 10, y + 15, name, "small quiet end"))
            first = 0 if row == 0 or not kv_cache else end - 1
            for position in range(end):
                kind = "computed" if position >= first else "cached"
                parts.append(rect(left + position * cell + 1, y + 1, cell - 2, cell - 2, kind, 3))
            parts.append(text(left + end * cell + 6, y + 15, f"gives {sequence[end]!r}", "small quiet"))
        total = N - 1 if kv_cache else sum(steps)
        parts.append(text(left, 74 + len(steps) * cell + 24, f"{total} positions computed", ""))
    y = 74 + len(steps) * cell + 56
    parts += [rect(60, y - 12, 14, 14, "computed", 3), text(82, y, "computed: query, key and value of this position")]
    parts += [rect(440, y - 12, 14, 14, "cached", 3), text(462, y, "kept: its key and value are read from the cache")]
    title = "Without a cache every step computes all positions. With a cache a step computes one."
    return svg(60 + 2 * size + 225, y + 16, title, parts)


# -- one step ----------------------------------------------------------------------------------------------------------


def step():
    """Draw one attention layer in one decode step, for the default model after the prompt."""
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#59636e"/></marker></defs>'
    ]

    def box(x, y, width, label, shape, kind="box"):
        parts.append(rect(x, y, width, 44, kind, 6))
        parts.append(text(x + width / 2, y + 19, label, "middle"))
        parts.append(text(x + width / 2, y + 36, shape, "mono small middle quiet"))

    def arrow(*points):
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        parts.append(f'<path d="{path}" class="line" marker-end="url(#tip)"/>')

    # the new token's query, key and value
    box(10, 128, 110, "x, new token", "(1, 1, 128)")
    box(150, 128, 100, "c_attn", "128 → 384", "weights")
    box(290, 30, 120, "q, rotated", "(1, 4, 1, 32)")
    box(290, 128, 120, "k, rotated", "(1, 4, 1, 32)")
    box(290, 226, 120, "v", "(1, 4, 1, 32)")
    arrow((120, 150), (148, 150))
    for y in (52, 150, 248):
        arrow((250, 150), (270, 150), (270, y), (288, y))

    # the buffers: one slot per position so far, the new one last
    for y, name in ((128, "key_cache"), (226, "value_cache")):
        arrow((410, y + 22), (438, y + 22))
        parts.append(text(440, y - 8, f"{name}: slots 0 .. 9", "small"))
        for slot in range(14):
            kind = "new" if slot == 9 else "cached" if slot < 9 else "frame"
            parts.append(rect(440 + 18 * slot, y + 6, 15, 32, kind, 2))
        parts.append(text(440 + 18 * 9 + 7, y + 54, "9", "small middle"))
        parts.append(text(440 + 18 * 14 + 2, y + 26, "…", ""))

    # attention over all slots
    box(440, 30, 250, "softmax(q · keys / √32)", "(1, 4, 1, 10)")
    arrow((410, 52), (438, 52))
    arrow((600, 118), (600, 76))
    box(740, 128, 130, "weights · values", "(1, 4, 1, 32)")
    arrow((690, 52), (805, 52), (805, 126))
    arrow((720, 248), (805, 248), (805, 174))
    box(900, 128, 100, "c_proj", "128 → 128", "weights")
    arrow((870, 150), (898, 150))
    arrow((1000, 150), (1028, 150))
    parts.append(text(1034, 155, "y (1, 1, 128)", "mono small"))
    caption = "The step writes slot 9 of both buffers, then reads slots 0 to 9. It computes no older key or value."
    parts.append(text(10, 312, caption, "quiet"))
    return svg(1140, 326, "One layer in one decode step: write one slot, read all of them", parts)


def main():
    for name, content in {"work.svg": work(), "step.svg": step()}.items():
        (HERE / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
