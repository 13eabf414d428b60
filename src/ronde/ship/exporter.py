"""``ronde ship RUN``, in the process of the script: stops at ``distribute``, loads the checkpoint,
exports the model, and compares the export with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ronde import checkpoint
from ronde.measure.model_call import ModelCall, read_call, saved_model
from ronde.measure.study import answer_at_distribute, report_progress
from ronde.parallel import Work
from ronde.ship.bundle import ShipError, write_bundle
from ronde.ship.export import export_onnx, export_program
from ronde.ship.floor import check_export, model_outputs, session_inputs
from ronde.ship.quantize import judge_int8, quantize
from ronde.ship.runtime import EXPECTED, INT8, MODEL, RECIPE, open_session

__all__ = ["install_exporter", "store_samples"]


def install_exporter() -> None:
    """Observe this process, because of ``RONDE_STUDY=ship``.

    The options are ``checkpoint``, ``to``, ``out``, ``check``, ``int8``, ``max_drop``, ``sign``,
    ``serial``, and ``facts``.
    """
    answer_at_distribute(ship)


def ship(work: Work, calls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Export, check, and write the bundle.

    Raises:
        ShipError: the export is wrong, or the model cannot be exported.
    """
    model, saved, call, rest = saved_model(work, calls, Path(options["checkpoint"]))
    labels = rest[0].numpy() if rest and _are_labels(rest[0], call) else None
    checked = "training samples"
    slices = None
    if options.get("check"):
        call, others = read_call(Path(options["check"]), model, call, "--check")
        labels, slices = others.get("target"), others.get("slice")
        checked = str(options["check"])
    about: dict[str, Any] = {
        **options["facts"],
        "checkpoint": saved.digest,
        "step": saved.step,
        "checked": {"samples": call.samples, "on": checked}
        if options["to"] != "safetensors"
        else {},
        "data": {k: v for k, v in saved.state.get("data", {}).items() if k != "recipe"},
    }
    result: dict[str, Any] = {}

    def fill(folder: Path) -> None:
        to = options["to"]
        if to == "onnx":
            report_progress("exporting to ONNX")
            export_onnx(model, call, folder / MODEL)
            report_progress("comparing the export with the model")
            floors = check_export(model, folder / MODEL, call)
            about["floor"] = [f.__dict__ for f in floors]
            about["limits"] = [f.limit for f in floors]
            store_samples(folder, call)
            if recipe := saved.state.get("data", {}).get("recipe"):
                (folder / RECIPE).write_text(json.dumps(recipe, indent=1))
            if options.get("int8"):
                result["int8"] = _int8(folder, call, labels, slices, float(options["max_drop"]))
        else:
            _write_torch(folder, model, call, to)
        (folder / "card.md").write_text(model_card(about))

    bundle = write_bundle(
        Path(options["out"]),
        fill,
        about,
        key=Path(options["sign"]) if options.get("sign") else None,
        serial=int(options["serial"]),
    )
    return {**result, "about": dict(bundle.about), "signed": bundle.signed}


def model_card(about: Mapping[str, Any]) -> str:
    """What is known about a model, for people: its origin, its data, and its last metrics."""
    git = about.get("git") or {}
    dirty = ", with changes that were not committed" if git.get("dirty") else ""
    lines = [
        f"# {about['model']}",
        "",
        f"- run: {about['run']}, step {about['step']}",
        f"- parameters: {about['parameters']:,}",
        f"- code: commit {git['commit']}{dirty}" if git.get("commit") else "- code: no commit",
        f"- checkpoint: SHA-256 {about['checkpoint']}",
        f"- plan: {json.dumps(about['plan'])}",
        f"- versions: {', '.join(f'{k} {v}' for k, v in about['versions'].items())}",
        *(f"- data: {key} {value}" for key, value in about["data"].items()),
    ]
    for name, metrics in about["metrics"].items():
        lines += ["", f"## {name}", ""]
        for metric, value in metrics.items():
            if isinstance(value, dict):  # a table of bias, a group each
                for group, row in value.items():
                    lines.append(f"- {metric}, {group}: {json.dumps(row)}")
            else:
                lines.append(f"- {metric}: {value}")
    return "\n".join(lines) + "\n"


def _are_labels(value: Any, call: ModelCall) -> bool:
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return whole and value.shape == (call.samples,)


def store_samples(folder: Path, call: ModelCall) -> None:
    """Write some samples of a call, and what the exported model makes of them, for devices."""
    from safetensors.numpy import save_file

    session = open_session(folder / MODEL)
    inputs = session_inputs(session, call.rows(0, min(32, call.samples)))
    values = {f"input.{name}": np.ascontiguousarray(v) for name, v in inputs.items()}
    outputs = session.run(None, inputs)
    values |= {f"output.{i}": np.ascontiguousarray(v) for i, v in enumerate(outputs)}
    save_file(values, folder / EXPECTED)


def _int8(
    folder: Path, call: ModelCall, labels: Any, slices: Any, most_drop: float
) -> dict[str, Any]:
    if labels is None:
        raise ShipError("--int8 is judged by accuracy: give labels, --check FILE with a 'target'.")
    if not all(t.is_floating_point() for t in call.tensors):
        raise ShipError("--int8 quantizes models whose inputs are floats, and this takes tokens.")
    feeds = session_inputs(open_session(folder / MODEL), call)
    quantize(folder / MODEL, feeds, folder / INT8)
    verdict = judge_int8(folder / MODEL, folder / INT8, feeds, labels, slices, most_drop)
    if verdict.refused:
        (folder / INT8).unlink()
        if "not offered" not in verdict.refused:
            raise ShipError(verdict.refused)
    return verdict.__dict__


def _write_torch(folder: Path, model: torch.nn.Module, call: ModelCall, to: str) -> None:
    if to == "safetensors":
        checkpoint.export(dict(model.state_dict()), folder / "model.safetensors")
        return
    try:
        program = export_program(model, call)
    except Exception as error:
        raise ShipError(f"torch cannot export this model: {str(error)[:300]}") from None
    own = model_outputs(model, call)
    for i, (mine, theirs) in enumerate(
        zip(own, model_outputs(program.module(), call), strict=True)
    ):
        if not torch.equal(mine, theirs):
            off = float((mine - theirs).abs().max())
            raise ShipError(f"the export is another function: output {i} is off by {off:.2g}.")
    torch.export.save(program, folder / "model.pt2")
