"""``ronde doctor --apply``: write prescriptions to a settings file and measure what they gain."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean
from ronde.world.units import format_rate

_SIGNED = "Written by ronde doctor"


def parse_apply(text: str | None) -> list[str]:
    """Parse ``"1,2"`` or prescription names.

    Raises:
        ArgumentError: nothing between the commas, or a name that no prescription has. Which numbers
            there are is known afterwards.
    """
    if text is None:
        return []
    words = [w.strip() for w in text.split(",")]
    if not all(words) or any(w.lstrip("-").isdigit() and int(w) < 1 for w in words):
        raise ArgumentError(
            f"--apply {text!r}: expected numbers or names of prescriptions with commas "
            "between them, as --apply 1,2."
        )
    names = [w for w in words if not w.isdigit()]
    if names:
        from ronde.doctor import NAMES

        for word in names:
            if word not in NAMES:
                raise ArgumentError(
                    f"--apply {word}: no prescription is called so; there are "
                    f"{', '.join(NAMES)}.{did_you_mean(word, NAMES)}"
                )
    return words


def check_writable(script: str) -> None:
    """Whether the settings file of a script can be written.

    Raises:
        ArgumentError: it cannot.
    """
    from ronde.loader import settings_file

    file = settings_file(script)
    if not os.access(file.absolute().parent, os.W_OK) or file.is_dir():
        raise ArgumentError(
            f"--apply writes {file}, which may not be written. Leave --apply out to see "
            "the verdict alone."
        )


def apply_prescriptions(
    values: dict[str, Any],
    chosen: list[str],
    script: str,
    feed: str,
    again: Callable[[str], dict[str, Any]],
    console: Any,
) -> dict[str, Any] | None:
    """Write prescriptions to the settings file, measure again, and compare the gain with the
    promise.

    Args:
        values: the verdict.
        chosen: numbers or names of prescriptions.
        script: whose settings.
        feed: the settings file that the verdict was found under, or ``none``.
        again: measures under a settings file, given its path.

    Returns:
        What came of it; None where there was nothing to apply.

    Raises:
        ArgumentError: one of them is not prescribed, or takes more than settings.
    """
    from rich.text import Text

    from ronde.loader import FeedSettings, settings_file

    def line(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    if values["healthy"] or not values["prescriptions"]:
        line(("applied  ", "bold"), "nothing: nothing is prescribed")
        return None
    picked = _picked(chosen, values["prescriptions"])
    # The verdict holds for the settings it was measured under: prescriptions are merged into those.
    settings = FeedSettings() if feed == "none" else FeedSettings.load(Path(feed))
    for p in picked:
        settings = settings.merged(FeedSettings.from_dict(p["settings"]))
    file = settings_file(script)
    before = file.read_bytes() if file.is_file() else None
    where, undo = _kept(file, before)
    names = ", ".join(p["id"] for p in picked)
    settings.save(file, f"{_SIGNED} --apply: {names}. ronde run reads it; --feed none does not.")
    line(("written  ", "bold"), f"{file}, which ronde run reads{where}")
    try:
        after = again(str(file.absolute()))
    except BaseException:
        # Not tried to the end: the next run shall not be the first to find out.
        if before is None:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(before)
        line(("undone   ", "bold yellow"), f"{file} is as it was: the settings could not be tried")
        raise
    # Several together are promised what the best of them is: what they share is gained once.
    promised = min(float(p["gap_here"]) for p in picked)
    before_rate, after_rate = (float(v["samples_per_second"]["real"]) for v in (values, after))
    gained = 100 * (float(values["gap"]) - float(after["gap"]))
    hoped = 100 * (float(values["gap"]) - promised)
    style = "green" if gained > 0.5 * hoped else "yellow"
    line(
        ("applied  ", "bold"),
        f"gap {values['gap']:.0%} -> ",
        (f"{after['gap']:.0%}", style),
        f", promised {promised:.0%}; {format_rate(before_rate)} -> "
        f"{format_rate(after_rate)} samples/s "
        f"(x {after_rate / before_rate:.2f}); "
        f"{gained:.0f} points gained of {hoped:.0f}",
    )
    if after["refused"]:
        line(("careful  ", "bold yellow"), after["refused"])
    elif gained < 0:
        line(("careful  ", "bold yellow"), f"it did not help here: {undo} to go back.")
    return {
        "prescriptions": [p["id"] for p in picked],
        "settings": settings.to_dict(),
        "file": str(file),
        "gap": after["gap"],
        "gap_low": after["gap_low"],
        "gap_high": after["gap_high"],
        "samples_per_second": after["samples_per_second"],
        "promised_gap": promised,
        "gained_points": gained,
        "promised_points": hoped,
        "refused": after["refused"],
    }


def _picked(chosen: list[str], listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prescriptions that are chosen; raises as :func:`apply_prescriptions` does."""
    by_name = {str(p["number"]): p for p in listed} | {p["id"]: p for p in listed}
    for word in chosen:
        if word not in by_name:
            known = ", ".join(f"{p['number']} ({p['id']})" for p in listed)
            many = f"there {'are' if len(listed) > 1 else 'is'} {len(listed)}"
            raise ArgumentError(
                f"--apply {word}: no prescription {word}; {many}: this time the doctor "
                f"prescribes {known}."
            )
        if by_name[word]["settings"] is None:
            raise ArgumentError(
                f"--apply {word}: {by_name[word]['text']} takes more than settings."
            )
    return [by_name[word] for word in chosen]


def _kept(file: Path, before: bytes | None) -> tuple[str, str]:
    """Keep what a person wrote. Returns what becomes of the old settings, and how to undo."""
    if before is None:
        return "; --feed none leaves it out, deleting it undoes it", f"delete {file}"
    if before.startswith(f"# {_SIGNED}".encode()):
        return ", in place of what an earlier --apply wrote", f"write {file} anew"
    kept = file.with_name(f"{file.name}.before")
    kept.write_bytes(before)
    return f"; what was there is kept in {kept}", f"move {kept} back to {file.name}"
