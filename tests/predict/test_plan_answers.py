"""What an answer says holds together: speed-ups begin at one, what is printed is what runs, the
least is the least.
"""

from __future__ import annotations

import dataclasses
import json
import random
import socket

import pytest
import yaml

from planned import counted, shown
from processes import ronde_run
from ronde.plan import Plan
from ronde.predict.answer import explain, render_answer
from ronde.predict.assumptions import Precision
from ronde.predict.candidates import candidates
from ronde.predict.cluster import Cluster, LinkFit
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.predict import Predictor, predict
from ronde.predict.search import search
from ronde.run.options import accumulate
from sampling import ALL, long

MIB = 2.0**20


def chain_of(
    *seconds: float, batch: int = 64, parameters: int = 4_000_000, saved: float = 1e5, **more
) -> Costs:
    units = tuple(
        Unit(
            f"u{i}",
            LinearCost(1e-5, s),
            LinearCost(2e-5, 2 * s),
            parameters,
            trainable_bytes=parameters,
            optimizer_bytes=2 * parameters,
            saved_bytes=LinearCost(0, saved),
            crossing_bytes=LinearCost(0, 1e3),
            crossing_grad_bytes=LinearCost(0, 1e3),
            block=f"u{i}",
        )
        for i, s in enumerate(seconds)
    )
    return counted(Costs(units, batch, optimizer="AdamW", measured_samples=(1, 2), **more))


def wired(memory: float = 0.0, **more) -> Cluster:
    fit = LinkFit(1e-5, 1e9, 2)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    return Cluster(
        "here", links={k: {"node": fit, "cluster": fit} for k in kinds}, memory_bytes=memory, **more
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"optimizer_seconds": 0.03, "clip_seconds": 0.05},
        {"accumulate_seconds": 0.01},
    ],
)
def test_one_device_is_as_fast_as_itself(more):
    costs = chain_of(1e-3, 2e-3, 1e-3, **more)
    best = search(costs, wired(), 1).best
    assert best.speedup == pytest.approx(1.0) and best.efficiency == pytest.approx(1.0)
    in_parts = predict(Plan(1, 64, micro_batch=16), costs, wired())
    assert in_parts.step_seconds > best.step_seconds


def test_clipping_is_part_of_one_devices_step():
    costs, cluster = (
        chain_of(1e-4, 1e-4, batch=8, optimizer_seconds=0.01, clip_seconds=0.1),
        wired(),
    )
    found = search(costs, cluster, 2)
    alone = search(costs, cluster, 1).best
    assert found.best.speedup == pytest.approx(alone.step_seconds / found.best.step_seconds)


@pytest.mark.parametrize(("workers", "batch"), [(2, 64), (4, 20), (6, 20), (8, 50), (6, 7)])
def test_the_micro_batches_that_are_printed_are_those_that_run(workers, batch):
    costs, cluster = chain_of(*[1e-3] * 24, batch=batch), wired(devices_per_node=workers)
    predictor = Predictor(costs, cluster)
    tried = 0
    for ladder in candidates(Plan(workers=workers, batch_size=batch), costs, cluster):
        for plan in ladder:
            found = predictor(plan, quick=True)
            asked = dataclasses.replace(
                Plan.parse(found.plan.spec), workers=workers, batch_size=batch
            )
            runs = accumulate(asked)
            assert runs.accumulation == found.micro_batches == found.plan.accumulation, (
                found.plan.spec
            )
            assert (
                -(-max(1, -(-batch // plan.replicas)) // runs.accumulation) == found.micro_samples
            )
            tried += 1
    assert tried > 30


def test_a_plan_that_fits_by_its_micro_batches_says_so():
    costs = chain_of(*[1e-3] * 4, parameters=1_000_000, saved=2 * MIB)
    whole = predict(Plan(2, 64), costs, wired()).memory_bytes
    cluster = wired(memory=whole * 0.8, bucket_overlap=0.0)
    found = search(costs, cluster, 2)
    best = found.best
    assert best.verdict in ("fits", "risky") and best.micro_batches > 1
    assert f"micro_batch={best.micro_samples}" in best.plan.spec
    told = explain(found, costs, cluster, with_flips=False)
    if best.plan.pipeline == 1:
        assert f"in {best.micro_batches} micro-batches of {best.micro_samples}" in told.sentence
    assert f"micro_batch={best.micro_samples}" in " ".join(shown(render_answer(told)).split())
    again = dataclasses.replace(Plan.parse(best.plan.spec), workers=2, batch_size=64)
    assert predict(again, costs, cluster).memory_bytes == pytest.approx(best.memory_bytes)


@pytest.mark.parametrize("seed", range(6 if ALL else 2))
def test_the_least_is_the_least(seed):
    dice = random.Random(seed)
    units = chain_of(*[dice.uniform(1e-4, 5e-3) for _ in range(8)], batch=16).units
    sized = []
    for u in units:
        size = dice.randint(10_000, 8_000_000)
        sized.append(
            dataclasses.replace(
                u,
                parameter_bytes=size,
                trainable_bytes=size,
                optimizer_bytes=2 * size,
                saved_bytes=LinearCost(0, dice.uniform(0, MIB)),
            )
        )
    costs, room = (
        counted(Costs(tuple(sized), 16, optimizer="AdamW", measured_samples=(1, 2))),
        wired(devices_per_node=4),
    )
    speed, least = search(costs, room, 4), search(costs, room, 4, optimize="memory")
    smallest = min(p.memory_bytes for p in (*speed.plans, *least.plans))
    # half a percent for each mechanism
    assert least.best.memory_bytes == pytest.approx(smallest, rel=0.02)
    # So little that nothing fits: what is called the least is.
    tight = dataclasses.replace(room, memory_bytes=0.9 * smallest)
    told = explain(search(costs, tight, 4), costs, tight, with_flips=False)
    assert told.sentence.startswith("Nothing fits 4 workers")
    said = min(p.memory_bytes for p in told.result.plans)
    assert said == pytest.approx(smallest, rel=0.02) and told.result.plans[0].memory_bytes == said
    amount = told.decided.removeprefix("memory: ").split(" of ")[0]
    assert f"the least is {amount}, by {told.result.plans[0].plan.spec}" in told.sentence


GROWS = """
import torch, ronde
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
data = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randn(256, 16))
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), 0.1), data, loss=nn.functional.mse_loss, batch_size=8, batch="grow")
"""


@long
def test_a_batch_that_grows_is_planned_as_the_devices_would_train_it(tmp_path):
    (tmp_path / "train.py").write_text(GROWS)
    wired(memory=2.0**30, nodes=2, devices_per_node=4).save(tmp_path / "cluster.yaml")
    args = [
        "plan",
        "--cluster",
        "cluster.yaml",
        "--json",
        "answer.json",
        "--save",
        "plan.yaml",
        "train.py",
    ]
    done = ronde_run(args, tmp_path, 150)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["workers"] == 8 and answer["batch_size"] == 64
    kept = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert (kept["workers"], kept["batch_size"], kept["batch"]) == (8, 64, "grow")


@long
def test_nothing_is_saved_where_nothing_fits(tmp_path):
    (tmp_path / "train.py").write_text(GROWS)
    wired(memory=1024.0, devices_per_node=1).save(tmp_path / "cluster.yaml")
    done = ronde_run(
        ["plan", "--cluster", "cluster.yaml", "--save", "plan.yaml", "train.py"],
        tmp_path,
        150,
    )
    assert (
        done.returncode == 2
        and "Nothing fits" in done.stdout
        and "there is no plan to write" in done.stderr
    )
    assert not (tmp_path / "plan.yaml").exists()


def test_the_headlines_error_is_that_of_its_measurements():
    """ "± 6 %" of quiet runs must not stand over disturbed or misfitting numbers."""
    costs, cluster = chain_of(*[1e-3] * 8), wired(devices_per_node=4)

    def error(spec="replicate", where=cluster, **changed):
        plan = dataclasses.replace(Plan.parse(spec), workers=4, batch_size=64)
        sure = Precision.of(dataclasses.replace(costs, **changed), where, plan)
        assert ("± " in sure.step(1.0)) == (sure.time is not None) == (not sure.why)
        return sure.time

    assert error() == pytest.approx(0.064) and error("shard=optimizer") == pytest.approx(0.087)
    assert 0.3 < error(noise=0.3) < 0.31 and 0.4 < error(fit_error=0.4) < 0.41
    assert 0.2 < error(where=dataclasses.replace(cluster, noise=0.2)) < 0.21
    assert error("tensor=2") is None  # no such run was ever compared
    here = {"device": "cpu", "name": socket.gethostname(), "devices_per_node": 4096}
    assert error(where=dataclasses.replace(cluster, **here)) is None


DECODER = """
import torch, ronde
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(32, 64)
    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2)
tokens = torch.randint(64, (256, 16))
data = torch.utils.data.TensorDataset(tokens, tokens)
model = Model()
run = ronde.distribute(
    model, torch.optim.AdamW(model.parameters()), data, batch_size=64,
    loss=nn.functional.cross_entropy,
)
"""


def test_devices_that_are_not_here_are_planned_for_at_once_and_said_to_be_assumed(tmp_path):
    (tmp_path / "train.py").write_text(DECODER)
    args = ["plan", "--device", "H100", "--devices", "16", "--per-node", "4"]
    args += ["--network", "100Gbit", "--json", "answer.json", "train.py"]
    done = ronde_run(args, tmp_path, 150)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = [line.split("s  ")[1] for line in done.stderr.splitlines() if " …" in line]
    assert phases[0] == "starting train.py …" and "searching plans …" in phases
    assert "looking for when the answer would flip …" in phases
    assert "timing layers" not in done.stderr  # so that a busy machine disturbs nothing
    text = " ".join(done.stdout.split())
    assert "≈ " in text.partition("Decided by")[0] and "a step (± 8 %)" in text
    assert "predictions like these were off by 8 % in time" in text
    # of a node's link a quarter for each device, and 80 % of that
    assert "Assumed" in text and "2.5 GB/s per device between nodes" in text
    assert "62 % of it in matrix products" in text and " 0 µs" not in text
    values = json.loads((tmp_path / "answer.json").read_text())
    assert values["cluster"]["nodes"] == 4 and values["estimate"]
    assumed = {a["name"]: (a["value"], a["unit"]) for a in values["assumed"]}
    assert assumed["cluster_bytes_per_second"] == (pytest.approx(2.5e9), "B/s")
    assert assumed["cluster_alpha_seconds"][1] == "s" and assumed["products_share"][0] == 0.62
    families = {p["family"] for p in values["plans"]}
    assert any(family.startswith("pipeline × tensor") for family in families)
