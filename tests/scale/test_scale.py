"""``ronde scale`` as a person uses it, and what it concludes from rates that are given to it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from processes import ronde_batch, ronde_run
from ronde.cli.scale import default_sizes, parse_sizes
from ronde.predict.input_capacity import further_sizes
from ronde.scale.meter import Start, measure_sizes
from ronde.scale.scaling import summarize_scale
from ronde.world import ArgumentError

TRAIN = """
import sys, time
import torch
import ronde

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.full((4,), float(i)), torch.zeros(1)

print("the script speaks")
print("and to stderr", file=sys.stderr)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
run = ronde.distribute(model, optimizer, Rows(), loss=torch.nn.functional.mse_loss, batch_size=8)
print("after distribute: never")
for epoch in run.epochs(1):
    for batch in run.batches():
        run.step(batch)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    (folder / "train.py").write_text(TRAIN)
    (folder / "bad.py").write_text("raise ValueError('no good [at] all')\n")
    return folder


@pytest.fixture(scope="module")
def answered(place):
    temporary = place / "tmp"
    temporary.mkdir()
    options = "--workers 1,2 --rounds 1 --seconds 0.3 --to 8 --cost 3.6"
    files = "--json scale.json --report scale.html"
    done = ronde_run(
        ["scale", *options.split(), *files.split(), "train.py"],
        place,
        timeout=120,
        env={"OMP_NUM_THREADS": None, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (
        done,
        json.loads((place / "scale.json").read_text()),
        [p.name for p in temporary.iterdir() if not p.name.startswith("torch")],
    )


def test_a_script_is_measured_at_each_size_and_nothing_is_left(place, answered):
    done, values, left = answered
    assert "the script speaks" not in done.stdout + done.stderr and "never" not in done.stdout
    assert "\x1b" not in done.stdout  # colour on a terminal only
    assert left == []
    files = ["bad.py", "scale.html", "scale.json", "tmp", "train.py"]
    assert sorted(p.name for p in place.iterdir() if p.name != "__pycache__") == files
    rows = values["rows"]
    assert [r["workers"] for r in rows] == [1, 2]
    assert [r["batch_per_worker"] for r in rows] == [8, 4]
    for r in rows:
        assert r["synthetic_low"] <= r["synthetic"] <= r["synthetic_high"]
        # Each sample sleeps for 2 ms, one after the other: no machine is faster than that, whatever
        # else it does.
        assert 0 < r["real"] <= r["workers"] * 500
        assert r["gap"] == pytest.approx(max(0.0, 1 - r["real"] / r["synthetic"]))
        assert r["epoch_seconds"] == pytest.approx(96 / r["real"])
        assert r["cost_per_epoch_device_seconds"] == pytest.approx(
            r["workers"] * r["epoch_seconds"]
        )
        assert r["cost_per_epoch"] == pytest.approx(r["cost_per_epoch_device_seconds"] / 1000)
    assert rows[0]["speedup_real"] == rows[0]["efficiency_real"] == 1.0
    assert rows[1]["speedup_real"] == pytest.approx(rows[1]["real"] / rows[0]["real"])
    assert rows[1]["efficiency_synthetic"] == pytest.approx(rows[1]["speedup_synthetic"] / 2)


def test_the_json_has_all_that_a_report_needs(answered):
    _, values, _ = answered
    keys = "script rows fits extrapolated wall stop_at sentence notes"
    assert set(keys.split()) <= set(values)
    assert values["batch"] == "keep" and values["batch_size"] == 8
    assert [f["workers"] for f in values["extrapolated"]] == [4, 8]
    for f in values["extrapolated"]:
        assert f["low"] <= f["real"] <= f["high"]
    assert set(values["fits"]["real"]) == {"amdahl"}  # two sizes bear no more
    notes = " ".join(values["notes"])
    assert "strong scaling" in notes and "not tested" in notes
    assert 1 <= values["stop_at"] <= 8


def test_the_table_shows_both_rates_and_marks_what_is_extrapolated(answered):
    done, values, _ = answered
    lines = done.stdout.splitlines()
    assert {"2", "~8"} <= {line.split()[0] for line in lines if line.strip()}
    assert "extrapolated, not measured" in done.stdout
    assert values["sentence"] in done.stdout
    assert max(len(line) for line in lines if line.lstrip().startswith(("1 ", "2 ", "~"))) <= 80


def test_a_script_that_fails_is_told_with_its_traceback(place):
    done = ronde_run(["scale", "--workers", "1", "bad.py"], place, timeout=60)
    assert done.returncode == 2
    assert "ValueError: no good [at] all" in done.stderr and "failed with 1 worker" in done.stderr


def test_arguments_that_cannot_be_used_are_told_before_anything_starts_and_help_has_examples(place):
    cases = [
        (["--workers", "0,1", "train.py"], "--workers '0,1'"),
        (["--workers", "1,x", "train.py"], "--workers '1,x'"),
        (["--workers", "1,4096", "train.py"], "more workers than devices"),
        (["--to", "0", "train.py"], "'--to'"),
        (["--seconds", "0", "train.py"], "'--seconds'"),
        (["--seconds", "nan", "train.py"], "'--seconds'"),
        (["--rounds", "0", "train.py"], "'--rounds'"),
        (["--cost", "-1", "train.py"], "'--cost'"),
        (["--batch", "shrink", "train.py"], "'shrink' is not one of"),
        (["--json", "nowhere/scale.json", "train.py"], "there is no folder"),
        (
            ["--json", "/proc/x.json", "train.py"],
            "--json /proc/x.json: nothing can be written to /proc: ",
        ),
        (
            ["--json", "/dev/fd/77", "train.py"],
            "--json /dev/fd/77: it cannot be written to: Bad file descriptor",
        ),
        (["--report", "nowhere/scale.html", "train.py"], "there is no folder"),
        (["--feed", "absent.yaml", "train.py"], "absent.yaml"),
        (["trian.py"], "Did you mean train.py?"),
    ]
    *answers, helped = ronde_batch(
        [*(["scale", *args] for args, _ in cases), ["scale", "--help"]], place
    )
    for (args, told), done in zip(cases, answers, strict=True):
        assert done.returncode == 2, (args, done.stdout, done.stderr)
        assert told in done.stderr.replace("\n", " "), (args, done.stderr)
        assert done.stderr.startswith(("error:", "Usage:")) and not done.stdout
    assert helped.returncode == 0 and "ronde scale --workers 1,2,4 --to 64 train.py" in " ".join(
        helped.stdout.split()
    )


# -- what is concluded -----------------------------------------------------------------


def start(
    n,
    synthetic,
    real,
    *,
    cpu=(0.0, 0.0),
    batch="keep",
    device="cuda",
    loading=None,
    size=256,
):
    spread = (0.99, 1.0, 1.01)
    return Start(
        workers=n,
        synthetic=tuple(synthetic * s for s in spread),
        real=tuple(real * s for s in spread),
        loading=loading,
        cpu={"synthetic": cpu[0], "real": cpu[1]},
        batch=batch,
        batch_size=size,
        plan="replicate",
        epoch_samples=100_000,
        device=device,
    )


def asked(rows, **options):
    starts = {n: [start(n, s, r, **options)] for n, s, r in rows}
    return summarize_scale("train.py", starts, to=64, cores=64.0, per_node=8)


def test_the_cores_wall_is_predicted_from_sizes_that_have_not_met_it():
    # 1 CPU millisecond for the step and 10 for the input of each sample: 64 cores feed 5818
    # samples/s, 5.8 devices of 1000.
    answer = asked([(n, 1000.0 * n, 1000.0 * n) for n in (1, 2, 4)], cpu=(0.001, 0.011))
    assert (answer.wall.limit, answer.wall.devices) == ("cores", 6)
    at_8 = answer.extrapolated[0]
    assert at_8.workers == 8 and at_8.real.value == pytest.approx(5818, rel=0.02)
    assert at_8.gap == pytest.approx(0.27, abs=0.02)
    # Beyond a node of 8 there are more nodes like it, with more cores.
    assert answer.extrapolated[1].real.value == pytest.approx(2 * 5818, rel=0.02)
    assert "ronde doctor train.py" in answer.sentence


def test_what_is_lost_is_put_where_it_was_lost():
    healthy = asked([(1, 1000, 995), (2, 1995, 1990), (4, 3990, 3970)])
    assert healthy.stop_at == 64 and "All 64 pay" in healthy.sentence
    assert "nothing limits growth" in healthy.sentence
    exchange = asked([(1, 1000, 995), (2, 1500, 1495), (4, 1900, 1890)])
    assert exchange.stop_at <= 4 and "exchange" in exchange.sentence
    assert "doctor" not in exchange.sentence
    starved = asked([(1, 1000, 950), (2, 1990, 1200), (4, 3970, 1250)])
    assert starved.stop_at == 1 and "ronde doctor" in starved.sentence
    grown = asked([(1, 1000, 995), (2, 1500, 1495), (4, 1900, 1890)], batch="grow")
    assert "a larger batch" not in grown.sentence and any("weak scaling" in n for n in grown.notes)


def test_an_epoch_has_whole_steps():
    grown = {n: start(n, 100 * n, 100 * n, batch="grow", size=16 * n) for n in (1, 2)}
    starts = {n: [dataclasses.replace(each, epoch_samples=96)] for n, each in grown.items()}
    answer = summarize_scale("train.py", starts, to=16, cores=64.0, per_node=8)
    assert answer.rows[0].epoch_seconds == pytest.approx(0.96)
    assert answer.extrapolated[-1].epoch_seconds == pytest.approx(256 / 1600, rel=0.05)


def test_one_size_is_not_extrapolated():
    answer = asked([(4, 4000, 3000)])
    assert answer.extrapolated == [] and answer.fits == {"synthetic": {}, "real": {}}
    assert any("one size" in n for n in answer.notes) and "measure more sizes" in answer.sentence
    assert json.loads(json.dumps(answer.to_dict(), allow_nan=False)) == answer.to_dict()
    with pytest.raises(ArgumentError):
        summarize_scale("train.py", {}, to=4, cores=2, per_node=2)


def test_sizes_take_turns_and_every_other_round_goes_backwards():
    order = []

    def one(n, first):
        order.append((n, first))
        return start(n, 1.0, 1.0)

    found = measure_sizes([1, 2, 4], 2, one, lambda _: None)
    assert order == [(1, True), (2, True), (4, True), (4, False), (2, False), (1, False)]
    assert {n: len(s) for n, s in found.items()} == {1: 2, 2: 2, 4: 2}


def test_sizes():
    assert parse_sizes(" 4,1,2,2") == [1, 2, 4]
    assert list(map(default_sizes, (1, 8, 6))) == [[1], [1, 2, 4, 8], [1, 2, 4, 6]]
    further = [further_sizes(*each) for each in ((4, 4), (4, 64), (3, 10))]
    assert further == [[], [8, 16, 32, 64], [6, 10]]
