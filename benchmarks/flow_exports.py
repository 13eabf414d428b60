"""Give exported flows to the systems that they are for: does each accept them?

100 random flows are written for Airflow (parsed by its ``DagBag``), Argo (validated by the types
of ``hera``), Step Functions (created in ``moto``), and SageMaker Pipelines (compared with the
definition that its SDK writes for the same jobs; validated by botocore's model of
``CreateTrainingJob`` and by the published schema). What is not installed is left out::

    pip install apache-airflow hera 'moto[stepfunctions]' 'sagemaker<3'
    python benchmarks/flow_exports.py --schema pipeline-definition.schema.json

The schema is that of
``aws-sagemaker-mlops/sagemaker-model-building-pipeline-definition-JSON-schema``. It lags behind the
service: it knows neither a training job's own command nor several causes of a retry, which the
manual asks for and the SDK writes. Both are added to it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import logging
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


def sagemaker_pipelines(count: int, folder: Path, schema: Path | None = None) -> dict[str, Any]:
    """Compare all with the SDK's, fill them in, and validate their jobs."""
    import botocore.session
    from botocore.validate import ParamValidator
    from jsonschema import Draft7Validator

    session = botocore.session.get_session()
    model = session.get_service_model("sagemaker").operation_model("CreateTrainingJob")
    found = {"same as SDK": 0, "steps": 0, "botocore": 0}
    checker = None
    if schema is not None:
        known = json.loads(schema.read_text())
        before = Draft7Validator(copy.deepcopy(known))
        causes = known["definitions"]["RetryPolicy"]["properties"]
        causes["ExceptionType"] = {"type": "array", "items": causes["ExceptionType"]}
        job = known["definitions"]["TrainingStep"]["properties"]["Arguments"]["properties"]
        texts = {"type": "array", "items": {"$ref": "#/definitions/StringArgumentValue"}}
        for name in ("ContainerEntrypoint", "ContainerArguments"):
            job["AlgorithmSpecification"]["properties"][name] = texts
        checker = Draft7Validator(known)
        found |= {"schema": 0, "schema as it is": 0}
    for file, flow in flows(count, folder):
        ours = json.loads(export_flow("sagemaker", flow, file.name, "image:1"))
        found["same as SDK"] += ours == _by_sdk(flow, file.name)
        for step in ours["Steps"]:
            job = {"TrainingJobName": step["Name"], **_filled(step["Arguments"])}
            errors = ParamValidator().validate(job, model.input_shape)
            found["steps"] += 1
            found["botocore"] += not errors.has_errors()
        if checker is not None:
            found["schema"] += checker.is_valid(ours)
            found["schema as it is"] += before.is_valid(ours)
    return found


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"Get"}:
            return "arn:aws:iam::123456789012:role/x" if "Role" in value["Get"] else "EFS-12345678"
        return {key: _filled(item) for key, item in value.items()}
    return [_filled(item) for item in value] if isinstance(value, list) else value


@functools.cache
def _session() -> Any:
    import boto3
    from sagemaker.telemetry import telemetry_logging
    from sagemaker.workflow.pipeline_context import PipelineSession

    logging.disable(logging.WARNING)
    # its own way to turn this off validates the SDK's whole configuration for each step
    telemetry_logging._send_telemetry_request = lambda *given, **named: None
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "eu-west-1"}
    return PipelineSession(boto_session=boto3.Session(**keys), default_bucket="b")


def _by_sdk(flow: Flow, file: str) -> Any:
    """The definition that the SDK of SageMaker writes for the same jobs."""
    from sagemaker.estimator import Estimator
    from sagemaker.inputs import FileSystemInput
    from sagemaker.workflow.parameters import ParameterString
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.retry import SageMakerJobExceptionTypeEnum as Cause
    from sagemaker.workflow.retry import SageMakerJobStepRetryPolicy
    from sagemaker.workflow.steps import TrainingStep

    session = _session()
    names = ("Role", "FileSystemId", "DirectoryPath", "Subnet", "SecurityGroup", "S3OutputPath")
    asked = {name: ParameterString(name) for name in names}
    asked["FileSystemType"] = ParameterString("FileSystemType", default_value="EFS")
    asked["InstanceType"] = ParameterString("InstanceType", default_value="ml.m5.xlarge")
    order = ("Role", "FileSystemId", "FileSystemType", "DirectoryPath", "Subnet", "SecurityGroup")
    steps = []
    for name in flow.order():
        step = flow.steps[name]
        place = "/opt/ml/input/data/flow"
        estimator = Estimator(
            image_uri="image:1",
            role=asked["Role"],
            instance_count=1,
            instance_type=asked["InstanceType"],
            output_path=asked["S3OutputPath"],
            max_run=int(step.time * (step.retries + 1)) + 60 if step.time else 5 * 86_400,
            sagemaker_session=session,
            subnets=[asked["Subnet"]],
            security_group_ids=[asked["SecurityGroup"]],
            container_entry_point=["sh", "-c"],
            container_arguments=[f"cd {place} && exec ronde flow --only {name} {file}"],
            disable_profiler=True,
            debugger_hook_config=False,
        )
        folder = FileSystemInput("fs", "EFS", "/flow", "rw")
        source = folder.config["DataSource"]["FileSystemDataSource"]
        for key in ("FileSystemId", "FileSystemType", "DirectoryPath"):
            source[key] = asked[key]
        causes = [Cause.INTERNAL_ERROR, Cause.CAPACITY_ERROR]
        policy = SageMakerJobStepRetryPolicy(
            exception_types=causes, interval_seconds=10, max_attempts=step.retries or 1
        )
        steps.append(
            TrainingStep(
                name,
                step_args=estimator.fit({"flow": folder}),
                depends_on=list(step.needs),
                retry_policies=[policy] if step.retries else [],
            )
        )
    parameters = [asked[name] for name in (*order, "InstanceType", "S3OutputPath")]
    pipeline = Pipeline(
        "flow",
        parameters=parameters,
        pipeline_experiment_config=None,
        steps=steps,
        sagemaker_session=session,
    )
    definition = json.loads(pipeline.definition())
    assert definition.pop("PipelineExperimentConfig") is None
    for made in definition["Steps"]:  # the SDK has no word for its absence
        assert made["Arguments"].pop("ProfilerConfig") == {"DisableProfiler": True}
    return definition


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--schema", type=Path, help="of SageMaker's pipeline definitions")
    asked = parser.parse_args()
    targets = {
        "airflow": airflow,
        "hera": argo,
        "moto": step_functions,
        "sagemaker": functools.partial(sagemaker_pipelines, schema=asked.schema),
    }
    for package, check in targets.items():
        if importlib.util.find_spec(package):
            with tempfile.TemporaryDirectory() as folder:
                print(package, json.dumps(check(asked.graphs, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
