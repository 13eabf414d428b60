"""``ronde bench exchange`` from the command line: table, JSON, and cluster file."""

from __future__ import annotations

import json
import re

import pytest

from processes import ronde_run
from ronde.cli.app import app
from ronde.predict import Cluster, LinkFit
from ronde.world import ArgumentError
from sampling import long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


def bench(folder, *words):
    done = ronde_run(["bench", "exchange", *words], folder, 100)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def test_every_exact_and_lossy_reducer_in_a_table_and_a_cluster_file(folder):
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    links = {kind: {"node": LinkFit(0.001, 1e9)} for kind in kinds}
    Cluster(devices_per_node=2, links=links).save(folder / "cluster.yaml")
    sizes = ["-n", "2", "--sizes", "4KiB,64KiB"]
    done = bench(folder, *sizes, "--cluster", "cluster.yaml")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    (heads,) = [words for words in lines if words[:1] == ["reducer"]]
    assert heads == ["reducer", "4", "KiB", "64", "KiB"]
    for name in ("ring", "hierarchical", "servers", "fp16", "bf16", "topk", "powersgd"):
        (row,) = [words for words in lines if words[:1] == [name]]
        assert len(row) == 5 and float(row[1]) > 0 and row[2][0] == "(", row  # ms (MB/s), twice
    assert "2 workers on" in done.stdout and "not exact: fp16, bf16, topk" in done.stdout
    known = Cluster.load(folder / "cluster.yaml")
    assert known.links["all_reduce"]["node"].ranks == 2
    assert set(known.reducers) >= {"servers", "bf16"} and "ring" not in known.reducers


@long
def test_json_has_times_and_lines(folder):
    words = ["-n", "2", "--sizes", "4KiB-64KiB", "--reducers", "ring,servers", "--servers", "2"]
    done = bench(folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["workers"] == 2 and answer["backend"] == "gloo" and answer["skipped"] == {}
    cases = {(row["reducer"], row["bytes"]) for row in answer["rows"]}
    assert cases == {(name, 4096 * k) for name in ("ring", "servers") for k in (1, 4, 16)}
    for row in answer["rows"]:
        assert row["bus_bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
    assert set(answer["fits"]) == {"ring", "servers"}
    assert all(fit["alpha"] >= 0 and fit["beta"] > 0 for fit in answer["fits"].values())


def test_refusals_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = {
        "--sizes 3KiB-": "'' is no size from 4 bytes to 4 GiB",
        "--reducers local:8": "it has no exchange of its own to time",
        "--reducers rnig": "Did you mean ring?",
        "--cluster nowhere.yaml": "there is no such file",
        "--servers 0": "expected 1 to 64 servers, or hosts",
    }
    for words, message in cases.items():
        with pytest.raises(ArgumentError, match=re.escape(message)):
            app(["bench", "exchange", "-n", "2", *words.split()], standalone_mode=False)
