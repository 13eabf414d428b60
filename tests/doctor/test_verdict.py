"""What the doctor makes of its measurements: the cause, its points, what would help, the gap at more
devices, and the screen.
"""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from ronde.cli.answer_screen import print_answer
from ronde.cli.doctor import screen
from ronde.doctor.prescribe import Facts, outlook, prescriptions, remedies
from ronde.doctor.verdict import Measurements, TimedStage, judge

STAGES = (
    TimedStage("read", wall_seconds=0.0002, cpu_seconds=0.0001),
    TimedStage("decode", wall_seconds=0.004, cpu_seconds=0.004),
    TimedStage("augment", wall_seconds=0.0003, cpu_seconds=0.0003),
    TimedStage("python", wall_seconds=0.0001, cpu_seconds=0.0001),
)
READ = (TimedStage("read", wall_seconds=0.004, cpu_seconds=0.0004),)
FACTS = Facts(1, 2, "processes", 8, devices_per_node=8)
HERE = {"script": "train.py", "model": "Net", "device": "cpu", "measured_seconds": 9.0}


def measured(rounds, stages=STAGES, **more):
    """The verdict on rounds of rates."""
    given = {"workers": 1, "loaders": 2, "executor": "processes", "cores": 8, "batch": 16, **more}
    waits = [max(given["batch"] * (1 / r["real"] - 1 / r["synthetic"]), 0.0) for r in rounds]
    given = {"waits": tuple((wait,) * given["workers"] for wait in waits), **given}
    return judge(Measurements(rounds=tuple(rounds), stages=tuple(stages), **given))


def judged(stages=STAGES, more=None, **rates):
    """The verdict on the same rates in every round but for some thousandths."""
    arms = {"synthetic": 1000.0, **rates}
    rounds = [
        {name: rate * (1 + 0.004 * ((i + len(name)) % 3 - 1)) for name, rate in arms.items()}
        for i in range(3)
    ]
    return measured(rounds, stages, **(more or {}))


def rows_of(values):
    return {row["name"]: row for row in values["stages"]}


def text_of(parts, width=200):
    console = Console(width=width, file=io.StringIO())
    print_answer(console, parts)
    return console.file.getvalue()


def shown(values, facts, to=8):
    """The whole answer, and its screen."""
    values = {**values, **HERE}
    values["scale"], values["walls"] = outlook(values, facts, to)
    values["prescriptions"] = prescriptions(values, facts, remedies(values, facts), to)
    return values, text_of(screen(values))


# -- the cause and its points ----------------------------------------------------------


def test_the_stage_that_takes_the_loaders_time_is_the_cause():
    values = judged(real=400, beside=1000)
    assert values["cause"]["stage"] == "decode"
    assert not values["healthy"] and values["refused"] is None
    assert values["gap"] == pytest.approx(0.6, abs=0.02)
    assert values["gap_low"] < 0.6 < values["gap_high"]
    rows = rows_of(values)
    assert rows["decode"]["lost_points"] == pytest.approx(59, abs=2)
    assert rows["decode"]["capacity_samples_per_second"] == pytest.approx(2 / 0.004)
    assert rows["decode"]["cpu_ms_per_sample"] == pytest.approx(4)
    # What overlaps is not counted twice.
    assert sum(r["lost_points"] for r in rows.values()) <= 61


def test_two_stages_that_each_close_the_gap_keep_it_between_them():
    stages = (TimedStage("read", wall_seconds=0.002), TimedStage("decode", wall_seconds=0.0025))
    rows = rows_of(judged(stages, real=500, beside=1000))
    assert rows["decode"]["lost_points"] + rows["read"]["lost_points"] <= 51
    assert all(rows[name]["alone_points"] > 40 for name in ("read", "decode"))
    assert sum("if it alone were free" in row["note"] for row in rows.values()) == 1


def test_stages_that_follow_each_other_share_the_gap_by_their_time():
    times = {"read": 0.001, "decode": 0.006, "augment": 0.003}
    inside = {"loaders": 0, "executor": "none"}
    values = judged(
        [TimedStage(n, wall_seconds=t) for n, t in times.items()], inside, real=1 / 0.011
    )
    rows = rows_of(values)
    assert values["cause"]["stage"] == "decode"
    assert values["cause"]["points"] == rows["decode"]["lost_points"]
    assert sum(r["lost_points"] for r in rows.values()) == pytest.approx(100 * values["gap"], abs=2)
    # 11 by itself, and its share of the rest
    assert rows["decode"]["lost_points"] == pytest.approx(55, abs=5)
    assert "11 if it alone were free" in rows["decode"]["note"]
    # Where their times do not account for what is lost, nothing is laid at their door.
    short = [TimedStage(n, wall_seconds=t / 4) for n, t in times.items()]
    assert rows_of(judged(short, inside, real=1 / 0.011))["decode"]["lost_points"] < 5


@pytest.mark.parametrize("real", [1000, 985, 960])
def test_a_small_gap_is_healthy(real):
    values = judged(real=real)
    assert values["healthy"] and values["cause"] is None and values["refused"] is None
    assert remedies(values, FACTS) == []


def test_a_gap_that_the_same_arm_shows_against_itself_is_no_verdict():
    values = measured([{"synthetic": 1000, "real": r} for r in (900, 600, 880, 620)])
    assert "differs from itself" in values["refused"]
    assert ". Stop other programs; more rounds may settle it" in values["refused"]
    assert not values["healthy"] and values["cause"] is None
    assert remedies(values, FACTS) == []


def test_a_machine_that_slows_down_makes_no_gap_uncertain():
    # Every round has a gap of 20 %, and a machine of its own speed.
    arms = {"synthetic": 1000, "real": 800, "beside": 1000}
    values = measured([{n: r * f for n, r in arms.items()} for f in (0.97, 1.0, 1.03, 1.0)])
    assert values["gap"] == pytest.approx(0.2) and values["gap_high"] - values["gap_low"] < 0.01
    assert not values["healthy"] and values["refused"] is None
    assert values["cause"]["stage"] == "decode"


def test_the_interval_of_a_gap_covers_it_where_reading_alone_is_noisy():
    rng = np.random.default_rng(0)
    noise = {"synthetic": 0.01, "real": 0.06, "beside": 0.01, "limited": 0.01}
    rates = {"synthetic": 1000, "real": 800, "beside": 900, "limited": 900}
    covered = 0
    for _ in range(400):
        rounds = [
            {name: rates[name] * (1 + s * rng.standard_normal()) for name, s in noise.items()}
            for _ in range(3)
        ]
        values = measured(rounds)
        covered += values["gap_low"] <= 0.2 <= values["gap_high"]
    assert covered > 0.85 * 400  # by the noise of all arms alike it were two thirds


def test_a_step_that_is_slower_beside_the_loaders_is_their_neighbours_fault():
    values = judged(real=700, beside=720)
    assert values["cause"]["stage"] == "neighbour" and values["cause"]["within"] == "decode"
    assert values["neighbour"]["points"] == pytest.approx(28, abs=2)
    assert "decode" in values["neighbour"]["cause"]
    assert rows_of(values)["decode"]["lost_points"] < 5
    # Loaders that could not feed a faster step are the cause themselves.
    values = judged(more={"loading": 540}, real=500, beside=600)
    assert values["cause"]["stage"] == "decode" and values["neighbour"]["points"] < 5
    assert rows_of(values)["decode"]["lost_points"] == pytest.approx(48, abs=2)
    values = judged(real=1050)  # faster than its ceiling, by chance
    assert values["gap"] == 0 and values["gap_high"] >= 0
    assert all(r["lost_points"] >= 0 for r in values["stages"])


def test_what_one_thread_in_the_loaders_mends_is_oversubscription():
    values = judged(real=300, limited=980, beside=900)
    assert values["cause"]["stage"] == "oversubscription"
    assert values["cause"]["within"] == "decode"
    first = prescriptions(values, FACTS, remedies(values, FACTS), 8)[0]
    assert first["id"] == "thread-limit" and first["settings"] == {"threads": 1}
    # the arm that found it had this very setting
    assert first["tried"] and first["gap_here"] == pytest.approx(0.02, abs=0.02)


def test_what_is_left_when_samples_are_only_replayed_is_the_way_between_processes():
    more = {"arm_waits": {"replayed": 0.024, "real": 0.025}, "waits": ((0.025,),) * 3}
    values = judged(STAGES[:1], more, real=390, replayed=400, beside=1000)
    assert values["cause"]["stage"] == "transport"
    assert values["cause"]["points"] == pytest.approx(60, abs=2)


def test_workers_lose_to_a_slow_step_or_a_slow_exchange():
    slow = {"workers": 2, "alone": ((500.0, 330.0), (498.0, 331.0), (501.0, 329.0))}
    values = judged(more=slow, synthetic=650, real=645)
    points = pytest.approx(34, abs=1)
    assert values["cause"] == {"stage": "straggler", "points": points, "rank": 1, "of": "ideal"}
    assert values["straggler"]["slower"] == pytest.approx(1.51, abs=0.02)
    assert values["exchange_points"] < 3
    even = {"workers": 2, "alone": ((500.0, 497.0), (498.0, 502.0), (501.0, 499.0))}
    values = judged(more=even, synthetic=650, real=645)
    assert values["cause"]["stage"] == "exchange" and values["straggler"] is None
    assert values["exchange_points"] == pytest.approx(35, abs=1)
    # a rank with a smaller share is no straggler
    alike = {"workers": 3, "alone": ((1000.0,) * 3,) * 3}
    values = judged(more=alike, synthetic=2950, real=2930)
    assert values["healthy"] and values["straggler"] is None


# -- what would help -------------------------------------------------------------------


def test_remedies_that_were_tried_and_bring_nothing_are_left_out():
    read = (TimedStage("read", wall_seconds=0.005, cpu_seconds=0.004),)
    values, facts = judged(read, real=400, beside=1000), replace(FACTS, pipeline=True)
    proposed = remedies(values, facts)
    assert {"loaders", "threads", "cache-read"} <= {r.id for r in proposed}
    rates = {"loaders": 950.0, "threads": 401.0}
    tried = [replace(r, rate=rates.get(r.id), tried=r.id in rates) for r in proposed]
    listed = {p["id"]: p for p in prescriptions(values, facts, tried, 1)}
    assert "threads" not in listed
    assert listed["loaders"]["gain_here_points"] == pytest.approx(55, abs=2)
    assert [p["number"] for p in listed.values()] == list(range(1, len(listed) + 1))


def test_a_faster_decoder_and_caches_are_for_what_they_can_do():
    values = judged(real=400, beside=1000)
    facts = replace(FACTS, decoder="pillow", decoders={"pillow": 4.0, "simplejpeg": 2.0}, samples=9)
    facts = replace(facts, kept_bytes=1000.0, memory_bytes=1e9, pipeline=True)
    texts = {r.id: r.text for r in remedies(values, facts)}
    assert "2.00 instead of 4.00 ms" in texts["decoder-simplejpeg"] and "cache-decode" in texts
    kept = remedies(values, replace(facts, decoder="simplejpeg", kept_bytes=0.0))
    assert not {"decoder-simplejpeg", "decoder-pillow", "cache-decode"} & {r.id for r in kept}


def test_a_sampler_that_takes_a_third_of_each_epoch_is_the_verdict():
    order = {"seconds": 3.0, "share": 0.33}
    values, text = shown(judged(READ, {"order": order}, real=990), FACTS)
    assert values["cause"] == {"stage": "sampler", "points": 33.0, "of": "epoch"}
    assert not values["healthy"] and values["prescriptions"] == []
    assert "CAUSE  the sampler: 33 % of each epoch" in text and "nothing to prescribe" not in text
    # beside a larger loss it is no verdict
    values, _ = shown(judged(READ, {"order": order}, real=400), FACTS)
    assert values["cause"]["stage"] == "read" and values["cause"]["of"] == "gap"
    assert values["cause"]["points"] <= 100 * values["gap"]
    assert "loaders" in {p["id"] for p in values["prescriptions"]}
    assert judged(READ, {"order": {**order, "share": 0.03}}, real=990)["healthy"]


def test_the_input_gets_no_prescription_for_what_the_exchange_loses():
    alone = ((900.0, 900.0),) * 3
    values = judged(READ, {"workers": 2, "alone": alone}, real=930)  # 7 points of the input
    assert values["cause"]["stage"] == "exchange"
    assert remedies(values, replace(FACTS, workers=2)) == []


def test_a_stage_that_waits_is_said_to():
    stages = (TimedStage("python", wall_seconds=0.0057, cpu_seconds=0.0005),)
    values, text = shown(judged(stages, {"waits": ((0.024,),) * 3}, real=400, replayed=980), FACTS)
    assert values["stages"][0]["waits"] == pytest.approx(0.91, abs=0.01)
    assert "waits 91 % of its time" in text.replace("\n", " ")
    # it takes more loaders than there are cores
    (cure,) = [r for r in remedies(values, replace(FACTS, cores=2)) if r.id == "loaders"]
    assert cure.settings.workers > 2


# -- more devices ----------------------------------------------------------------------


def test_predictions_keep_the_measured_gap_here_and_name_the_wall():
    values = judged(real=980)
    rows, walls = outlook(values, FACTS, 16)
    assert [r["devices"] for r in rows] == [1, 2, 4, 8, 16]
    assert rows[0]["gap"] == values["gap"]
    # 4.5 ms of the eight cores of a node for each sample: 1,770 a second, for devices that want
    # 1,000 each.
    assert rows[-1]["gap"] > 0.5
    assert walls[0] == {"stage": "decode", "limit": "cores", "devices": 2}


def test_a_limit_of_each_worker_is_not_one_that_all_share():
    values = {**judged(READ, real=990), "loading_samples_per_second": 1500.0}
    facts = replace(FACTS, loading_sweep=((2, 1450.0), (4, 1500.0)))
    gaps, walls = {}, {}
    for scope in ("shared", "own", "unknown"):
        answer, text = shown(values, replace(facts, scope=scope))
        gaps[scope], walls[scope] = answer["scale"][-1], answer["walls"]
        if scope == "unknown":
            assert "if workers share it: unknown" in text and "0% or 8" in text.replace("1%", "0%")
    assert gaps["shared"]["gap"] == pytest.approx(1 - 1500 / 8000, abs=0.03)
    assert walls["shared"][0] == {"stage": "read", "devices": 2, "limit": "storage"}
    assert gaps["own"]["gap"] < 0.05 and gaps["own"]["shared_gap"] is None and not walls["own"]
    assert gaps["unknown"]["gap"] < 0.05 and gaps["unknown"]["high"] > 0.75
    assert gaps["unknown"]["shared_gap"] == pytest.approx(gaps["shared"]["gap"])
    assert walls["unknown"][0]["limit"] == "unknown"


def test_loaders_are_a_wall_only_where_more_of_them_do_not_feed_the_devices_here():
    alone = judged(READ, {"loaders": 0, "executor": "none"}, real=300.0)
    alone["loading_samples_per_second"] = 450.0
    facts = replace(FACTS, loaders=0, executor="none", scope="own")
    for most, stages in ((4200.0, set()), (460.0, {"read"})):
        sweep = ((1, 450.0), (16, most), (32, 0.8 * most))
        rows, walls = outlook(alone, replace(facts, loading_sweep=sweep), 8)
        assert {w["stage"] for w in walls} == {r["wall"] for r in rows} - {None} == stages


# -- what is shown ---------------------------------------------------------------------


def noisy(real: float, stages=(), **more) -> dict:
    """A machine that drifts: rates of one round belong together, those of several do not."""
    ceilings = (5000.0, 5369.0, 7000.0, 4000.0, 5600.0)
    rounds = [{"synthetic": c, "real": c * real} for c in ceilings]
    values = measured(rounds, stages, **{"workers": 2, "waits": (), **more})
    return {**values, **HERE, "scale": [], "walls": [], "prescriptions": []}


@pytest.mark.parametrize("real", [0.55, 0.8, 0.97, 1.0, 1.02])
def test_the_numbers_of_a_screen_agree_with_each_other(real):
    values = noisy(real)
    rates, gap = values["samples_per_second"], values["gap"]
    assert rates["real"] == pytest.approx(rates["synthetic"] * (1.0 - gap))
    assert rates["real"] <= rates["synthetic"]
    text = text_of(screen(values))
    assert "CAUSE" not in text or not values["healthy"]
    if gap <= (values["gap_high"] - values["gap_low"]) / 2 and not values["refused"]:
        assert "no measurable gap" in text and "GAP" not in text
    else:
        assert f"GAP {100 * gap:.0f} %" in text


def test_what_workers_lose_between_them_is_no_part_of_the_gap():
    values = noisy(0.97, alone=((5500.0, 5500.0),) * 5)
    text = text_of(screen(values))
    assert values["cause"]["stage"] == "exchange" and 40 < values["cause"]["points"] < 60
    line = next(line for line in text.splitlines() if "CAUSE" in line)
    assert "of what the workers reach without it (11,000 samples/s)" in line
    assert text.index("CAUSE") < text.index("synthetic"), "the headline comes first"


def test_at_most_three_lines_of_notes_unless_all_are_asked_for():
    values = noisy(0.7)
    values["notes"] = [f"caveat {i}: it changes the gap by {i} points." for i in range(9)]
    text = text_of(screen(values))
    assert "caveat 2" in text and "caveat 3" not in text and "9 notes in all: --verbose" in text
    assert "caveat 8" in text_of(screen(values, verbose=True))


def test_a_narrow_terminal_cuts_no_number():
    stage = TimedStage("a_long_name_of_a_stage_of_ones_own", "loading", 0.00001, 0.00002)
    values = noisy(0.55, (stage,))
    values["stages"][0]["note"] = "waits 91 % of its time; 40 if it alone were free"
    wide, narrow = (text_of(screen(values), width) for width in (200, 60))
    cells = next(line for line in wide.splitlines() if "a_long" in line).split()[1:4]
    assert "," in cells[0]
    line = next(line for line in narrow.splitlines() if "a_long" in line)
    assert line.split()[1:4] == cells
