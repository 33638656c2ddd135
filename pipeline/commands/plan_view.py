"""How a plan is shown: a table, a picture of the devices, why it won, what was close, and the training tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from libra.pipeline.commands.plan_close import Close, Explained
from libra.resources.types import Plan, RequestRecord
from libra.scheduler_plugin.planner import Planner
from libra.scheduler_plugin.planner.pricing import dealt
from libra.scheduler_plugin.planner.tree import LEVELS

_BAR = 60


def show(
    planner: Planner, plan: Plan, records: Sequence[RequestRecord], close: Sequence[Close], trees: Sequence[Explained],
    simulated: dict[str, Any],
) -> None:  # fmt: skip
    """Print everything about ``plan`` that a person may want to know."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    kinds = ", ".join(f"{len(planner.inventory.of(k))} {k}" for k in planner.inventory.kinds)
    console.print(f"[bold]{planner.model.name}[/bold] on {kinds}, {len(records)} trajectories a step")
    console.print(_table(plan))
    console.print(_devices(planner, plan))
    for part in plan.rollout:
        if part.layout.instances:
            console.print(_lengths(part.kind, plan, records))
    console.print(_why(plan))
    if "why" in simulated:
        console.print(f"no plan simulated: {simulated['why']}")
    elif simulated:
        console.print(
            f"{simulated['plans']} of the best {simulated['offered']} plans simulated: this one "
            f"{simulated['seconds']:.1f} s a step, the closed form's choice "
            f"{simulated['seconds_of_predicted_best']:.1f} s"
        )
    for other in plan.alternatives:
        console.print(f"  close: {other.what}, {other.seconds:.1f} s ({other.reason})")
    for runner_up in close:
        console.print(f"  close: {runner_up}")
    console.print(f"costs: {plan.provenance}")
    if planner.config.launches is None:
        console.print(
            f"strategies: those of the {planner.config.trainer} trainer, to plan with; no trainer of this package "
            "launches them yet (--config or --trainer plan for one that does)"
        )
    for remark in planner.model.remarks:
        console.print(f"note on {planner.model.name}: {remark}")
    for tree in trees:
        console.print(_tree(plan, tree))


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("side", "devices", "how", "seconds"):
        table.add_column(column, justify="right" if column in ("devices", "seconds") else "left")
    table.add_row(
        "train", str(plan.strategy.gpus), f"{plan.strategy} on {plan.train_kind}", f"{plan.train_seconds:.1f}"
    )
    for part in plan.rollout:
        how = f"{part.layout} on {part.kind} ({part.layout.kind})"
        if part.prefill_instances:
            how = f"prefill: {part.prefill_instances}×TP{part.prefill_tp} on {part.kind}"
        if part.classes != ("all",):
            how += f", for {', '.join(part.classes)}"
        gpus = part.layout.gpus + part.prefill_tp * part.prefill_instances
        table.add_row("roll out", str(gpus), how, f"{part.layout.seconds:.1f}")
    table.add_row("step", str(plan.strategy.gpus + plan.rollout_gpus), f"{len(plan.idle)} idle", f"{plan.seconds:.1f}")
    return table


def _devices(planner: Planner, plan: Plan) -> str:
    """A line a node (or a run of equal ones): T trains, 1 2 4 8 roll out at that degree, P prefills, . is idle."""
    mark: dict[str, str] = {}
    for placement in plan.placements:
        letter = {"train": "T", "prefill": "P"}.get(placement.role, str(placement.size))
        mark |= dict.fromkeys(placement.devices, letter)
    nodes: dict[str, str] = {}
    for device in planner.inventory.devices:
        nodes[device.node] = nodes.get(device.node, "") + mark.get(device.id, ".")
    lines: list[str] = []
    run: list[tuple[str, str]] = []
    for name, row in [*nodes.items(), ("", "")]:
        if run and row != run[-1][1]:
            span = run[0][0] if len(run) == 1 else f"{run[0][0]}…{run[-1][0]} ({len(run)} nodes)"
            lines.append(f"  {run[0][1]}  {span}")
            run = []
        run.append((name, row))
    return "devices (T trains, a digit rolls out at that TP degree, P prefills, . idle)\n" + "\n".join(lines)


def _lengths(kind: str, plan: Plan, records: Sequence[RequestRecord]) -> str:
    """Which lengths go where: a bar over the sorted requests, a character for a share of them."""
    part = next(p for p in plan.rollout if p.kind == kind)
    lines = [f"lengths on {kind} (a bar is the share of requests)"]
    served = dealt(plan.rollout, records)[plan.rollout.index(part)]
    lower = 0
    for bucket in part.layout.buckets:
        upper = bucket.max_context
        share = sum(lower < r.context and (upper is None or r.context <= upper) for r in served) / len(records)
        name = "mixed TP" if bucket.tp is None else f"TP {bucket.tp}"
        bound = "" if upper is None else f" to {upper:,}"
        bar = "█" * max(1, round(share * _BAR))
        lines.append(f"  {bucket.instances:4d} × {name:8s} {lower + 1:>7,}{bound:12s} {bar} {share:.0%}")
        lower = upper or lower
    return "\n".join(lines)


def _why(plan: Plan) -> str:
    bound = "training" if plan.train_seconds >= plan.rollout_seconds else "rollout"
    layouts = ", ".join(sorted({part.layout.kind for part in plan.rollout if part.layout.instances}))
    reasons = {
        "partition": "intervals by length with rising TP are the exact optimum and beat mixing",
        "mixing": "mixing lengths over instances of different TP beats every partition by length",
        "homogeneous": "one TP degree for all is as fast as anything else",
    }
    if len({tp for part in plan.rollout for tp in part.layout.degrees}) == 1:
        reasons["partition"] = "the exact partition by length has one TP degree; nothing else is faster"
    text = "; ".join(reasons[kind] for kind in layouts.split(", ") if kind in reasons)
    return f"why: {text}. A step is bound by {bound}; both sides as even as the devices allow."


def _tree(plan: Plan, explained: Explained) -> Tree:
    chosen_here = (explained.kind, explained.gpus) == (plan.train_kind, plan.strategy.gpus)
    note = " (the plan's)" if chosen_here else ""
    root = Tree(f"training strategies for {explained.gpus} {explained.kind}{note}")
    path = [root]
    for node in explained.nodes:
        depth = LEVELS.index(node.level)
        seconds = "" if node.seconds is None else f" {node.seconds:.1f} s"
        best = chosen_here and node.level == "RC" and node.strategy == plan.strategy
        sign = "[green]kept[/green]" if node.kept else "[red]cut[/red]"
        del path[depth + 1 :]
        path.append(path[-1].add(f"{node.label} {sign}{seconds}: {node.reason}{' ← chosen' if best else ''}"))
    return root
