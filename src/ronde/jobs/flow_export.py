"""Write a flow as a definition of another system. That system orders, starts, and shows the steps;
each of them runs ``ronde flow --only STEP``, so commands, conditions, values, and what is kept stay
what they are. The system's workers share the flow's folder.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ronde.jobs.flow import Flow, FlowStep
from ronde.world import ArgumentError

__all__ = ["TARGETS", "export_flow"]


def export_flow(target: str, flow: Flow, file: str, image: str = "") -> str:
    """The definition, as text.

    Args:
        target: one of :data:`TARGETS`.
        flow: the steps.
        file: path of ``flow.yaml``, as the system's workers see it.
        image: of the containers, where the target has some.

    Raises:
        ArgumentError: another target, or one that needs an image.
    """
    if target not in TARGETS:
        raise ArgumentError(f"--export {target}: expected {', '.join(TARGETS)}.")
    return TARGETS[target](flow, file, image)


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that are set: a system's own defaults stand where a step says nothing."""
    return {name: value for name, value in fields.items() if value}


def _limit(step: FlowStep) -> int:
    """Seconds for a step and the start of its command; 0: any."""
    return int(step.time) + 60 if step.time else 0


def _command(step: FlowStep, file: str) -> list[str]:
    return ["ronde", "flow", "--only", step.name, file]


def _name(file: str) -> str:
    stem = file.rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml")
    return "".join(c if c.isalnum() else "-" for c in stem).strip("-").lower() or "flow"


def _airflow(flow: Flow, file: str, image: str) -> str:
    """A DAG file for Airflow 2.4 and later: skipped steps end well, so each waits for success."""
    lines = [
        '"""Made by ronde flow --export airflow; its steps are in ' + file + '."""',
        "",
        "from datetime import timedelta",
        "",
        "import pendulum",
        "from airflow import DAG",
        "",
        "try:",
        "    from airflow.providers.standard.operators.bash import BashOperator",
        "except ImportError:  # before Airflow 3",
        "    from airflow.operators.bash import BashOperator",
        "",
        "with DAG(",
        f"    dag_id={_name(file)!r},",
        "    schedule=None,",
        '    start_date=pendulum.datetime(2024, 1, 1, tz="UTC"),',
        "    catchup=False,",
        "    max_active_runs=1,",
        ") as dag:",
        "    steps = {}",
    ]
    for name in flow.order():
        step = flow.steps[name]
        # a minute more than the step's own limit: ronde flow ends it first, and in order
        limit = f"timedelta(seconds={step.time + 60:g})" if step.time else "None"
        lines += [
            f"    steps[{name!r}] = BashOperator(",
            f"        task_id={name!r},",
            f"        bash_command={shlex.join(_command(step, Path(file).name))!r},",
            f"        retries={step.retries},",
            f"        execution_timeout={limit},",
            "        append_env=True,",  # else the worker's own variables are gone
            f"        cwd={str(Path(file).absolute().parent)!r},",
            "    )",
        ]
    for name, step in flow.steps.items():
        lines += [f"    steps[{need!r}] >> steps[{name!r}]" for need in step.needs]
    return "\n".join(lines) + "\n"


def _github(flow: Flow, file: str, image: str) -> str:
    """A workflow: one job a step, the flow's folder handed on as a cache of the run."""
    jobs: dict[str, Any] = {}
    for name in flow.order():
        step = flow.steps[name]
        key = "flow-${{ github.run_id }}-"
        jobs[name] = {
            "runs-on": "ubuntu-latest",
            **_given(container=image, needs=list(step.needs)),
            **({"timeout-minutes": int(step.time // 60) + 2} if step.time else {}),
            "steps": [
                {"uses": "actions/checkout@v4"},
                {
                    "uses": "actions/cache@v4",
                    "with": {
                        "path": "\n".join(["runs", *_outputs(flow)]),
                        "key": f"{key}{name}",
                        # the newest of a step before it, else of an earlier run
                        "restore-keys": "".join(f"{key}{need}\n" for need in step.needs)
                        + "flow-\n",
                    },
                },
                {"run": shlex.join(_command(step, file))},
            ],
        }
        if len(step.needs) > 1:  # a job restores one cache
            raise ArgumentError(
                f"--export github: {name} needs {', '.join(step.needs)}, whose machines share no "
                "folder: let it need one of them, or run ronde flow in one job."
            )
    whole = {"name": _name(file), "on": {"push": None, "workflow_dispatch": None}, "jobs": jobs}
    return yaml.safe_dump(whole, sort_keys=False, width=100)


def _outputs(flow: Flow) -> list[str]:
    return [output for step in flow.steps.values() for output in step.outputs]


def _argo(flow: Flow, file: str, image: str) -> str:
    """A WorkflowTemplate: a DAG of containers that mount one claim, named as the flow."""
    _need_image("argo", image)
    name = _name(file)
    for step_name in flow.steps:
        if "_" in step_name:
            raise ArgumentError(f"--export argo: {step_name} has a _, which no name has there.")
    templates: list[dict[str, Any]] = [
        {
            "name": "flow",
            "dag": {
                "tasks": [
                    {
                        "name": step,
                        "template": step,
                        **_given(dependencies=list(flow.steps[step].needs)),
                    }
                    for step in flow.order()
                ]
            },
        }
    ]
    for step in flow.steps.values():
        templates.append(
            {
                "name": step.name,
                **_given(activeDeadlineSeconds=_limit(step)),
                # ronde flow retries what its causes allow; Argo what happens to the pod
                "retryStrategy": {"limit": str(step.retries), "retryPolicy": "OnError"},
                "container": {
                    "image": image,
                    "command": _command(step, file),
                    "workingDir": "/flow",
                    "volumeMounts": [{"name": "flow", "mountPath": "/flow"}],
                },
            }
        )
    whole = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": "flow",
            "volumes": [{"name": "flow", "persistentVolumeClaim": {"claimName": name}}],
            "templates": templates,
        },
    }
    return yaml.safe_dump(whole, sort_keys=False, width=100)


def _step_functions(flow: Flow, file: str, image: str) -> str:
    """A state machine in Amazon States Language: jobs of AWS Batch, whose definition mounts a
    file system. Steps that wait for the same ones are side by side.
    """
    levels: list[list[str]] = []
    for name in flow.order():
        needs = flow.steps[name].needs
        level = max((i + 1 for i, names in enumerate(levels) if set(names) & set(needs)), default=0)
        if level == len(levels):
            levels.append([])
        levels[level].append(name)
    states: dict[str, Any] = {}
    names = [names[0] if len(names) == 1 else f"stage-{i + 1}" for i, names in enumerate(levels)]
    for place, (title, level_names) in enumerate(zip(names, levels, strict=True)):
        after = {"Next": names[place + 1]} if place + 1 < len(names) else {"End": True}
        tasks = {name: _batch_job(flow.steps[name], file) for name in level_names}
        if len(tasks) == 1:
            states[title] = {**tasks[level_names[0]], **after}
        else:
            branches = [
                {"StartAt": name, "States": {name: {**task, "End": True}}}
                for name, task in tasks.items()
            ]
            # ResultPath null keeps the input, JobQueue and JobDefinition, for the next stage
            states[title] = {"Type": "Parallel", "Branches": branches, "ResultPath": None, **after}
    machine = {
        "Comment": f"Made by ronde flow --export stepfunctions from {file}. Input: JobQueue, "
        "JobDefinition.",
        "StartAt": names[0],
        "States": states,
    }
    return json.dumps(machine, indent=1) + "\n"


def _batch_job(step: FlowStep, file: str) -> dict[str, Any]:
    retry = {"ErrorEquals": ["States.TaskFailed"], **_retry(step)}
    return {
        "Type": "Task",
        "Resource": "arn:aws:states:::batch:submitJob.sync",
        "Parameters": {
            "JobName": step.name,
            "JobQueue.$": "$.JobQueue",
            "JobDefinition.$": "$.JobDefinition",
            "ContainerOverrides": {"Command": _command(step, file)},
        },
        "ResultPath": None,
        **_given(TimeoutSeconds=_limit(step), Retry=[retry] if step.retries else []),
    }


def _retry(step: FlowStep) -> dict[str, Any]:
    return {"IntervalSeconds": 10, "BackoffRate": 2.0, "MaxAttempts": step.retries}


_SAGEMAKER_FOLDER = "/opt/ml/input/data/flow"
_SAGEMAKER_PARAMETERS = {
    "Role": None,
    "FileSystemId": None,
    "FileSystemType": "EFS",
    "DirectoryPath": None,
    "Subnet": None,
    "SecurityGroup": None,
    "InstanceType": "ml.m5.xlarge",
    "S3OutputPath": None,
}


def _sagemaker(flow: Flow, file: str, image: str) -> str:
    """A definition for SageMaker Pipelines: a training job a step, which mounts a file system."""
    _need_image("sagemaker", image)
    parameters = [
        {"Name": name, "Type": "String"} | ({} if default is None else {"DefaultValue": default})
        for name, default in _SAGEMAKER_PARAMETERS.items()
    ]
    steps = [_sagemaker_step(flow.steps[name], file, image) for name in flow.order()]
    whole = {"Version": "2020-12-01", "Metadata": {}, "Parameters": parameters, "Steps": steps}
    return json.dumps(whole, indent=1) + "\n"


def _sagemaker_step(step: FlowStep, file: str, image: str) -> dict[str, Any]:
    # the service's own limit of a training job, 5 days, and the highest one
    limit, longest = 5 * 86_400, 28 * 86_400
    seconds = int(step.time * (step.retries + 1)) + 60 if step.time else limit
    command = f"cd {_SAGEMAKER_FOLDER} && exec {shlex.join(_command(step, file))}"
    for wrong, why in (
        (
            "hosts" in step.on or "slurm" in step.on,
            f"is on {', '.join(step.on)}, and a step there is one job",
        ),
        (len(step.name) > 64, "has a longer name than 64 letters"),
        (len(command) > 256, "has a longer command than 256 letters: shorten the file's path"),
        (seconds > longest, f"may take {seconds:,} s with its retries, and a job {longest:,} s"),
    ):
        if wrong:
            raise ArgumentError(f"--export sagemaker: {step.name} {why}.")
    get = {name: {"Get": f"Parameters.{name}"} for name in _SAGEMAKER_PARAMETERS}
    folder = {
        "FileSystemId": get["FileSystemId"],
        "FileSystemType": get["FileSystemType"],
        "DirectoryPath": get["DirectoryPath"],
        "FileSystemAccessMode": "rw",
    }
    errors = ["SageMaker.JOB_INTERNAL_ERROR", "SageMaker.CAPACITY_ERROR"]
    retry = {"ExceptionType": errors, **_retry(step)}
    return {
        "Name": step.name,
        "Type": "Training",
        "Arguments": {
            "AlgorithmSpecification": {
                "TrainingInputMode": "File",
                "TrainingImage": image,
                "ContainerEntrypoint": ["sh", "-c"],
                "ContainerArguments": [command],
            },
            "OutputDataConfig": {"S3OutputPath": get["S3OutputPath"]},
            "StoppingCondition": {"MaxRuntimeInSeconds": seconds},
            "ResourceConfig": {
                "InstanceCount": 1,
                "InstanceType": get["InstanceType"],
                "VolumeSizeInGB": 30,
            },
            "RoleArn": get["Role"],
            "InputDataConfig": [
                {"ChannelName": "flow", "DataSource": {"FileSystemDataSource": folder}}
            ],
            "VpcConfig": {
                "Subnets": [get["Subnet"]],
                "SecurityGroupIds": [get["SecurityGroup"]],
            },
        },
        **_given(DependsOn=list(step.needs), RetryPolicies=[retry] if step.retries else []),
    }


def _need_image(target: str, image: str) -> None:
    if not image:
        raise ArgumentError(f"--export {target} needs --image: what its containers are made of.")


TARGETS: Mapping[str, Callable[[Flow, str, str], str]] = {
    "airflow": _airflow,
    "argo": _argo,
    "github": _github,
    "sagemaker": _sagemaker,
    "stepfunctions": _step_functions,
}
