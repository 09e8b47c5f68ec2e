#!/usr/bin/env python3
"""Draws what fftune and the fastest of PyTorch's reach against the roofline, from peers.py's data.

usage: roofline.py OUT.svg PEERS.json [TERABYTES] [TERAFLOPS]    (standard library alone)

The roofs are bytes and operations a second, in units of 10^12: 4.40 and 786 on an H200, a measured
copy and a measured product of 8192^3. Both axes are logarithmic; a point is a problem.
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 380, 56, 330, 34
COLOURS = {"fftune": "#c0392b", "best": "#3e7cb1"}


def main(out, peers, terabytes=4.40, teraflops=786.0):
    rows = json.load(open(peers))
    points = []
    for row in rows:
        m, d, h = row["m"], row["d"], row["h"]
        flops, moved = 6.0 * m * d * h, 2.0 * (3 * d * h + 2 * m * d)
        for name in COLOURS:
            time = row["fftune"] if name == "fftune" else row[row["best"]]
            points.append((flops / moved, flops / time / 1e6, name, d, m))
    low = math.log10(0.7)
    across = (WIDTH - LEFT - 20) / (math.log10(max(p[0] for p in points) * 2) - low)
    up = (BOTTOM - TOP) / math.log10(teraflops * 1.6)

    def place(intensity, rate):
        return LEFT + (math.log10(intensity) - low) * across, BOTTOM - math.log10(rate) * up

    ridge = teraflops / terabytes
    roof = [place(0.7, 0.7 * terabytes), place(ridge, teraflops),
            place(max(p[0] for p in points) * 2, teraflops)]
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
           'font-family="sans-serif" font-size="10">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           '<text x="10" y="16">TFLOP/s over operations a byte; the line is the roofline</text>',
           '<polyline fill="none" stroke="#555" points="'
           + " ".join(f"{x:.1f},{y:.1f}" for x, y in roof) + '"/>']
    for rate in (1, 10, 100, teraflops):
        y = place(1, rate)[1]
        svg.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                   f'<text x="10" y="{y + 3:.1f}">{rate:g}</text>')
    for intensity in (1, 10, 100, 1000):
        x = place(intensity, 1)[0]
        svg.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="#eee"/>'
                   f'<text x="{x - 8:.1f}" y="{BOTTOM + 14}">{intensity}</text>')
    for intensity, rate, name, d, m in points:
        x, y = place(intensity, rate)
        shape = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"' if d == min(p[3] for p in points) else
                 f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"')
        svg.append(f'{shape} fill="{COLOURS[name]}" fill-opacity="0.75">'
                   f'<title>{name}, d {d}, m {m}: {rate:.0f} TFLOP/s</title></{shape[1:shape.index(" ")]}>')
    sizes = sorted({p[3] for p in points})
    for i, (name, colour) in enumerate(COLOURS.items()):
        text = "the fastest of PyTorch's" if name == "best" else name
        svg.append(f'<rect x="{LEFT + i * 90}" y="356" width="10" height="10" fill="{colour}"/>'
                   f'<text x="{LEFT + 14 + i * 90}" y="365">{text}</text>')
    svg.append(f'<text x="{LEFT + 260}" y="365">circles d {sizes[0]}, squares d {sizes[-1]}</text></svg>')
    open(out, "w").write("\n".join(svg) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:3], *map(float, sys.argv[3:5]))
