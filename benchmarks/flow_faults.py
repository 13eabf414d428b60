"""Random flows whose steps fail or are killed, under a command that is killed: does each step's
effect come once, in order, and what does a second start run again?

A naive oracle knows what each step's output must be. After each flow, one byte of one input is
changed: exactly the steps below it must run again::

    python benchmarks/flow_faults.py --graphs 300
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

WORK = """
name=$1; fails=$2; end=$3; shift 3
echo $name >> started
tries=$(cat $name.tries 2>/dev/null || echo 0)
echo $((tries + 1)) > $name.tries
[ $tries -lt $fails ] && eval "$end"
sleep 0.0$(($$ % 9))
(echo $name; cat "$@" /dev/null) | sha256sum | cut -c1-64 > $name.out
"""
RUN = """
import sys
from pathlib import Path
from ronde.jobs.flow import load_flow
from ronde.jobs.flow_run import FlowRun
run = FlowRun(load_flow(Path("flow.yaml")), Path("runs/flow"), wait=0.01, patience=2.0)
sys.exit(0 if run.run().is_good else 1)
"""


def graph(rng: random.Random, most: int) -> dict[str, dict[str, Any]]:
    """Steps: needs, how often each fails at first and how, retries, and whether it reads a file."""
    steps: dict[str, dict[str, Any]] = {}
    for number in range(rng.randint(2, most)):
        needs = rng.sample(list(steps), min(len(steps), rng.choice([0, 1, 1, 2, 3])))
        fails = rng.choice([0] * 12 + [1, 1, 2, 99])
        reads = not needs or rng.random() < 0.2
        end = rng.choice(["exit 1", "kill -9 $$"])
        steps[f"s{number}"] = {
            "needs": needs,
            "fails": fails,
            "end": end,
            "retries": 2,
            "reads": reads,
        }
    return steps


def written(steps: dict[str, dict[str, Any]]) -> str:
    """The flow."""
    flow = {}
    for name, step in steps.items():
        files = [f"{need}.out" for need in step["needs"]] + [f"{name}.in"] * step["reads"]
        flow[name] = {
            "run": f"sh work.sh {name} {step['fails']} '{step['end']}' {' '.join(files)}",
            "needs": step["needs"],
            "in": files,
            "out": f"{name}.out",
            "retries": step["retries"],
            "retry": "any" if step["end"] == "exit 1" else "lost",
        }
    return json.dumps({"steps": flow})


def expected(steps: dict[str, dict[str, Any]], folder: Path) -> dict[str, str]:
    """The outputs of the steps that can be done, one after the other."""
    outputs: dict[str, str] = {}
    for name, step in steps.items():
        if step["fails"] > step["retries"] or any(need not in outputs for need in step["needs"]):
            continue
        text = f"{name}\n" + "".join(f"{outputs[need]}\n" for need in step["needs"])
        text += (folder / f"{name}.in").read_text() if step["reads"] else ""
        outputs[name] = hashlib.sha256(text.encode()).hexdigest()
    return outputs


def run(folder: Path, rng: random.Random, kills: int) -> int:
    """Run the flow to its end, killed at random moments before. Returns how often it was."""
    killed = 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", RUN], cwd=folder)
        try:
            process.wait(rng.uniform(0.2, 1.0) if killed < kills else 300)
            return killed
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1


def judge(steps: dict[str, dict[str, Any]], folder: Path) -> str:
    """What differs from the oracle; empty if nothing does."""
    want = expected(steps, folder)
    found = {p.stem: p.read_text().strip() for p in folder.glob("*.out")}
    if found != want:
        return f"outputs of {sorted(set(found.items()) ^ set(want.items()))}"
    out = folder / "runs" / "flow" / "ledger" / "out"
    commits = Counter(path.name.rpartition("-")[0] for path in out.iterdir())
    if set(commits) != set(want) or max(commits.values(), default=1) > 1:
        return f"commits {commits}"
    return ""


def one(rng: random.Random, most: int, kills: int) -> dict[str, Any]:
    """A flow from its beginning to the change of a byte."""
    steps = graph(rng, most)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.sh").write_text(WORK)
        (folder / "flow.yaml").write_text(written(steps))
        for step, told in steps.items():
            if told["reads"]:
                (folder / f"{step}.in").write_text(f"{rng.random()}\n")
        killed = run(folder, rng, kills)
        wrong = judge(steps, folder)
        started = (folder / "started").read_text().split()
        done = expected(steps, folder)
        again = ""
        if not wrong:
            (folder / "started").write_text("")
            run(folder, rng, 0)
            if set((folder / "started").read_text().split()) & set(done):
                again = "a second start ran steps that were done"
            changed = rng.choice([s for s in done if steps[s]["reads"]] or [""])
            if changed:
                (folder / f"{changed}.in").write_text("another\n")
                below = {changed}
                for step, told in steps.items():
                    if below & set(told["needs"]):
                        below.add(step)
                (folder / "started").write_text("")
                run(folder, rng, 0)
                ran = set((folder / "started").read_text().split()) & set(done)
                if ran != below & set(done):
                    again = f"{changed} changed: ran {sorted(ran)}, not {sorted(below & set(done))}"
                elif judged := _outputs_differ(steps, folder):
                    again = judged
        return {
            "steps": len(steps),
            "done": len(done),
            "kills": killed,
            "started": len(started),
            "wrong": wrong or again,
        }


def _outputs_differ(steps: dict[str, dict[str, Any]], folder: Path) -> str:
    want = expected(steps, folder)
    found = {p.stem: p.read_text().strip() for p in folder.glob("*.out")}
    return "" if found == want else "outputs after a change"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--most", type=int, default=40, help="steps of a graph, at most")
    parser.add_argument("--kills", type=int, default=1, help="of each flow, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found, began = [], time.monotonic()
    for number in range(asked.graphs):
        found.append(one(random.Random(f"{asked.seed}-{number}"), asked.most, asked.kills))
        if found[-1]["wrong"]:
            print(number, found[-1], flush=True)
    total = {key: sum(each[key] for each in found) for key in ("steps", "done", "kills", "started")}
    total |= {"graphs": len(found), "wrong": sum(bool(each["wrong"]) for each in found)}
    print(json.dumps(total | {"seconds": round(time.monotonic() - began)}))
    if asked.json:
        asked.json.write_text(json.dumps({"total": total, "graphs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
