"""The answer of ``ronde scale`` in words: where to stop, what to fix to go further, and notes."""

from __future__ import annotations

from ronde.predict.intervals import Band
from ronde.scale.rows import FurtherRow, ScaleRow, Scaling

NO_GAP_SHARE = 0.03  # of the synthetic rate: less is noise


def _workers(n: int) -> str:
    return f"{n} worker{'s' if n > 1 else ''}"


def recommend(f: Scaling) -> str:
    """Where to stop, and what to fix to go further."""
    if "real" not in f.laws:
        row = f.rows[0]
        return (
            f"{_workers(row.workers)}: {row.real:,.0f} samples/s, {row.gap:.0%} below the "
            "synthetic rate; measure more sizes."
        )
    start = _where_to_stop(f)
    # The costs at the next size, or at the last one known.
    known: list[ScaleRow | FurtherRow] = sorted([*f.rows, *f.extrapolated], key=lambda r: r.workers)
    last = next((r for r in known if r.workers > f.stop_at), known[-1])
    synthetic = last.synthetic.value if isinstance(last.synthetic, Band) else last.synthetic
    ideal = last.workers * f.rows[0].synthetic / f.rows[0].workers
    # Shares of the ideal rate, which add up.
    lost_scale = max(0.0, 1.0 - synthetic / ideal)
    lost_input = last.gap * min(1.0, synthetic / ideal)
    if last.gap <= NO_GAP_SHARE and lost_scale <= 0.05:
        return f"{start}; nothing limits growth up to there."
    both = [
        (lost_input, *_input_advice(f, lost_input, last.workers)),
        (lost_scale, *_scale_advice(f, lost_scale)),
    ]
    both.sort(reverse=True)
    named = [advice for advice in both if advice[0] > 0.02] or both[:1]
    _, whys, cures = zip(*named, strict=True)
    text = f"{start}; at {last.workers}, {' and '.join(whys)}. To go further: {'; '.join(cures)}."
    if isinstance(last, FurtherRow) and last.real.high > 2.0 * last.real.low:
        text += (
            f" This is uncertain: with {last.workers} workers, it may be {last.real.low:,.0f} to "
            f"{last.real.high:,.0f} samples/s. Measure more sizes or --rounds."
        )
    return text


def _where_to_stop(f: Scaling) -> str:
    after = min(f.stop_at + 1, f.upto)
    source = "interpolated"
    if after > f.largest:
        source = "extrapolated"
    elif {f.stop_at, after} <= {r.workers for r in f.rows}:
        source = "measured"
    share = "half" if f.threshold == 0.5 else f"{f.threshold:.0%}"
    if f.stop_at >= f.upto:
        return (
            f"All {f.upto} pay ({source}): each further worker adds at least {share} of what the "
            "first gives"
        )
    return (
        f"Stop at {f.stop_at} ({source}): worker {f.stop_at + 1} adds less than {share} of what "
        "the first gives"
    )


def _input_advice(f: Scaling, lost: float, workers: int) -> tuple[str, str]:
    """Why the input costs speed, and what to do."""
    where = ""
    if f.wall is not None and f.wall.devices <= workers:
        part = {
            "cores": "the cores are",
            "loaders": "each worker's loaders are",
            "shared": "what all workers share is",
        }.get(f.wall.limit, f"{f.wall.stage} is")
        where = f" ({part} full from {f.wall.devices} on)"
    cure = f"ronde doctor {f.script}, which finds the cause in the input and cures it"
    return f"the input costs {lost:.0%}{where}", cure


def _scale_advice(f: Scaling, lost: float) -> tuple[str, str]:
    """Why more workers cost speed without the input, and what to do."""
    if f.full_cores and f.first.device == "cpu":
        return f"full cores cost {lost:.0%}", "more machines, or a GPU"
    what, cure = "the exchange", "accumulation"
    if f.first.batch == "keep":
        what = "the exchange, smaller batches"
        cure = "a larger batch (or batch='grow'), accumulation"
    why = f"{what} and waiting for the slowest worker cost {lost:.0%}"
    return why, f"{cure} or a faster connection"


def describe_limits(f: Scaling) -> list[str]:
    """Assumptions and limits of the answer."""
    notes = [*_batch_notes(f), *_machine_notes(f)]
    if len(f.rows) == 1:
        notes.append(
            "one size was measured, so no law can be fitted. Measure several, such as "
            "--workers 1,2,4."
        )
    elif f.laws and "usl" not in f.fits["real"]:
        notes.append(
            "the universal scalability law needs three sizes. Amdahl's law through two points is "
            "not tested by them."
        )
    ranges = [each for r in f.rows for each in (r.synthetic_range, r.real_range)]
    spread = max(high / low for low, high in ranges) - 1
    if spread > 0.2:
        notes.append(
            f"repeated readings differ by up to {spread:.0%}: the machine is busy, or --seconds is "
            "too short."
        )
    for name, law in f.laws.items():
        notes += [f"{name}: {text}." for text in law.notes if "parameters through" not in text]
    plans = sorted({s.plan for some in f.starts.values() for s in some})
    if plans != ["replicate"]:
        notes.append(f"plan: {', '.join(plans)}.")
    if f.rows[-1].gap > NO_GAP_SHARE or f.upto > f.largest:
        notes.append(
            "storage that was not at its limit is not visible here; ronde doctor tests it with "
            "more load."
        )
    return notes


def _batch_notes(f: Scaling) -> list[str]:
    last, batch = f.rows[-1], f.first.batch_size
    if f.first.batch != "keep":
        per_worker = f.rows[0].batch_per_worker
        return [
            f"batch='grow' (weak scaling): each worker has {per_worker:g} samples per step at any "
            f"size, so a step of {_workers(last.workers)} has "
            f"{last.batch_per_worker * last.workers:g}. That is a different training."
        ]
    notes = [
        f"batch='keep' (strong scaling): each step has {batch} samples at any size, "
        f"{last.batch_per_worker:g} for each of {_workers(last.workers)}. --batch grow asks about "
        "a constant batch per worker."
    ]
    if last.batch_per_worker < 1:
        notes.append(f"a batch of {batch} has fewer samples than workers: some of them only wait.")
    return notes


def _machine_notes(f: Scaling) -> list[str]:
    notes = []
    if f.threads is not None:
        notes.append(
            f"{f.threads} compute thread{'s' if f.threads > 1 else ''} per worker at every size, "
            "so that the speed-up comes from workers, not from threads. ronde run gives a single "
            "worker all cores."
        )
    if f.crowded:
        part = "core" if f.first.device == "cpu" else "device"
        notes.append(
            f"up to {f.largest} workers shared {f.per_node} {part}{'s' if f.per_node > 1 else ''}: "
            "larger sizes describe this machine overfilled, not more machines."
        )
    elif f.upto > f.per_node and f.laws:
        notes.append(
            f"beyond {f.per_node} workers, more machines like this one and an equally fast "
            "connection between them are assumed; neither was measured."
        )
    return notes
