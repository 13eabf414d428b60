"""Bias: integers that add up, checked against fairlearn, scikit-learn and brute force."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import shlex
from pathlib import Path

import fairlearn.metrics as fair
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import accuracy_score, precision_score, recall_score
from sklearn.neighbors import KNeighborsClassifier

from processes import python
from ronde.clarify import METRICS, Bias, BiasTable, count_table, flip_test, newcombe
from ronde.cli import main
from ronde.world import ArgumentError


def people(seed: int, rows: int = 900, groups: int = 3) -> dict[str, np.ndarray]:
    g = np.random.default_rng(seed)
    sex, age = g.choice(["F", "M", "X"], rows, p=[0.3, 0.5, 0.2]), g.integers(18, 70, rows)
    label = (g.random(rows) < 0.3 + 0.2 * (sex == "M")).astype(int)
    predicted = (g.random(rows) < 0.2 + 0.4 * label + 0.1 * (age > 40)).astype(int)
    team = g.integers(0, groups, rows)
    return {"sex": sex, "age": age, "label": label, "predicted": predicted, "team": team}


def counted(t: dict[str, np.ndarray], rows: slice | np.ndarray = slice(None)) -> BiasTable:
    counts = BiasTable([1], predicted=True, grouped=True)
    for name, values in (("sex", t["sex"]), ("old", t["age"] >= 40)):
        counts.add(name, values[rows], t["team"][rows], t["label"][rows], t["predicted"][rows])
    return counts


@pytest.mark.parametrize("seed", range(8))
def test_metrics_equal_fairlearn_and_parts_add_up(seed: int) -> None:
    t = people(seed)
    whole = counted(t)
    cuts = np.sort(np.random.default_rng(seed).integers(0, 900, 2))
    parts = [counted(t, rows) for rows in np.split(np.arange(900), cuts)]
    merged = BiasTable([1], predicted=True, grouped=True)
    merged.merge(json.loads(json.dumps([p.state() for p in parts])))
    assert merged.cells == whole.cells
    comparisons = {c.name: c.measures for c in merged.compare()}
    assert list(comparisons) == ["sex = F", "sex = M", "sex = X", "old"]
    for name, of_d in [(f"sex = {s}", t["sex"] == s) for s in "FMX"] + [("old", t["age"] >= 40)]:
        m = comparisons[name]
        frame = fair.MetricFrame(
            metrics={
                "DPPL": fair.selection_rate, "RD": recall_score, "SD": fair.true_negative_rate, "DAR": precision_score,
                "AD": accuracy_score, "DRR": lambda y, p: precision_score(1 - y, 1 - p),
            },
            y_true=t["label"], y_pred=t["predicted"], sensitive_features=of_d,
        ).by_group  # fmt: skip
        for metric, sign in {"DPPL": 1, "RD": 1, "SD": -1, "DAR": 1, "AD": 1, "DRR": -1}.items():
            wanted = sign * (frame[metric][False] - frame[metric][True])
            assert abs(m[metric].value - wanted) <= 1e-12, metric
            assert m[metric].low < m[metric].value < m[metric].high
        assert abs(m["DI"].value - frame["DPPL"][True] / frame["DPPL"][False]) <= 1e-12
        assert m["DI"].low < m["DI"].value < m["DI"].high
        for label, metric in ((t["label"], "CDDL"), (t["predicted"], "CDDPL")):
            disparity = [
                (t["team"] == team).mean()
                * (
                    of_d[(t["team"] == team) & (label == 0)].mean()
                    - of_d[(t["team"] == team) & (label == 1)].mean()
                )
                for team in range(3)
            ]
            assert abs(m[metric].value - sum(disparity)) <= 1e-12
        benefit = t["predicted"] - t["label"] + 1
        assert abs(m["GE"].value - ((benefit / benefit.mean()) ** 2 - 1).mean() / 2) <= 1e-12
        pa_, pd_ = (np.bincount(t["label"][s], minlength=2) / s.sum() for s in (~of_d, of_d))
        assert abs(m["KL"].value - (pa_ * np.log(pa_ / pd_)).sum()) <= 1e-12
        assert abs(m["TVD"].value - np.abs(pa_ - pd_).sum() / 2) <= 1e-12
        assert m["FT"].why and m["FT"].value is None
        assert set(m) == set(METRICS)


def test_intervals_are_newcombes() -> None:
    """Table II of Newcombe 1998, method 10: 56/70 against 48/80, 9/10 against 3/10, 10/10 against 0/20."""
    for (a, m, b, n), wanted in {
        (56, 70, 48, 80): (0.0524, 0.3339), (9, 10, 3, 10): (0.1705, 0.8090), (10, 10, 0, 20): (0.6791, 1.0),
    }.items():  # fmt: skip
        assert all(abs(x - y) < 5e-5 for x, y in zip(newcombe(a, m, b, n), wanted, strict=True))


def test_flip_test_is_the_vote_of_neighbors() -> None:
    g = np.random.default_rng(3)
    x, d = g.normal(size=(400, 3)), g.random(400) < 0.4
    p = (x[:, 0] + d * -0.6 + g.normal(size=400) > 0).astype(int)
    would = KNeighborsClassifier(5).fit(x[~d], p[~d]).predict(x[d])
    assert flip_test(x, d, p).value == (would - p[d]).sum() / d.sum()
    assert flip_test(x, np.ones(400), p).why == "no row on one side"


def test_what_is_not_defined_says_why() -> None:
    """Every small table: a value, or a reason, never an exception; labels of one side only count."""
    cells = list(itertools.product([False, True], [0, 1], [0, 1]))
    for chosen in itertools.product([0, 2], repeat=len(cells)):
        counts = BiasTable([1], predicted=True, grouped=False)
        counts.add("f", [True, False], [0, 0], [0, 1], [0, 1], [0, 0])
        for (side, label, predicted), n in zip(cells, chosen, strict=True):
            counts.add("f", [side], [0], [label], [predicted], [n])
        for m in counts.compare()[0].measures.values():
            assert (m.value is None) == bool(m.why)
            assert m.value is None or math.isfinite(m.value)
    alone = BiasTable([1], predicted=False, grouped=False)
    alone.add("f", [False, False, True], [0] * 3, [1, 0, 1], [0] * 3)
    m = alone.compare()[0].measures
    assert (m["TVD"].value, m["KL"].why) == (0.5, "infinite: label 0 occurs on one side only")


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import forked, torch, ronde
from torch import nn
from ronde import clarify


def work(samples, plan):
    torch.manual_seed(0)
    x = torch.randn(37, 3, dtype=torch.float64)
    y = (x[:, 0] + torch.randn(37) > 0).long()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    data = torch.utils.data.TensorDataset(x, y)
    test = torch.utils.data.Subset(data, range(samples))
    run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=nn.functional.cross_entropy, batch_size=8, plan=plan)
    facets = {"tall": lambda b: b[0][:, 1] > 0, "team": lambda b: ["ab"[int(v > 0)] for v in b[0][:, 2]]}
    bias = clarify.Bias(facets, group=lambda b: b[0][:, 0] > 0)
    run.fit(1)
    found = run.evaluate(test, {"bias": bias, "hits": lambda out, y: (out.argmax(1) == y).double()})
    beyond = ""
    try:
        bias.require(DI=(0.999, 1.001))
    except clarify.BiasError as error:
        beyond = str(error)
    if ronde.world().is_main:
        print("FOUND", json.dumps([sorted(bias.counts.state()), found["bias"], beyond]), flush=True)


for samples, plan, *sizes in ((37, "replicate", 1, 2, 3), (37, "pipeline=2", 2), (2, "replicate", 1, 3)):
    for size in sizes:
        forked.fork(size, lambda: work(samples, plan))
"""


def test_evaluation_on_any_number_of_workers(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The same table on 1, 2 and 3 workers, and on 2 stages; also where some have no sample."""
    (tmp_path / "work.py").write_text(SCRIPT)
    done = python(["work.py", str(Path(__file__).parents[1])], tmp_path, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = [
        json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")
    ]
    assert len(tables) == 6
    for samples, results in ((37, tables[:4]), (2, tables[4:])):
        assert all(r == results[0] for r in results)
        cells, _, beyond = results[0]
        assert sum(n for facet, *_, n in cells if facet == "tall") == samples
        assert "DI is" in beyond


def test_tables(tmp_path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    t = people(11)
    score = 0.5 + 0.3 * (t["predicted"] - 0.5)
    missing = [None, *t["label"][1:].tolist()]
    columns = {
        "score": score,
        "missing": missing,
        "said": ["no", "yes"] * 450,
        "pay": t["age"] * 1.5,
    }
    pq.write_table(pa.table({**t, **columns}), "p.parquet")
    asked = {"label": "label", "prediction": "score", "threshold": 0.5, "group": "team"}
    counts, sensitive, gone = count_table("p.parquet", facets=["sex=F", "age >= 40"], **asked)
    whole = counted(t)
    mine = {("old" if k[0] == "age >= 40" else k[0], *k[1:]): n for k, n in counts.cells.items()}
    assert (mine, sensitive, gone) == (dict(whole.cells), {"sex": ["F"]}, 0)

    def ronde(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["ronde", "clarify", "p.parquet", *shlex.split(words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()  # type: ignore[return-value]

    options = "--label label --facet sex=F --facet 'age >= 40'"
    files = "--json b.json --report b.html"
    code, out, _ = ronde(f"{options} --prediction predicted --features age,pay {files}")
    assert code == 0 and "training: predictions" in out
    written = json.loads((tmp_path / "b.json").read_text())["comparisons"]
    assert [c["facet"] for c in written] == ["sex", "age >= 40"]
    assert written[0]["measures"]["FT"]["value"] is not None
    assert "sex = F against the rest" in (tmp_path / "b.html").read_text()
    code, out, err = ronde(f"{options} --require DPL=0.001 --require KL=9")
    assert code == 1 and "training: predictions" not in out
    assert "sex = F: DPL is +" in err and "beyond ±0.001" in err
    assert ronde("--label missing --facet sex")[1].startswith("rows      899, 1 without")
    for words, text in {
        "--label labl --facet sex": "no such column; did you mean 'label'?",
        "--label team --facet sex": "--positive is missing: team has the values 0, 1, 2",
        "--label label --facet age": "make it a condition, such as 'age >= 40'",
        "--label label --facet sex=Q": "facet 'sex' has no value 'Q': its values are F, M, X.",
        "--label label --facet 'agee > 3'": "agee",
        "--label label --facet sex --prediction score": "--threshold is missing: score has scores",
        "--label label --facet sex --require ABC=1": "no metric is called 'ABC'",
        "--label label --facet sex --require DPL": "expected METRIC=LIMIT",
        "--label label --facet sex --require DI=0.8": "DI is a ratio",
        "--label said --positive yes --facet sex --prediction predicted": "predictions are labels",
    }.items():
        code, _, err = ronde(words)
        assert code == 2 and text in err, (words, err)


def test_labels_and_predictions_of_every_type(tmp_path: Path) -> None:
    """Booleans, 0 and 1, and words are the same table; NaN is no score; a thousand classes."""
    t = people(4)
    words = np.array(["bad", "good"])
    columns = {
        "sex": t["sex"], "y": t["label"], "yb": t["label"] == 1, "yw": words[t["label"]],
        "p": t["predicted"], "pb": t["predicted"] == 1, "pw": words[t["predicted"]], "pf": t["predicted"].astype(float),
        "class": np.arange(900), "scored": np.where(np.arange(900) < 7, np.nan, t["predicted"] - 0.5),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    pa.csv.write_csv(pa.table(columns), tmp_path / "t.csv")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    tables = []
    pairs = ("y p", "y pb", "y pf", "yb pb", "yb p", "yw pw")
    for file, pair in itertools.product(("t.parquet", "t.csv", "t.csv.gz"), pairs):
        label, prediction = pair.split()
        positive = ["good"] if label == "yw" else []
        counts, *_ = count_table(
            tmp_path / file, label=label, prediction=prediction, facets=["sex"], positive=positive
        )
        tables.append({m: v.value for m, v in counts.compare()[0].measures.items()})
    assert all(table == tables[0] for table in tables) and tables[0]["DPPL"] != 0
    whole = tmp_path / "t.parquet"
    scored = {"prediction": "scored", "threshold": 0.0, "facets": ["sex"]}
    assert count_table(whole, label="y", **scored)[2] == 7
    counts, *_ = count_table(whole, label="class", positive=["153"], facets=["sex"])
    assert sum(g.rows * g.label[0] for g in counts.groups("sex")) == pytest.approx(1)


def test_what_a_model_and_a_loss_may_look_like() -> None:
    import torch

    out, target = torch.tensor([[0.2], [-1.0], [3.0], [0.1]]), torch.tensor([[1], [0], [1], [0]])
    facet = {"f": lambda b: [True, False, True, False]}
    plain, asked = Bias(facet, threshold=0.0), Bias(facet, outcome=lambda o, t: (t, o > 0))
    booleans = Bias(facet, outcome=lambda o, t: (t == 1, o > 0))
    for bias in (plain, asked, booleans):
        bias.update(None, out, target)
    results = [b.compute()["f"] for b in (plain, asked, booleans)]
    assert results[0]["DPPL"] == -0.5 and all(
        r["DPPL"] == -0.5 and r["DPL"] == -1.0 for r in results
    )
    with pytest.raises(ArgumentError, match="positive or not"):
        Bias(facet, outcome=lambda o, t: (t, o)).update(None, out, target)
    other = Bias(facet, threshold=0.0, positive="good")
    other.update(None, out, target)
    with pytest.raises(ArgumentError, match="no such label was seen, but 0, 1"):
        other.require(DPL=0.1)
    for wrong, text in (
        (out.expand(4, 2), "Bias\\(threshold"),
        (torch.zeros(4, 3, 2), "cannot read predictions"),
    ):
        with pytest.raises(ArgumentError, match=text):
            plain.update(None, wrong, target)
    with pytest.raises(ArgumentError, match="gave 4 values for a batch of 2"):
        plain.update(None, out[:2], target[:2])
