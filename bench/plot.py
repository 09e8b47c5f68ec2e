#!/usr/bin/env python3
"""Draws how many times faster than each contender fftune is, from `fftune bench ... --json`.

usage: plot.py OUT.svg BENCH.json...    (standard library alone)
"""
import json
import sys

COLOURS = {"unfused": "#9aa5b1", "merged": "#3e7cb1", "floor": "#c0392b"}
HEIGHT, BASE, TOP, STEP, BAR = 250, 200, 30, 84, 22


def bars(problem):
    times = {entry["name"]: entry["median_us"] for entry in problem["entries"]}
    return {name: times[name] / times["fftune"] for name in ("unfused", "merged") if name in times} | {
        "floor": problem["floor_us"] / times["fftune"]}


def main(out, files):
    problems = [problem for file in files for problem in json.load(open(file))["problems"]]
    most = max(max(bars(problem).values()) for problem in problems)
    scale = (BASE - TOP) / most
    width = 60 + STEP * len(problems)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
           'font-family="sans-serif" font-size="10">',
           f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
           f'<text x="10" y="16">time over fftune\'s (1 = fftune; above it fftune is faster; floor: the roofline)</text>']
    for level in (0.5, 1.0, 1.5, 2.0):
        y = BASE - level * scale
        svg.append(f'<line x1="36" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                   f'<text x="10" y="{y + 3:.1f}">{level:.1f}x</text>')
    for place, problem in enumerate(problems):
        x = 44 + place * STEP
        for i, (name, ratio) in enumerate(bars(problem).items()):
            top = BASE - ratio * scale
            svg.append(f'<rect x="{x + i * (BAR + 1)}" y="{top:.1f}" width="{BAR}" '
                       f'height="{BASE - top:.1f}" fill="{COLOURS[name]}"/>'
                       f'<text x="{x + i * (BAR + 1)}" y="{top - 2:.1f}">{ratio:.2f}</text>')
        sizes = problem["problem"]
        svg.append(f'<text x="{x}" y="{BASE + 13}">m {sizes["m"]}</text>'
                   f'<text x="{x}" y="{BASE + 25}">{sizes["d"]}, {sizes["h"]}</text>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        svg.append(f'<rect x="{44 + i * 120}" y="236" width="10" height="10" fill="{colour}"/>'
                   f'<text x="{58 + i * 120}" y="245">{name}</text>')
    svg.append("</svg>")
    open(out, "w").write("\n".join(svg) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
