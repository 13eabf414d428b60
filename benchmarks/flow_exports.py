"""Give exported flows to the systems that they are for: does each accept them?

100 random flows are written for Airflow (parsed by its ``DagBag``), Argo (validated by the types of
``hera``), and Step Functions (created in ``moto``). What is not installed is left out::

    pip install apache-airflow hera 'moto[stepfunctions]'
    python benchmarks/flow_exports.py
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flow_faults import graph, written
from ronde.jobs.flow import Flow, load_flow
from ronde.jobs.flow_export import export_flow


def flows(count: int, folder: Path) -> Iterator[tuple[Path, Flow]]:
    """Random flows, and their files."""
    for number in range(count):
        file = folder / f"flow-{number}.yaml"
        file.write_text(written(graph(random.Random(f"export-{number}"), 40)))
        yield file, load_flow(file)


def airflow(count: int, folder: Path) -> dict[str, Any]:
    """Parse all by DagBag, and compare steps and what they wait for."""
    os.environ["AIRFLOW_HOME"] = str(folder / "airflow")
    os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    dags = folder / "dags"
    dags.mkdir()
    known = {}
    for file, flow in flows(count, folder):
        (dags / f"{file.stem.replace('-', '_')}.py").write_text(
            export_flow("airflow", flow, str(file))
        )
        known[file.stem] = flow
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:
        from airflow.models import DagBag
    bag = DagBag(dag_folder=str(dags))
    same = sum(
        {t.task_id: set(t.upstream_task_ids) for t in bag.dags[name].tasks}
        == {s.name: set(s.needs) for s in flow.steps.values()}
        for name, flow in known.items()
        if name in bag.dags
    )
    return {
        "accepted": len(bag.dags),
        "same steps": same,
        "errors": list(bag.import_errors.items())[:1],
    }


def argo(count: int, folder: Path) -> dict[str, Any]:
    """Validate all by the types of Argo's interface."""
    from hera.workflows.models import WorkflowTemplate

    accepted = 0
    for file, flow in flows(count, folder):
        text = export_flow("argo", flow, str(file), "image:1")
        parsed = getattr(WorkflowTemplate, "model_validate", WorkflowTemplate.parse_obj)
        accepted += parsed(yaml.safe_load(text)).metadata.name == file.stem
    return {"accepted": accepted}


def step_functions(count: int, folder: Path) -> dict[str, Any]:
    """Create all in a local Step Functions, which parses and validates them."""
    import boto3
    from moto import mock_aws

    role = "arn:aws:iam::123456789012:role/flow"
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "eu-west-1"}
    with mock_aws():
        client = boto3.client("stepfunctions", **keys)
        for file, flow in flows(count, folder):
            definition = export_flow("stepfunctions", flow, str(file))
            client.create_state_machine(name=file.stem, definition=definition, roleArn=role)
        machines = client.list_state_machines()["stateMachines"]
    return {"accepted": len(machines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=100)
    asked = parser.parse_args()
    targets = {"airflow": airflow, "hera": argo, "moto": step_functions}
    for package, check in targets.items():
        if importlib.util.find_spec(package):
            with tempfile.TemporaryDirectory() as folder:
                print(check.__name__, json.dumps(check(asked.graphs, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
