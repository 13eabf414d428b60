"""The tables of ``ronde plan``: no number is cut at any width, and units suit what they show."""

from __future__ import annotations

import re

import pytest

from planned import counted, shown
from ronde.plan import Plan
from ronde.predict import answer_tables
from ronde.predict.answer import explain, render_answer
from ronde.predict.cluster import Cluster, LinkFit
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.predict import predict
from ronde.predict.search import SearchResult, search


def wires(**more):
    fit = LinkFit(1e-5, 1e9, 2)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    return Cluster(links={kind: {"node": fit, "cluster": fit} for kind in kinds}, **more)


def model(parameters):
    units = [
        Unit(
            f"transformer.layers.{i}.attention",
            LinearCost(1e-5, 1e-3),
            LinearCost(1e-5, 2e-3),
            parameters,
            trainable_bytes=parameters,
            optimizer_bytes=2 * parameters,
            saved_bytes=LinearCost(0, parameters / 50),
            crossing_bytes=LinearCost(0, 29.0),
            block=f"transformer.layers.{i}",
        )
        for i in range(8)
    ]
    return counted(Costs(tuple(units), 64, optimizer="AdamW"))


@pytest.fixture(scope="module", params=[2_000, 10_000_000])
def explanation(request):
    cluster = wires(devices_per_node=4, memory_bytes=2.0**34)
    return explain(
        search(model(request.param), cluster, 4, simulate=8),
        model(request.param),
        cluster,
        with_flips=False,
    )


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 24])
def test_nothing_is_cut_at_any_width(explanation, width):
    best = predict(
        Plan(4, 64, pipeline=4, schedule="gpipe", micro_batch=4, recompute="full"),
        model(2_000),
        wires(devices_per_node=4),
    )
    found = explanation.result
    several = SearchResult((best,), {**found.families, best.plan.family: best}, 1, 1)
    for table in (
        answer_tables.times(several),
        answer_tables.memory(several),
        answer_tables.stages(best),
    ):
        text = shown(table, width)
        flat = "".join(text.split())
        assert max(map(len, text.splitlines())) <= width and "…" not in text
        left_out = re.search(r"omitted, too wide: ((?:.|\n)*?);\s+see\s+--json", text)
        gone = [] if left_out is None else " ".join(left_out[1].split()).split(", ")
        assert set(gone) <= set(table.dropped)
        for k, head in enumerate(table.columns):
            for cell in (head, *(row[k] for row in table.rows)) if head not in gone else ():
                for part in (
                    answer_tables._wrapped(cell, 0) if head in table.words else cell
                ).split():
                    # A module's name may be wider than a narrow terminal, which then breaks it; a
                    # number never is.
                    assert part in text or (head in table.words and part in flat), (
                        head,
                        part,
                        text,
                    )
    if width >= 100:
        assert "left out" not in shown(answer_tables.times(several), width)


def test_the_answer_of_the_command_fits_80_columns(explanation):
    text = shown(render_answer(explanation), 80)
    assert (
        "e+0" not in text.partition("The answer")[0].partition("plan ")[2]
        and explanation.sentence.split()[0] in text
    )
    assert "worke\n" not in text and "zero-bub\n" not in text


def test_units_suit_the_numbers():
    cluster = wires(devices_per_node=4, memory_bytes=2.0**34)
    for parameters, head in (
        (2_000, "KiB per device"),
        (500_000, "MiB per device"),
        (2_000_000_000, "GiB per device"),
    ):
        found = search(model(parameters), cluster, 4, simulate=8)
        table = answer_tables.memory(found)
        assert table.columns[0] == head
        text = shown(table, 120)
        assert "0.00" not in text and head in text and "16 GiB" in text
