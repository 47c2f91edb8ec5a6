"""How many tokens of recovery each init needs for a multiple of its teacher's perplexity.

python experiments/tokens_to_target/run.py --teacher tiny_llama --tokens 1000000 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from tc.report.published import Target, targets

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COLOURS = {"copy_only": "C3", "paper": "C1", "full": "C0"}
TARGETS = (1.5, 1.25, 1.2, 1.15, 1.1)
LOOKS = 30


def recover(folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """One run, or what is finished of it; the points at which its student was measured."""
    command = [sys.executable, "run.py", f"run_dir={folder}", *overrides]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"stopped: {' '.join(command[1:])}")
    manifest = json.loads((folder / "recover/stage2/done/manifest.json").read_text())
    return [point for point in manifest["info"]["history"] if "perplexity" in point]


def needed(points: list[dict[str, Any]], target: float) -> tuple[int | None, int]:
    """The first measured tokens at which the target is met, None for never, and the last before."""
    before = 0
    for point in points:
        if point["perplexity_over_teacher"] <= target:
            return point["tokens"], before
        before = point["tokens"]
    return None, before


def told(points: list[dict[str, Any]], target: float) -> str:
    """Tokens for a table: where it was met between two looks, or a bound."""
    tokens, before = needed(points, target)
    if tokens is None:
        return f"> {before:,}"
    return "0" if tokens == 0 else f"{before:,} to {tokens:,}"


def table(curves: dict[str, dict[int, list[dict[str, Any]]]]) -> str:
    """Markdown: tokens by init and target, a line a seed, and the last perplexities."""
    lines = ["| init | seed | " + " | ".join(f"{t} x" for t in TARGETS) + " | at last | tokens |"]
    lines.append("|---" * (len(TARGETS) + 4) + "|")
    for init, seeds in curves.items():
        for seed, points in seeds.items():
            cells = [told(points, target) for target in TARGETS]
            last = points[-1]
            end = [f"{last['perplexity_over_teacher']:.3f} x", f"{last['tokens']:,}"]
            lines.append("| " + " | ".join([init, str(seed), *cells, *end]) + " |")
    return "\n".join(lines) + "\n"


def matched(curves: dict[str, dict[int, list[dict[str, Any]]]]) -> str:
    """What `full` needs for what another init has at its end, and whether it is ever behind it.

    A ratio is the other's tokens over those of the first look at which `full` was as good: a lower
    bound, infinite where that was before any training.
    """
    lines = ["| other | seed | its end | tokens of full | ratio | looks at which full is behind |"]
    lines.append("|---" * 6 + "|")
    for other in [init for init in curves if init != "full"]:
        ratios = []
        for seed, points in curves[other].items():
            full, last = curves["full"][seed], points[-1]
            tokens, _ = needed(full, last["perplexity_over_teacher"])
            ratios.append(math.inf if tokens == 0 else last["tokens"] / (tokens or math.inf))
            behind = sum(
                ours["perplexity_over_teacher"] > theirs["perplexity_over_teacher"]
                for ours, theirs in zip(full, points, strict=True)
            )
            end = f"{last['perplexity_over_teacher']:.3f} x at {last['tokens']:,}"
            cells = [
                other,
                str(seed),
                end,
                told(full, last["perplexity_over_teacher"]),
                f"{ratios[-1]:.3g}",
            ]
            lines.append("| " + " | ".join([*cells, f"{behind} of {len(full)}"]) + " |")
        lines.append(f"| {other} | median | | | {statistics.median(ratios):.3g} | |")
    return "\n".join(lines) + "\n"


def draw(curves: dict[str, dict[int, list[dict[str, Any]]]], path: Path, title: str) -> None:
    """Perplexity over the teacher's against tokens, both logarithmic; step 0 at the left edge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for init, seeds in curves.items():
        for number, points in enumerate(seeds.values()):
            least = points[1]["tokens"] / 2
            tokens = [max(point["tokens"], least) for point in points]
            ratios = [point["perplexity_over_teacher"] for point in points]
            color, label = COLOURS[init], None if number else init
            axes.plot(tokens, ratios, "o-", ms=3, color=color, label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="training tokens (leftmost: none)")
    axes.set(ylabel="validation perplexity / teacher's", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def published() -> str:
    """The paper's own table, as Markdown."""
    rows = [astuple(target) for target in targets()]
    names = [field.name for field in fields(Target)]
    cells = [
        ["" if v is None else str(int(v) if isinstance(v, bool) else v) for v in row]
        for row in rows
    ]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(["| " + " | ".join(names) + " |", "|---" * len(names) + "|", *lines]) + "\n"


def main() -> None:
    """Runs what is asked for, and writes curves.json, table.md and curve.png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="smollm2_135m")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--inits", nargs="+", choices=list(COLOURS), default=list(COLOURS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=Path("out/tokens_to_target"))
    parser.add_argument("--result", type=Path, help="where the table goes, else to the output")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="of every run")
    given = parser.parse_args()
    output = given.output.resolve() / given.teacher
    curves: dict[str, dict[int, list[dict[str, Any]]]] = {init: {} for init in given.inits}
    for seed in given.seeds:
        for init in given.inits:
            overrides = [f"teacher={given.teacher}", f"init={init}", f"seed={seed}"]
            overrides += [f"recovery.stage2.tokens={given.tokens}", f"recovery.validations={LOOKS}"]
            points = recover(output / f"{init}-{seed}", [*overrides, *given.set])
            curves[init][seed] = points
    folder = given.result or output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curves.json").write_text(json.dumps(curves) + "\n")
    parts = [
        table(curves),
        matched(curves) if "full" in curves else "",
        "As published (millions of tokens):\n\n" + published(),
    ]
    (folder / "table.md").write_text("\n".join(parts))
    draw(curves, folder / "curve.png", given.teacher)
    print("\n".join(parts))


if __name__ == "__main__":
    main()
