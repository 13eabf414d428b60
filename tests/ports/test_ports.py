"""Ports of public scripts are the same training: as the plain script on one worker, on two and
three, under each plan or refused with a sentence, and killed at some step and resumed on another
number of workers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from processes import TESTS, python
from sampling import ALL, some

EXAMPLES, PORTS = TESTS.parent / "examples", TESTS / "ports"
PLANS = {  # spec -> workers
    "shard=optimizer": 2,
    "shard=gradients": 3,
    "shard=parameters": 2,
    "pipeline=2": 2,
    "tensor=2": 2,
    "pipeline=2,shard=optimizer": 4,
}
SAVE_EVERY = 3
NOT_SPLIT = {"tensor=2": "nothing in the model can be split by 2"}
NOT_TRIED = {"tensor=2": "finding what to split takes a forward pass and a loss"}
FOREIGN = re.compile(r"gloo|NCCL|Connection (closed|reset)|Traceback|\.cpp")


@dataclass
class Port:
    """A script, the arguments that make it small, and its number of optimizer steps.

    Attributes:
        needs: packages.
        refuses: plans that cannot carry the script out, and words of the sentence that says so.
    """

    folder: Path
    arguments: str
    steps: int
    needs: tuple[str, ...] = ("sklearn",)
    refuses: dict[str, str] = field(default_factory=dict)


def _piped(text: str) -> dict[str, str]:
    return {plan: text for plan in PLANS if "pipeline" in plan}


CASES = {
    "word_lm": Port(
        PORTS / "word_lm",
        "--epochs 3 --words 800 --vocabulary 20 --columns 6 --bptt 17 --width 6 --dropout 0",
        3 * 7,
        (),
        NOT_TRIED | _piped("A script that owns its loop (run.backward) cannot drive a pipeline"),
    ),
    "reinforce": Port(
        EXAMPLES / "reinforce",
        "--updates 12 --episodes 5",
        12,
        (),
        NOT_TRIED | _piped("A script that owns its loop (run.backward) cannot drive"),
    ),
    "simclr": Port(
        EXAMPLES / "simclr",
        "--epochs 3 --warmup 1 --images 100 --batch 24",
        3 * 4,
        refuses=NOT_TRIED | _piped("they cannot use the run"),
    ),
    "diffusion": Port(
        EXAMPLES / "diffusion",
        "--epochs 2 --images 30 --batch 10 --width 8 --warmup 3",
        2 * 3,
        ("sklearn", "diffusers"),
    ),
    "gpt": Port(
        EXAMPLES / "gpt",
        "--epochs 2 --megabytes 0.01 --batch 32 --context 16 --width 16 --layers 2 --heads 2",
        2 * 19,
        (),
    ),
    "imagenet": Port(
        PORTS / "imagenet",
        "--epochs 4 --images 100 --batch 30",
        4 * 4,
        refuses=NOT_SPLIT | _piped("sync_batchnorm=True does not work in a pipeline"),
    ),
    "gcn": Port(PORTS / "gcn", "--epochs 12 --nodes 60 --dropout 0", 12, (), NOT_SPLIT),
    "horovod": Port(PORTS / "horovod", "--epochs 2 --images 200 --batch 30 --dropout 0", 2 * 7),
}
SAMPLE = some(list(CASES), 5)


def cell(name: str, folder: Path, **values) -> dict:
    port = CASES[name]
    script = port.folder / values.pop("script", "train.py")
    return {
        "script": str(script),
        "folder": str(folder),
        "arguments": port.arguments.split(),
        **values,
    }


def grid(name: str, folder: Path) -> dict[str, list[dict]]:
    """Every cell of a port: its name -> one training, or one that is killed and resumed."""
    draw = random.Random(name)
    cells = {"plain": {"script": "plain.py"}, "1": {}, "2": {"workers": 2}, "3": {"workers": 3}}
    cells |= {plan: {"plan": plan, "workers": n} for plan, n in PLANS.items()}
    chains = {key: [cell(name, folder / key, **values)] for key, values in cells.items()}
    for before, after, plan in ((2, 3, ""), (3, 1, ""), (1, 2, "shard=optimizer")):
        step = draw.randint(SAVE_EVERY + 1, CASES[name].steps)
        key = f"{before} killed at {step}, {after} {plan}".strip()
        shared = {"save_every": SAVE_EVERY}
        chains[key] = [
            cell(name, folder / key, workers=before, kill_at=step, **shared),
            cell(name, folder / key, workers=after, plan=plan, resume=True, **shared),
        ]
    return chains


def sampled(chains: dict[str, list[dict]], turn: int) -> dict[str, list[dict]]:
    """The references, and of the rest another part for each port."""
    if ALL:
        return chains
    keys = list(chains)
    sizes, plans, kills = keys[2:4], keys[4:-3], keys[-3:]
    kept = ["plain", "1", plans[turn // 2 % len(plans)] if turn % 2 else kills[turn // 2 % 3]]
    kept += sizes[turn // 3 % 2 :][:1] if turn % 3 == 0 else []
    return {key: chains[key] for key in kept}


def installed(port: Port) -> bool:
    return all(importlib.util.find_spec(package) for package in port.needs)


def differ(a: list[float], b: list[float]) -> float:
    """The largest difference, relative above 1; infinite if there are more or fewer numbers."""
    if len(a) != len(b):
        return math.inf
    pairs = zip(a, b, strict=True)
    return max((abs(x - y) / max(1.0, abs(y)) for x, y in pairs if x != y), default=0.0)


def distance(found: dict, wanted: dict) -> dict[str, float]:
    """How far two trainings are apart, by what they have in common."""
    apart = {}
    for what in ("losses", "values"):
        apart[what] = differ(found[what], wanted[what])
    if "evaluations" in found and "evaluations" in wanted:
        flat = [[n for each in side["evaluations"] for n in each] for side in (found, wanted)]
        apart["evaluations"] = differ(*flat)
    names = found["weights"].keys() & wanted["weights"].keys()
    assert names, "no weight in common"
    apart["weights"] = max(differ(found["weights"][n], wanted["weights"][n]) for n in names)
    return apart


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, dict]]:
    folder = tmp_path_factory.mktemp("ports")
    names = [name for name in SAMPLE if installed(CASES[name])]
    chains = {n: sampled(grid(n, folder / n), i) for i, n in enumerate(names)}
    job = folder / "job.json"
    job.write_text(json.dumps([chain for each in chains.values() for chain in each.values()]))
    imports = "transformers,diffusers,diffusers.training_utils,sklearn.datasets"
    done = python(
        [str(TESTS / "ports_worker.py"), str(job)],
        folder,
        3000 if ALL else 400,
        {"PORT_IMPORTS": imports},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: {
            key: json.loads((Path(chain[-1]["folder"]) / "outcome.json").read_text())
            for key, chain in each.items()
        }
        for name, each in chains.items()
    }


def wrong(name: str, key: str, found: dict, all_of: dict[str, dict]) -> str:
    """What is wrong with a cell; empty where nothing is."""
    expected = CASES[name].refuses.get(key)
    if found["state"] == "refused":
        if expected is None or expected not in found["text"] or FOREIGN.search(found["text"]):
            return f"refused: {found['text']}"
        return ""
    if expected is not None:
        return f"{found['state']}, expected a refusal"
    if found["state"] != "trained":
        return f"{found['state']}: {found.get('text', '')}"
    bound = 1e-10 if key in PLANS or "shard" in key else 1e-12
    against = all_of["plain" if key == "1" else "1"]
    if "losses" not in against:
        return f"nothing to compare with: {against.get('text')}"
    apart = distance(found, against)
    worst = max(apart.values())
    if len(found["losses"]) != CASES[name].steps:
        return f"{len(found['losses'])} steps"
    return "" if worst <= bound else f"apart by {apart}"


@pytest.mark.timeout(3100 if ALL else 420)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_port_is_the_same_training(outcomes, name):
    if name not in outcomes:
        pytest.skip(f"needs {' and '.join(CASES[name].needs)}")
    cells = outcomes[name]
    assert cells["plain"]["state"] == "trained", cells["plain"]
    faults = {
        key: text
        for key, found in cells.items()
        if key != "plain" and (text := wrong(name, key, found, cells))
    }
    assert not faults, "\n".join(f"{key}: {text}" for key, text in faults.items())
