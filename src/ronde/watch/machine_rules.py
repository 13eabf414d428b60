"""Rules on machines and on the pace of steps: from ``resources.jsonl`` and the times of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ronde.watch.record import Alert
from ronde.watch.rule import Alerts, rule
from ronde.watch.rule_view import HostView, RuleView
from ronde.world.identity import ranks_text
from ronde.world.units import format_bytes, format_seconds

__all__: list[str] = []

_PERIODS_A_SECOND = 10  # of a control group's CPU limit in a second, by default
_WARM_UP_STEPS = 20  # steps whose time says nothing


@rule("hosts", "")
def low_utilization(
    view: RuleView, gpu: float = 70.0, cpu: float = 60.0, idle: float = 30.0, seconds: float = 120.0
) -> Alerts:
    """Devices, or the cores that the workers have threads for, are idle for minutes."""
    for host, rows in _training(view, seconds):
        table, who = host.table, _of(view, host)
        text = ""
        if view.on_gpus:
            busy = table["gpu"][rows].max(axis=0)
            if np.min(busy) < gpu:
                worst = int(np.argmin(busy))
                text = f"GPU {worst}{who} was never busier than {busy[worst]:.0f} %"
                values = {"gpu": worst, "busy": float(busy[worst])}
        elif view.start is not None:
            cores = np.minimum(table["cores"][rows], len(host.ranks) * view.start.threads)
            used = float(np.max(table["cpu"][rows] * table["cores"][rows] / cores))
            free = float(np.min(table["idle"][rows]))  # other programs may have the cores
            if used < cpu and free > idle:
                text = (
                    f"the workers{who} never used more than {used:.0f} % of {cores[-1]:.0f} cores, "
                    f"and {free:.0f} % were idle"
                )
                values = {"used": used, "idle": free}
        if text:
            yield Alert(
                int(table.step[-1]),
                f"{text}, for {_span(seconds)}",
                remedy=_doctor(view),
                values=values,
            )


@rule("loading", "")
def input_bound(
    view: RuleView, share: float = 0.3, busy: float = 90.0, seconds: float = 120.0
) -> Alerts:
    """A worker waits for batches, and its device does, too."""
    for host, rows in _training(view, seconds):
        table = host.table
        shares = table["loading"][rows].sum(axis=0) / table["seconds"][rows].sum()
        if view.on_gpus:  # the script runs ahead of its device, which may have enough to do
            devices = np.median(table["gpu"][rows], axis=0)
            if len(devices) != len(shares):
                continue
            shares = np.where(devices < busy, shares, 0.0)
        worst = int(np.argmax(shares))
        if shares[worst] > share:
            yield Alert(
                int(table.step[-1]),
                f"rank {host.ranks[worst]}{_of(view, host)} waited for batches for "
                f"{100 * shares[worst]:.0f} % of {_span(seconds)}",
                rank=host.ranks[worst],
                remedy=_doctor(view),
                values={"share": float(shares[worst])},
            )


@rule("hosts", "what grows: losses or outputs kept with their graph, or a cache without a limit?")
def host_memory(view: RuleView, growth: float = 0.05, seconds: float = 1200.0) -> Alerts:
    """The memory of the workers grows so that it will be full before the training ends."""
    for host in view.hosts.values():
        used, limit = host.table["memory"], host.table["memory_limit"]
        if growing := _fills(view, host, used, limit, growth, seconds):
            who = f"of the workers{_of(view, host)}"
            yield Alert(int(host.table.step[-1]), f"memory {who} grows by {growing}")


@rule("devices", "losses or outputs kept with their graph? .item() and .detach() free it")
def gpu_memory(view: RuleView, growth: float = 0.05, seconds: float = 1200.0) -> Alerts:
    """The memory of a device grows so that it will be full before the training ends."""
    for host in view.hosts.values():
        used, limit = host.table["gpu_memory"], host.table["gpu_memory_limit"]
        for i in range(host.devices):
            if growing := _fills(view, host, used[:, i], limit[:, i], growth, seconds):
                who = f"of GPU {i}{_of(view, host)}"
                yield Alert(int(host.table.step[-1]), f"memory {who} grows by {growing}")
                break


@rule("hosts", "remove old runs and caches, or keep runs on another disk: --runs")
def disk_full(view: RuleView, share: float = 0.05, checkpoints: int = 2) -> Alerts:
    """The disk of the run directory has no room for what the run is about to write."""
    for host in view.hosts.values():
        free, total = (float(host.table[n][-1]) for n in ("disk_free", "disk_total"))
        size = view.checkpoint_bytes
        few = free < checkpoints * size
        if few or free < min(share * total, 1 << 30):
            more = (
                f"; a checkpoint has {format_bytes(size)}"
                if few
                else f" ({100 * free / total:.1f} %)"
            )
            yield Alert(
                int(host.table.step[-1]),
                f"{format_bytes(free)} are free on the disk of the run{_of(view, host)}{more}",
                values={"free": free, "checkpoint": size},
            )


@rule("hosts", "a higher CPU limit of the container or the job, or fewer threads and processes")
def throttled(view: RuleView, share: float = 0.2, seconds: float = 120.0) -> Alerts:
    """A control group's limit holds the workers up."""
    for host, rows in _training(view, seconds):
        table = host.table
        times, whole = table["throttled"][rows].sum(), table["seconds"][rows].sum()
        if times > share * _PERIODS_A_SECOND * whole:
            yield Alert(
                int(table.step[-1]),
                f"the CPU limit of their control group held workers{_of(view, host)} up "
                f"{times:,.0f} times in {_span(seconds)}",
                values={"times": int(times)},
            )


@rule("start", "what does the script do before its first step? ronde show prints its logs")
def slow_start(view: RuleView, minutes: float = 20.0) -> Alerts:
    """No step in a long time after the start."""
    line = view.starting
    if line is not None and line["since_start"] > 60 * minutes:
        yield Alert(
            int(line["step"]), f"no step in {line['since_start'] / 60:.0f} minutes after the start"
        )


@rule("steps", "")
def outlier_steps(
    view: RuleView, times: float = 5.0, share: float = 0.01, seconds: float = 0.2
) -> Alerts:
    """Some steps take many times longer than others."""
    step, taken = (column[_WARM_UP_STEPS:] for column in view.step_seconds())
    median = float(np.median(taken))
    far = taken > max(times * median, median + seconds)
    if np.count_nonzero(far) > share * len(taken):
        worst = int(np.argmax(taken))
        yield Alert(
            int(step[far][-1]),
            f"{np.count_nonzero(far)} of {len(taken)} steps took more than {times:g} times the "
            f"median of {format_seconds(median)}; step {step[worst]:,} took "
            f"{format_seconds(taken[worst])}",
            remedy=_doctor(view),
            values={"steps": step[far][-8:].tolist(), "median": median},
        )


@rule("waited", "what else does its machine do? Is its part of the work larger?")
def imbalance(view: RuleView, part: float = 0.2, windows: int = 3) -> Alerts:
    """The others wait for one rank in every step."""
    hosts = list(view.hosts.values())
    if view.start is None or sum(len(host.ranks) for host in hosts) < view.start.workers:
        return  # those of another host are not known yet
    slow = []
    for back in range(windows, 0, -1):
        waited, least, longest = dict[int, float](), math.inf, 0.0
        for host in hosts:
            if len(host.table) < back:
                return
            steps, waits = (host.table[n][-back] for n in ("steps", "waited"))
            waited |= zip(host.ranks, waits / np.maximum(steps, 1), strict=True)
            least = min(least, float(np.min(steps)))
            longest = max(longest, float(host.table["seconds"][-back]))
        if least < 10 or not np.isfinite(list(waited.values())).all():
            return
        rank, lost = _slowest(waited)
        if lost < part * longest / least:
            return
        slow.append(rank)
    if len(set(slow)) > 1:
        return
    host = next(host for host in hosts if rank in host.ranks)
    others = sorted(waited.keys() - {rank})
    why = "".join(f"; {each}" for each in host.why.get(rank, ()))
    yield Alert(
        int(host.table.step[-1]),
        f"{ranks_text(others)} {'waits' if len(others) == 1 else 'wait'} {format_seconds(lost)} of "
        f"each step of {format_seconds(longest / least)} for rank {rank}{_of(view, host)}{why}",
        rank=rank,
        values={"waited": lost, "step": longest / least},
    )


def _training(view: RuleView, seconds: float) -> Iterator[tuple[HostView, slice]]:
    """Hosts that took steps all the time, and did not evaluate, say; and the rows of that time."""
    for host in view.hosts.values():
        rows = host.newest(seconds)
        if rows is not None and np.all(host.table["steps"][rows].max(axis=1) > 0):
            yield host, rows


def _fills(
    view: RuleView, host: HostView, used: Any, limit: Any, growth: float, seconds: float
) -> str:
    """How memory grows, if it does in both halves of the time so that it is full before the end.
    In the first epoch, caches may fill, unless little is left.
    """
    rows = host.newest(seconds)
    if rows is None or view.start is None:
        return ""
    table, size, most = host.table, used[rows], float(limit[-1])
    hours, step = table["time"][rows] / 3600, table.step[rows]
    middle, now = len(size) // 2, float(np.median(size[-6:]))
    halves = slice(None, middle), slice(middle, None)
    # The slower half counts: a jump, as of a cache that filled once, is no growth.
    pace = min(float(np.polyfit(hours[h] - hours[0], size[h], 1)[0]) for h in halves)
    left = (float(table["last_step"][-1]) - step[-1]) * (hours[-1] - hours[0])
    left /= max(1, step[-1] - step[0])
    early = step[0] < view.start.steps_per_epoch and now < 0.8 * most
    if early or pace < growth * now or left <= 0 or now + pace * left < most:
        return ""
    return (
        f"{format_bytes(pace)} an hour: full in {_hours((most - now) / pace)}, and the training "
        f"takes {_hours(left)} more; {format_bytes(now)} of {format_bytes(most)} are used"
    )


def _of(view: RuleView, host: HostView) -> str:
    return f" of {host.host}" if len(view.hosts) > 1 else ""


def _doctor(view: RuleView) -> str:
    script = view.start.script if view.start is not None else ""
    return f"ronde doctor {script or 'train.py'}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} minutes"


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"


def _slowest(waited: Mapping[int, float]) -> tuple[int, float]:
    """The rank that has waited least, and for how long the others wait for it in the median.

    Example:
        >>> _slowest({0: 0.25, 1: 0.0, 2: 0.25})
        (1, 0.25)
    """
    slow = min(waited, key=lambda r: (waited[r], r))
    return slow, statistics.median(w for r, w in waited.items() if r != slow) - waited[slow]
