"""The tables at the end of a run and of a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tc import ui
from tc.config import TIMED
from tc.evaluate import Results
from tc.plan import Plan
from tc.policy import others
from tc.report.results import result_tables


def show_summary(metrics: dict[str, Any], results: Results, run_dir: Path) -> None:
    """Prints stages, perplexities, what else was measured, and the next command.

    Args:
        metrics: the flat metrics of the run.
        results: of its evaluation.
        run_dir: the run folder.
    """
    for title, columns, rows in [*summary_tables(metrics, results), *result_tables(results)]:
        ui.table(title, columns, rows)
    if "copy_only/perplexity_over_student" in metrics:
        ratio = metrics["copy_only/perplexity_over_student"]
        word = "below" if ratio >= 1 else "above"
        times = max(ratio, 1 / ratio)
        ui.say(f"The student's perplexity is {times:,.1f} times {word} that of copy_only.")
    table = run_dir / "results.csv"
    if table.is_file():
        ui.say(f"\nall that was measured: {table}")
    curve = run_dir / "recover" / "curve.png"
    if curve.is_file():
        ui.say(f"\ncurve: {curve}")
    student = run_dir / "student"
    if (student / "config.json").is_file():
        ui.say(f"\nstudent: {student}\nnext, let it speak:\n\n{_next_command(student)}\n")


def summary_tables(
    metrics: dict[str, Any], results: Results
) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Title, columns and rows of the tables that end a run."""
    tables = [("stages", *_stages(metrics))]
    if "select/kept" in metrics:
        columns = ["policy", "layers that keep attention"]
        rows = [[metrics["select/policy"], metrics["select/kept"]]]
        tables.append(("select", columns, rows))
    if "student/perplexity" in metrics:
        title = f"perplexity on {metrics['evaluation_tokens']:,} held-out tokens"
        columns = ["model", "perplexity", "standard error", "x teacher"]
        tables.append((title, columns, _ppl_rows(metrics, results)))
    return tables


def _stages(metrics: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """What each stage took; whether it was found is a column where any was."""
    seen = [stage for stage in (*TIMED, "total") if f"{stage}/seconds" in metrics]
    found = [bool(metrics.get(f"{stage}/reused")) for stage in seen]
    rows = []
    for stage, was_found in zip(seen, found, strict=True):
        wall = ui.duration(metrics[f"{stage}/seconds"])
        peak = ui.size(metrics[f"{stage}/peak_rss_bytes"])
        rows.append([stage, wall, peak, *(["found, not redone" if was_found else ""] * any(found))])
    return ["stage", "wall time", "peak memory", *([""] * any(found))], rows


def _ppl_rows(metrics: dict[str, Any], results: Results) -> list[list[Any]]:
    rows = []
    for name in ("teacher", "copy_only", "zero_shot", "student"):
        if f"{name}/perplexity" not in metrics:
            continue
        value = metrics[f"{name}/perplexity"]
        measured = (r for r in results.get(name, []) if r.measure == r.metric == "perplexity")
        error = next((r.stderr for r in measured), None)
        ratio = value / metrics["teacher/perplexity"]
        told = "" if error is None else f"{error:,.2g}"
        rows.append([name, f"{value:,.2f}", told, f"{ratio:,.2f}"])
    return rows


def _next_command(student: Path) -> str:
    return (
        f"    python -c \"import tc, transformers; p = transformers.pipeline('text-generation', "
        f"'{student}'); print(p('My fellow Americans,', max_new_tokens=40)[0]['generated_text'])\""
    )


def show_plan(yaml: str, plan: Plan) -> None:
    """Prints a resolved configuration and what it would do and cost."""
    ui.show_config(yaml)
    sizes = plan.geometry
    seconds = "unknown: the wanted device is not here"
    if plan.seconds is not None:
        seconds = f"about {ui.duration(plan.seconds)}, besides reading and writing"
    rows = [
        *_layer_rows(plan),
        ["teacher parameters", f"{sizes.parameters:,}"],
        ["student parameters", f"{plan.student_parameters:,}"],
        ["parameters of a mixer", f"{plan.mixer_parameters:,}"],
        ["memory", f"about {ui.size(plan.memory_bytes)}"],
        *_recovery_row(plan),
        ["disk", f"about {ui.size(plan.disk_bytes)}"],
        ["arithmetic", f"about {plan.flops:.2g} floating-point operations"],
        ["time on this machine", seconds],
    ]
    ui.table("plan (nothing was loaded or written)", ["", "value"], rows)


def _layer_rows(plan: Plan) -> list[list[str]]:
    num_layers = plan.geometry.num_hidden_layers
    if plan.kept is None:
        return [
            ["layers that keep attention", f"{plan.num_kept}, chosen by {plan.scores} scores"],
            ["layers that are converted", f"{num_layers - plan.num_kept}"],
        ]
    return [
        ["layers that keep attention", _listed(plan.kept)],
        ["layers that are converted", _listed(others(plan.kept, num_layers))],
    ]


def _recovery_row(plan: Plan) -> list[list[str]]:
    if plan.recovery_bytes is None or plan.loading_bytes is None:
        return []
    return [
        ["memory of recovery, each device", f"about {ui.size(plan.recovery_bytes)}"],
        ["the same, before models are dealt", f"about {ui.size(plan.loading_bytes)}"],
    ]


def _listed(layers: list[int]) -> str:
    return f"{len(layers)}: {', '.join(map(str, layers))}" if layers else "none"
