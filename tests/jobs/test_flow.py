"""``ronde flow``: against a naive oracle, with steps that fail, and a command that is killed."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

import zygote
from lab import lab, missing
from processes import TESTS
from ronde.jobs import flow_run
from ronde.jobs.flow import Flow, load_flow
from ronde.jobs.flow_export import export_flow
from ronde.jobs.flow_run import FlowRun
from ronde.jobs.ledger import JobLedger
from ronde.world import ArgumentError, RondeError
from sampling import long

TRAIN = """
import sys, torch, ronde
torch.manual_seed(0)
x = torch.randn(40, 4)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
run = ronde.distribute(
    model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=10, save_every=1
)
for _ in run.epochs(3):
    for batch in run.batches():
        print("step", run.state.step, file=open("steps.txt", "a"))
        run.step(batch)
        if run.state.step == 7 and not __import__("os").path.exists("lost"):
            open("lost", "w").close()
            run.save()
            __import__("os").kill(__import__("os").getppid(), 9)  # the host is lost
            __import__("time").sleep(60)
    run.evaluate(data)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", zygote.Popen)
    return tmp_path


def states(flow: Flow, folder: Path, **options: object) -> dict[str, str]:
    result = FlowRun(flow, folder / "runs" / "flow", wait=0.01, **options).run()  # type: ignore[arg-type]
    return {name: step["state"] for name, step in result.steps.items()}


@pytest.mark.timeout(150)
def test_random_flows_with_failures_and_kills_do_what_an_oracle_says() -> None:
    script = TESTS.parent / "benchmarks" / "flow_faults.py"
    words = [sys.executable, str(script), "--graphs", "2", "--most", "12", "--seed", "5"]
    result = json.loads(subprocess.check_output(words, timeout=140))
    assert (result["graphs"], result["wrong"]) == (2, 0)
    assert result["kills"] > 0


@pytest.mark.timeout(120)
def test_a_training_whose_host_is_lost_goes_on_and_its_values_decide(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "flow.yaml").write_text("""
set: {lr: 0.1}
steps:
  train: {run: "ronde run train.py {lr}", in: train.py, on: {workers: 1}, retries: 1}
  good: {run: "echo {train.step} {train.run}", needs: train, when: train.loss < 1000 and train.step == 12}
  bad: {run: echo, needs: train, when: train.loss > 1000}
  below: {run: echo, needs: bad}
  report: {run: "echo {train.samples}", needs: [good, "bad?", train]}
""")
    said: list[str] = []
    states(load_flow(folder / "flow.yaml"), folder, tell=said.append)
    steps = [int(line.split()[1]) for line in (folder / "steps.txt").read_text().splitlines()]
    assert steps == list(range(12))  # the same run goes on: no step twice, none from the beginning
    lines = re.sub(" +", " ", "\n".join(said))
    for text in ("train try 2 killed by SIGKILL", "bad skipped train.loss is", "below skipped bad"):
        assert text in lines
    assert (folder / "runs/flow/steps/report/log.txt").read_text() == "120\n"
    flow = load_flow(folder / "flow.yaml")
    assert set(states(flow, folder).values()) == {"kept", "skipped"}
    other = load_flow(folder / "flow.yaml", {"lr": "0.2"})
    assert FlowRun(other, folder / "runs/flow").why("train") == ["the command has changed"]


def test_what_is_kept_what_is_anew_and_what_is_missing(folder: Path) -> None:
    (folder / "in.txt").write_text("1")
    flow = Flow.of(
        a={"run": "sh -c 'cp in.txt a.txt; echo a >> ran'", "in": "in.txt", "out": "a.txt"},
        b={"run": "sh -c 'cp a.txt b.txt; echo b >> ran'", "in": "a.txt", "out": "b.txt"}
        | {"needs": "a"},
        c={"run": "sh -c 'echo c >> ran'", "needs": "b"},
    )
    ran = folder / "ran"

    def again(**options: object) -> str:
        ran.write_text("")
        states(flow, folder, **options)
        return "".join(ran.read_text().split())

    assert again() == "abc"
    assert again() == ""
    assert again(anew="b") == "bc"
    assert again(only="b") == ""
    (folder / "b.txt").unlink()
    assert FlowRun(flow, folder / "runs/flow").why("b") == [
        "b.txt, which it makes, is gone or has changed"
    ]
    assert again() == "b"
    (folder / "in.txt").unlink()
    assert states(flow, folder) == {"a": "failed", "b": "not run", "c": "not run"}
    with pytest.raises(RondeError, match="a, which comes before, has no result yet"):
        FlowRun(flow, folder / "other", only="c").run()


def test_tries_by_cause_time_and_a_missing_output(folder: Path) -> None:
    flow = Flow.of(
        lost={"run": "sh -c 'echo l >> ran; kill -9 $$'", "retries": 2},
        error={"run": "sh -c 'echo e >> ran; exit 1'", "retries": 2},
        any={"run": "sh -c 'echo a >> ran; exit 1'", "retries": 2, "retry": "any"},
        wrong={"run": "sh -c 'echo w >> ran; exit 2'", "retries": 2, "retry": "any"},
        slow={"run": "sleep 60", "time": "0.5s"},
        empty={"run": "true", "out": "nothing.txt"},
    )
    result = FlowRun(flow, folder / "runs" / "flow", wait=0.01, parallel=6).run()
    assert {step["state"] for step in result.steps.values()} == {"failed"}
    ran = (folder / "ran").read_text()
    assert [ran.count(letter) for letter in "leaw"] == [3, 1, 3, 1]
    assert "it took longer than 0.5 s" in result.steps["slow"]["why"]
    assert result.steps["empty"]["why"] == "it made no nothing.txt"


@pytest.mark.timeout(100)
def test_a_step_for_each_file(folder: Path) -> None:
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"{name}\n")
    flow = Flow.of(each={"run": "cat {}", "each": "*.txt"})
    assert states(flow, folder) == {"each": "done"}
    (out,) = (folder / "runs/flow/steps/each").glob("each-*/output.txt")
    assert out.read_text() == "a\nb\nc\n"
    assert states(flow, folder) == {"each": "kept"}
    out.unlink()
    flow = Flow.of(each={"run": "sh -c 'cat {} >> seen' sh", "each": "*.txt", "out": "seen"})
    assert states(flow, folder) == {"each": "done"}
    assert states(flow, folder, anew="each") == {"each": "done"}
    seen = folder / "seen"
    assert sorted(seen.read_text().split()) == ["a", "a", "b", "b", "c", "c"]
    seen.write_text("changed\n")
    assert states(flow, folder) == {"each": "done"}
    assert sorted(seen.read_text().split()) == ["a", "b", "c", "changed"]


def test_definitions_of_other_systems_have_the_same_steps(folder: Path) -> None:
    flow = Flow.of(
        a={"run": "true", "retries": 2, "time": "1h"},
        b={"run": "true", "needs": "a"},
        c={"run": "true", "needs": ["a"]},
        d={"run": "true", "needs": ["b", "c?"]},
    )
    edges = {("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")}
    dag = export_flow("airflow", flow, "flow.yaml")
    compile(dag, "dag.py", "exec")
    assert set(re.findall(r"steps\['(\w)'\] >> steps\['(\w)'\]", dag)) == edges
    argo = yaml.safe_load(export_flow("argo", flow, "flow.yaml", "image:1"))
    tasks = argo["spec"]["templates"][0]["dag"]["tasks"]
    assert {(d, t["name"]) for t in tasks for d in t.get("dependencies", ())} == edges
    machine = json.loads(export_flow("stepfunctions", flow, "flow.yaml"))
    assert machine["States"]["a"]["Next"] == "stage-2"
    assert machine["States"]["a"]["TimeoutSeconds"] == 3660
    assert [b["StartAt"] for b in machine["States"]["stage-2"]["Branches"]] == ["b", "c"]
    assert machine["States"]["d"]["End"] is True
    pipeline = json.loads(export_flow("sagemaker", flow, "flow.yaml", "image:1"))
    assert {(d, s["Name"]) for s in pipeline["Steps"] for d in s.get("DependsOn", ())} == edges
    first = pipeline["Steps"][0]
    assert first["RetryPolicies"][0]["MaxAttempts"] == 2
    job = first["Arguments"]
    assert job["StoppingCondition"]["MaxRuntimeInSeconds"] == 3 * 3600 + 60
    assert job["AlgorithmSpecification"]["ContainerArguments"] == [
        "cd /opt/ml/input/data/flow && exec ronde flow --only a flow.yaml"
    ]
    given = set(re.findall(r"Parameters\.(\w+)", json.dumps(pipeline["Steps"])))
    assert given == {parameter["Name"] for parameter in pipeline["Parameters"]}
    with pytest.raises(ArgumentError, match="d needs b, c, whose machines share no folder"):
        export_flow("github", flow, "flow.yaml")
    with pytest.raises(ArgumentError, match="--export argo needs --image"):
        export_flow("argo", flow, "flow.yaml")
    with pytest.raises(ArgumentError, match="--export luigi: expected airflow, argo"):
        export_flow("luigi", flow, "flow.yaml")


@pytest.mark.parametrize(
    ("target", "name", "step", "error"),
    [
        ("argo", "a_b", {"run": "x"}, "--export argo: a_b has a _"),
        ("sagemaker", "a", {"run": "x", "time": "15d", "retries": 1}, "a may take 2,592,060 s"),
        (
            "sagemaker",
            "a",
            {"run": "x", "on": {"slurm": {"nodes": 2}}},
            "a is on slurm, and a step",
        ),
    ],
)
def test_what_another_system_cannot_say_is_refused(
    target: str, name: str, step: dict[str, object], error: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(error)):
        export_flow(target, Flow.of(**{name: step}), "flow.yaml", "image:1")


def test_the_example_is_whole() -> None:
    flow = load_flow(TESTS.parent / "examples" / "flow" / "flow.yaml")
    assert flow.order() == ["prepare", "tune", "train", "test", "publish", "report"]
    for step in flow.steps.values():
        for name in step.inputs:
            made = any(name in other.outputs for other in flow.steps.values())
            assert made or (TESTS.parent / "examples" / "flow" / name).is_file(), name


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{a: {run: x, need: b}}", ":1:21: a step has no key need. Did you mean needs?"),
        ("{a: {run: x, needs: b}, b: {run: y, needs: a}}", "a cycle: a → b → a."),
        ("{train: {run: x}, b: {run: y, needs: trian}}", "which is no step. Did you mean train?"),
        ("{a: {run: 'x {b.z}'}, b: {run: y}}", "{b.z} is not known here: a does not need b"),
        ("{a: {run: 'x {z}'}}", "{z} is not under set"),
        ("{a: {run: x, when: b.x > 1}}", "there is no such step: it would never run"),
        ("{a: {run: x, when: b.x}}", "b.x is not STEP.KEY OP NUMBER"),
        ("{a: {run: x, on: {workers: 2}}}", "on: workers is for commands of ronde run"),
        ("{a: {run: x, on: {worker: 2}}}", "on has no key worker"),
        ("{a: {run: x, out: f}, b: {run: y, in: f}}", "b reads f, which a makes: add needs: a"),
        ("{a: {run: x, retries: -1}}", "retries is a whole number from 0"),
        ("{a: {run: x, in: f, out: f}}", "a reads f, and changes it by what it makes"),
        ("{a: {run: x, out: f}, b: {run: y, out: ./f}}", "b and a both make f"),
        ("{a: {run: x, out: d}, b: {run: y, out: d/f}}", "b makes d/f, and so changes what a"),
        ("{a: {run: x, out: f.txt}, b: {run: y, each: '*.txt'}}", "b reads *.txt, which a makes"),
        ("{a: {run: x}, a: {run: y}}", ":1:22: a is there twice"),
        ("{tränen: {run: x}}", "tränen is no name of a step: a letter, then letters"),
        ("{a: {run: !!python/name:os.system ''}}", "run is a command"),
        ('{a: {run: "echo \'x"}}', "the command cannot be split: No closing quotation"),
        (
            "{a: {run: \"sh -c 'echo ${HOME}'\"}}",
            "Braces of the command itself need spaces: { HOME",
        ),
        ("{a: {run: x, env: {A=B: 1}}}", "A=B cannot be a name under env"),
        ("{a: {run: x, time: 0s}}", "expected a time"),
        ("{a: {run: x, in: gone}}", "a reads gone, which is not there, and which no step has"),
        ("{a: {run: x}}\nset: {a: 1}", ":1:9: a is a step, and is under set"),
        ("{}", "there are no steps"),
        ("\n\ta: {run: x}", ":2:1: found character '\\t'"),
        ("{a: {run: x, retry: often}}", "retry is lost or any"),
        ("{a: {needs: []}}", "the step a has no run"),
    ],
)
def test_mistakes_are_told_with_their_place(folder: Path, text: str, error: str) -> None:
    (folder / "flow.yaml").write_text(f"steps: {text}")
    with pytest.raises(ArgumentError, match=re.escape(error)) as raised:
        load_flow(folder / "flow.yaml", needs_inputs=True)
    assert re.match(r"flow\.yaml:\d+:\d+: |.*flow\.yaml:\d+:\d+: ", str(raised.value))
    assert not (folder / "runs").exists()


def test_a_file_that_is_no_text_is_told(folder: Path) -> None:
    file = folder / "flow.yaml"
    file.write_bytes(b"steps:\n  a: {run: 'sch\xf6n'}")
    with pytest.raises(ArgumentError, match=r"flow\.yaml: expected UTF-8"):
        load_flow(file)
    with pytest.raises(ArgumentError, match="Is a directory"):
        load_flow(folder)


def test_many_ways_to_a_step_take_no_time() -> None:
    names = [f"s{i}" for i in range(60)]
    needs = {name: {"run": "x", "needs": names[max(0, i - 3) : i]} for i, name in enumerate(names)}
    flow = Flow.of(**needs)  # 10¹⁵ paths
    assert flow.order() == names
    assert flow.before("s59") == set(names[:-1])


def test_a_value_is_one_word_as_it_is_written(folder: Path) -> None:
    (folder / "flow.yaml").write_text("""
set: {lr: 0.10, flag: yes, text: "it's; 'two words'"}
steps:
  a:
    run: python -c 'import json, sys; print(json.dumps(dict(text=sys.argv[1:])))' {lr} {flag} {text}
  b:
    run: python -c 'import os, sys; print(sys.argv[1:], os.environ["X"])' x={a.text}
    needs: a
    env: {X: off}
""")
    assert set(states(load_flow(folder / "flow.yaml"), folder).values()) == {"done"}
    given = ["0.10", "yes", "it's; 'two words'"]
    log = (folder / "runs/flow/steps/b/log.txt").read_text()
    assert log == f"{[f'x={given}']} off\n"


def test_inputs_behind_links_count_and_an_unreadable_one_fails_its_step(folder: Path) -> None:
    (folder / "store").mkdir()
    (folder / "data").mkdir()
    (folder / "data/link").symlink_to(folder / "store")
    (folder / "store/above").symlink_to(folder / "data")  # no end
    (folder / "store/x").write_text("1")
    flow = Flow.of(a={"run": "true", "in": "data"}, b={"run": "true", "in": "dangling"})
    (folder / "dangling").symlink_to(folder / "nothing")
    assert states(flow, folder) == {"a": "done", "b": "failed"}
    assert states(flow, folder) == {"a": "kept", "b": "failed"}
    (folder / "store/x").write_text("2")
    assert states(flow, folder) == {"a": "done", "b": "failed"}


HOSTS = """
import os, socket, torch, ronde
torch.manual_seed(0)
x = torch.randn(60, 4)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
run = ronde.distribute(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=torch.nn.functional.mse_loss,
    batch_size=6, save_every=3, async_save=False,
)
for _ in run.epochs(2):
    for batch in run.batches():
        if run.state.step == 7 and run.rank == 1 and not os.path.exists("asked"):
            open("asked", "w").close()  # the test turns this host off
            while True:
                __import__("time").sleep(60)
        if run.rank == 0:
            print("step", run.state.step, file=open("steps.txt", "a"))
        run.step(batch)
"""


@long  # a host that is lost is test_restarts.py's, and what a step's status means is above
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.timeout(150)
def test_a_host_that_is_lost_costs_the_steps_since_the_last_checkpoint(folder: Path) -> None:
    (folder / "train.py").write_text(HOSTS)
    with lab(folder / "lab", 2) as hosts:
        _, second = hosts.names
        where = ",".join(f"{name}:1" for name in hosts.names)
        run = f"ronde run --ssh-config {hosts.ssh_config} train.py"
        step = {"run": run, "on": {"hosts": where}, "retries": 1}
        lines: list[str] = []

        def tell(line: str) -> None:
            lines.append(line)
            if "try 2" in line:
                hosts.boot(second)

        ended: dict[str, str] = {}
        thread = threading.Thread(
            target=lambda: ended.update(states(Flow.of(train=step), folder, tell=tell))
        )
        thread.start()
        while not (folder / "asked").exists() and thread.is_alive():
            time.sleep(0.05)
        hosts.lose(second)
        thread.join()
    log = (folder / "runs/flow/steps/train/log.txt").read_text()
    assert ended == {"train": "done"}, lines + [log]
    steps = [int(line.split()[1]) for line in (folder / "steps.txt").read_text().splitlines()]
    assert steps in ([*range(7), *range(6, 20)], [*range(8), *range(6, 20)])
    assert "try 2" in " ".join(" ".join(lines).split())


def test_a_late_step_takes_along_what_its_shell_has_started(folder: Path) -> None:
    flow = Flow.of(slow={"run": "sh -c '(sleep 3; touch late); echo'", "time": "1s"})
    assert states(flow, folder) == {"slow": "failed"}
    time.sleep(2.5)
    assert not (folder / "late").exists()


def test_an_output_that_is_long_to_read_is_no_lost_owner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, taken = JobLedger(folder / "runs" / "flow" / "ledger", 1.5), []

    def slow(path: Path) -> str:
        time.sleep(2.0)
        taken.append(other.claim())
        return ""

    monkeypatch.setattr(flow_run, "content_digest", slow)
    flow = Flow.of(make={"run": "touch made", "out": "made"})
    assert states(flow, folder, patience=1.5) == {"make": "done"} and taken == [None]


def test_two_of_other_values_do_not_read_each_others_answers(folder: Path) -> None:
    say = """sh -c 'echo "{ \\"x\\": $1 }"; touch began-$1; sleep 1.5' sh {v}"""
    runs = [FlowRun(Flow.of({"v": v}, say={"run": say}), folder / "runs" / "flow") for v in (1, 2)]
    found: list[object] = []
    first = threading.Thread(target=lambda: found.append(runs[0].run().steps["say"]["values"]))
    first.start()
    until = time.monotonic() + 30
    while not (folder / "began-1").exists() and time.monotonic() < until:
        time.sleep(0.05)
    second = runs[1].run().steps["say"]["values"]
    first.join()
    assert [*found, second] == [{"x": 1}, {"x": 2}]
