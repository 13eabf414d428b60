"""Files that people write: clusters, and plans of any name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from processes import TESTS
from ronde.plan import Plan
from ronde.predict.cluster import Cluster, LinkFit
from ronde.world import ArgumentError

PAGE = (TESTS.parent / "docs" / "cluster.md").read_text()
EXAMPLE = re.search(r'```yaml title="cluster.yaml"\n(.*?)```', PAGE, re.S)[1]


def cluster(tmp_path: Path, text: str) -> Cluster:
    (tmp_path / "c.yaml").write_text(text)
    return Cluster.load(tmp_path / "c.yaml")


def test_the_cluster_of_the_page_is_one(tmp_path):
    found = cluster(tmp_path, EXAMPLE)
    assert (found.nodes, found.devices_per_node, found.memory_bytes) == (4, 8, 80 * 2**30)
    assert (
        all(set(by) == {"node", "cluster"} for by in found.links.values()) and len(found.links) == 5
    )
    assert found.links["all_reduce"]["cluster"] == LinkFit(80e-6, 25e9, 32) and found.notes() == []
    found.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == found


def test_every_field_of_a_cluster_is_described_and_checked():
    section = PAGE.split("## A cluster file")[1]
    names = [f.name for f in dataclasses.fields(Cluster)]
    rows = set(re.findall(r"^\| `(\w+)` \|", section, re.M))
    assert rows == {*names, *(f.name for f in dataclasses.fields(LinkFit))}


FIT = "{alpha: 0.001, beta: 1.0e+9}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node: 2", "c.yaml: the field 'node' is not known. Did you mean nodes?"),
        (
            f"links: {{allreduce: {{node: {FIT}}}}}",
            "c.yaml: links: the collective 'allreduce' is not known. Did you mean all_reduce?",
        ),
        (
            f"links: {{all_reduce: {{nodes: {FIT}}}}}",
            "c.yaml: links.all_reduce: the scope 'nodes' is not known. Did you mean node?",
        ),
        (
            f"links: {{all_reduce: {FIT}}}",
            "c.yaml: links.all_reduce: the scope 'alpha' is not known. Expected node, cluster.",
        ),
        ("links: {all_reduce: }", "c.yaml: links.all_reduce=None must be a fit under node"),
        ("links: {all_reduce: {}}", "c.yaml: links.all_reduce is empty"),
        (
            "links: {all_reduce: {node: {alpha: 1, beta: 0}}}",
            "c.yaml: links.all_reduce.node.beta=0 must be a number of bytes a second, above 0",
        ),
        ("links: {send: {node: {alpha: 1, beta: -5}}}", "links.send.node.beta=-5 must"),
        ("links: {send: {node: {alpha: 1, beta: .nan}}}", "links.send.node.beta=nan must"),
        ("links: {send: {node: {alpha: 1, beta: .inf}}}", "links.send.node.beta=inf must"),
        (
            "links: {send: {node: {alpha: -1, beta: 5}}}",
            "links.send.node.alpha=-1 must be a number of seconds, 0 or more",
        ),
        (
            "links: {send: {node: {alpha: 1}}}",
            "links.send.node has no beta. Expected bytes per second.",
        ),
        (
            "links: {send: {node: {alpha: 1, beta: 5, rank: 2}}}",
            "links.send.node: the field 'rank' is not known. Did you mean ranks?",
        ),
        (
            "links: {send: {node: {alpha: 1, beta: 5, ranks: 1}}}",
            "links.send.node.ranks=1 must be a whole number, 2 or more",
        ),
        (
            f"links: {{all_reduce: {{node: {FIT}}}, send: {{node: {FIT}}}}}",
            "c.yaml: links lacks all_gather, reduce_scatter, broadcast: give a fit of every",
        ),
        ("links: fast", "c.yaml: links='fast' must be collectives with their fits: all_reduce, "),
        (
            "memory_bytes: much",
            "c.yaml: memory_bytes='much' must be a number of bytes, 0 or more, or a size as 32GiB",
        ),
        ("memory_bytes: -1", "c.yaml: memory_bytes=-1 must"),
        ("nodes: two", "c.yaml: nodes='two' must be a whole number, 1 or more"),
        ("nodes: 0", "c.yaml: nodes=0 must be"),
        ("devices_per_node: -4", "c.yaml: devices_per_node=-4 must be"),
        ("overlap: 1.5", "c.yaml: overlap=1.5 must be a number from 0 to 1"),
        ("interference: 0.5", "c.yaml: interference=0.5 must be a number, 1 or more"),
        ("speed: 0", "c.yaml: speed=0 must be a number above 0"),
        ("speed_is_estimate: maybe", "c.yaml: speed_is_estimate='maybe' must be true or false"),
        ("name: [a]", "c.yaml: name=['a'] must be a text"),
        ("corrections: {shard: 1.2}", "c.yaml: the field 'corrections' is not known"),
        ("reducers: {int8: {alpha: 0, beta: 1}}", "c.yaml: reducers: reducer='int8': 'int8' is"),
        ("- 1", "holds no cluster"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_what_cannot_be_meant_in_a_cluster_file_is_said(tmp_path, text, said):
    with pytest.raises(ArgumentError) as error:
        cluster(tmp_path, text)
    assert said in str(error.value)


def test_numbers_and_sizes_as_people_write_them(tmp_path):
    # YAML 1.1: without a point and a sign it is a text
    assert isinstance(yaml.safe_load("1e9"), str)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    links = ", ".join(f"{kind}: {{node: {{alpha: 1e-4, beta: 1e9}}}}" for kind in kinds)
    found = cluster(tmp_path, f"memory_bytes: 16GiB\nbase_bytes: 200 MB\nlinks: {{{links}}}\n")
    assert (found.memory_bytes, found.base_bytes) == (16 * 2**30, 200e6)
    assert found.links["all_reduce"]["node"] == LinkFit(1e-4, 1e9)
    assert cluster(tmp_path, "links:\n").links == {}


def test_a_plan_is_taken_from_a_file_of_any_name(tmp_path, monkeypatch):
    plan = Plan(workers=2, batch_size=8, pipeline=2)
    monkeypatch.chdir(tmp_path)
    for name in ("plan.json", "plan", "pipeline.plan"):
        plan.save(name)
        assert Plan.file_of(name) == Path(name) and Plan.load(name) == plan
    (tmp_path / "as.json").write_text(json.dumps(plan.to_dict()))
    assert Plan.load("as.json") == plan
    best = {"plan": plan.to_dict(), "split_at": ["second"]}
    (tmp_path / "answer.json").write_text(
        json.dumps({"sentence": "", "plans": [best, {"plan": Plan().to_dict()}]})
    )
    assert Plan.load("answer.json") == dataclasses.replace(plan, split_at=("second",))
    (tmp_path / "replicate").touch()  # words stay words
    assert [
        Plan.file_of(text)
        for text in ("replicate", "pipeline=2", "split_at=" + "+".join(map(str, range(500))))
    ] == [None] * 3
    assert Plan.file_of("none.json") == Path("none.json")
    with pytest.raises(ArgumentError, match="cannot be read"):
        Plan.load("none.json")
