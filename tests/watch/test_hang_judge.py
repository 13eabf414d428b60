"""The verdict on a hang: who, where, and who waits, from what every rank says."""

from __future__ import annotations

import dataclasses
import faulthandler
import json

import pytest

from ronde.launch.hang_watch import is_new
from ronde.watch.hang_judge import Limits, RankView, judge_foreign, judge_hang
from ronde.watch.stack_place import StackPlace, locate

LIMITS = Limits(10.0)
WAITS = StackPlace("/a/train.py", 12, "run.step(batch)", "", "exchange", "_complete", "x")
SLEEPS = StackPlace("/a/train.py", 14, "time.sleep(9)", "if rank == 1", "", "", "y")


def view(rank: int, place: StackPlace = WAITS, **values) -> RankView:
    known = {"phase": "training", "doing": "run.step(batch)", "begun": 20, "step": 7, "steps": 7}
    values = {**known, "idle_seconds": 11.0, "place": place, **values}
    return RankView(rank, **{"quiet_seconds": values["idle_seconds"], **values})


def idle(view: RankView, seconds: float) -> RankView:
    return dataclasses.replace(view, idle_seconds=seconds, quiet_seconds=seconds)


LATE = view(1, SLEEPS, doing="", begun=18)


def test_the_rank_that_does_not_wait_is_named():
    verdict = judge_hang([view(0), LATE, view(2)], LIMITS)
    assert verdict is not None and (verdict.rank, verdict.step) == (1, 8)
    assert verdict.sentence == (
        "Rank 1 has not reached the exchange of step 8; it is at train.py:14 (`time.sleep(9)`), "
        "inside `if rank == 1`; ranks 0, 2 are waiting for it."
    )
    layer = [dataclasses.replace(v, module="layer4") for v in (view(0), view(2))]
    verdict = judge_hang([*layer, LATE], LIMITS)
    assert verdict is not None and "the exchange of layer4 in step 8;" in verdict.sentence


@pytest.mark.parametrize(
    "late",
    [
        {"idle_seconds": 9.0},  # not long enough
        {"longest_seconds": 3.0},  # steps of 3 s: 15 s
        {"doing": "run.evaluate(data)"},
        {"doing": "run.save()", "idle_seconds": 59.0},
        {"steps": 1, "idle_seconds": 59.0},
        {"phase": "start-up", "idle_seconds": 599.0},
        {"place": dataclasses.replace(SLEEPS, waits="compiling"), "idle_seconds": 599.0},
        {"place": None},  # nobody has asked yet
    ],
)
def test_grace(late):
    late = {"idle_seconds": 11.0, **late}
    views = [view(0, idle_seconds=700.0), dataclasses.replace(LATE, **late)]
    views[1] = idle(views[1], late["idle_seconds"])
    verdict = judge_hang(views, LIMITS)
    assert verdict is None or (verdict.slow and verdict.rank == 1)
    if "place" not in late or late["place"] is not None:
        views[1] = idle(views[1], 601.0)
        verdict = judge_hang(views, LIMITS)
        assert verdict is not None and not verdict.slow and verdict.rank == 1


def test_a_rank_that_works_is_slow_and_at_last_hung():
    works = dataclasses.replace(
        LATE, working="it uses CPU", reasons=("it is swapping: 900 pages/s",), longest_seconds=0.5
    )
    works = dataclasses.replace(works, quiet_seconds=1.0)
    verdict = judge_hang([view(0), works], LIMITS)
    assert verdict is not None and verdict.slow
    assert verdict.sentence == (
        "Rank 1 is slow: no progress for 11 s in step 8, at most 0.5 s so far; it is at train.py:14 "
        "(`time.sleep(9)`), inside `if rank == 1`, it is swapping: 900 pages/s; rank 0 is waiting "
        "for it."
    )
    verdict = judge_hang([view(0), dataclasses.replace(works, idle_seconds=3601.0)], LIMITS)
    assert verdict is not None and not verdict.slow


LATER = Limits(600.0)


def test_said_early_and_ended_late():
    verdict = judge_hang([view(0), LATE, view(2)], LATER)
    assert verdict is not None and verdict.slow and verdict.rank == 1
    assert verdict.sentence.endswith(
        "ranks 0, 2 are waiting for it. Without a sign of life, the run ends after 600 s "
        "(--hang-timeout)."
    )
    for seconds, ends in ((599.0, False), (601.0, True)):
        verdict = judge_hang([idle(v, seconds) for v in (view(0), LATE)], LATER)
        assert verdict is not None and verdict.slow is not ends
    late = dataclasses.replace(idle(LATE, 601.0), quiet_seconds=3.0, working="it prints")
    verdict = judge_hang([view(0), late], LATER)
    assert verdict is not None and verdict.slow and "it prints" in verdict.sentence
    # it may be waiting for one that works
    works = view(2, SLEEPS, doing="", begun=19, quiet_seconds=1.0, working="it uses CPU")
    verdict = judge_hang([view(0), idle(LATE, 601.0), works], LATER)
    assert verdict is not None and verdict.slow and verdict.rank == 1


def test_a_pause_that_was_seen_before_is_said_once_for_a_place():
    pauses = dataclasses.replace(LATE, longest_seconds=9.0)
    first = judge_hang([view(0), LATE], LATER)
    again = judge_hang([view(0, step=8), dataclasses.replace(pauses, step=8)], LATER)
    assert first is not None and again is not None and again.usual
    assert is_new(first, []) and not is_new(first, [first]) and not is_new(again, [first])
    elsewhere = dataclasses.replace(pauses, step=8, place=dataclasses.replace(SLEEPS, line=30))
    verdict = judge_hang([view(0, step=8), elsewhere], LATER)
    assert verdict is not None and is_new(verdict, [first])
    longer = idle(dataclasses.replace(pauses, step=8), 13.0)
    verdict = judge_hang([view(0, step=8), longer], LATER)
    assert verdict is not None and not verdict.usual and is_new(verdict, [first])


GATHER = StackPlace("/a/train.py", 31, "dist.all_reduce(a)", "", "exchange", "all_reduce", "z")
LOADS = dataclasses.replace(SLEEPS, waits="loading")


@pytest.mark.parametrize(
    ("change", "ends"),
    [
        ({"place": GATHER, "doing": ""}, True),  # in another exchange
        ({}, False),  # in the same one
        ({"place": GATHER, "doing": "", "in_flight": True}, False),  # a network that is away
        ({"place": GATHER, "doing": "", "quiet_seconds": 2.0}, False),
        ({"place": dataclasses.replace(GATHER, helped=True), "doing": ""}, False),
        ({"place": GATHER, "doing": "", "phase": "start-up"}, False),
        ({"place": LOADS, "lost_loader": True}, True),
        ({"place": SLEEPS, "lost_loader": True}, False),
    ],
)
def test_a_certain_deadlock_is_ended_at_once(change, ends):
    verdict = judge_hang([view(0), view(1, **change), view(2)], LATER)
    assert verdict is not None and verdict.slow is not ends


def test_exchanges_are_compared():
    mine = {"group": "0", "number": 57, "name": "all_reduce", "sizes": [[4]], "done": False}
    for change, ends in (({"number": 56}, True), ({"name": "broadcast"}, True), ({}, False)):
        views = [view(0, exchanges=(mine,)), view(1, exchanges=({**mine, **change},))]
        verdict = judge_hang(views, LATER)
        assert verdict is not None and verdict.slow is not ends
    pairs = [view(r, exchanges=({**mine, "number": r, "pair": True},)) for r in (0, 1)]
    verdict = judge_hang(pairs, LATER)
    assert verdict is not None and verdict.slow


def test_a_slow_link_is_named_and_never_ends():
    moves = {"quiet_seconds": 1.0, "working": "bytes move", "bytes_per_second": 112_000.0}
    views = [view(r, idle_seconds=9000.0, **moves) for r in (0, 1)]
    verdict = judge_hang(views, LATER)
    assert verdict is not None and verdict.slow and verdict.rank is None
    assert "the exchange moves 0.9 Mbit/s" in verdict.sentence
    # nor is one whose ranks are at different exchanges, because one has its bytes already
    views[0] = dataclasses.replace(views[0], place=GATHER, doing="")
    verdict = judge_hang(views, LATER)
    assert verdict is not None and verdict.slow and "0.9 Mbit/s" in verdict.sentence


def test_after_the_loop_it_is_only_said():
    views = [idle(v, 9000.0) for v in (view(0, GATHER, doing=""), LATE)]
    views = [dataclasses.replace(v, phase="ended") for v in views]
    verdict = judge_hang(views, LATER)
    assert verdict is not None and verdict.slow and verdict.rank == 1
    assert "--hang-timeout" not in verdict.sentence
    assert judge_hang(views[1:], LATER) is None  # nobody waits for it


def test_a_script_without_ronde_is_never_ended():
    views = [idle(v, 9000.0) for v in (view(0, GATHER, doing=""), LATE)]
    views = [dataclasses.replace(v, phase="unwatched") for v in views]
    verdict = judge_hang(views, LATER)
    assert verdict is not None and verdict.slow and verdict.rank == 1
    for place in (SLEEPS, GATHER):  # it trains, as far as anybody knows
        busy = dataclasses.replace(views[1], place=place, quiet_seconds=1.0, working="x")
        other = dataclasses.replace(views[0], quiet_seconds=1.0, working="bytes move")
        assert judge_hang([other, busy], LATER) is None


def test_a_rank_that_has_left_the_loop_is_named():
    gone = dataclasses.replace(LATE, phase="ended")
    verdict = judge_hang([view(0), gone], LATER)
    assert verdict is not None and verdict.rank == 1 and "train.py:14" in verdict.sentence


def test_a_stopped_rank():
    views = [view(0), view(1, stopped_seconds=5.5, idle_seconds=5.5, place=None)]
    verdict = judge_hang(views, LIMITS)
    assert verdict is not None and verdict.rank == 1 and "Rank 1 is stopped" in verdict.sentence
    assert judge_hang([view(0), dataclasses.replace(views[1], stopped_seconds=2.0)], LIMITS) is None


def test_ranks_that_wait_for_each_other():
    other = StackPlace("/a/train.py", 30, "dist.broadcast(b, 0)", "", "exchange", "broadcast", "z")
    gather = dataclasses.replace(other, line=31, function="all_reduce")
    views = [view(0, gather, doing=""), view(1, other, doing=""), view(2, gather, doing="")]
    verdict = judge_hang(views, LIMITS)
    assert verdict is not None and verdict.rank == 1 and verdict.waiting == (0, 2)
    assert "Rank 1 is in broadcast in step 8, at train.py:30" in verdict.sentence
    left = view(
        1, dataclasses.replace(WAITS, waits="meeting"), doing="run.evaluate(data)", begun=19
    )
    left = dataclasses.replace(left, error="ValueError: bad label")
    verdict = judge_hang([view(0), left], LIMITS)
    assert verdict is not None and verdict.rank == 1
    assert "left step 8" in verdict.sentence and "ValueError: bad label" in verdict.sentence
    # a rank that this node does not see may be the reason
    assert judge_hang([view(0), view(1)], LIMITS, size=4) is None
    both = judge_hang([view(0), view(1)], LIMITS)
    assert both is not None and both.rank is None and "the network" in both.sentence
    counted = [
        {"group": "0", "number": n, "name": "all_reduce", "sizes": [[4]], "done": False}
        for n in (57, 56)
    ]
    behind = [view(r, exchanges=(c,)) for r, c in enumerate(counted)]
    verdict = judge_hang(behind, LIMITS)
    assert verdict is not None and verdict.rank == 1


def test_a_view_survives_json():
    assert RankView.from_dict(json.loads(json.dumps(LATE.to_dict()))) == LATE
    assert RankView.from_dict(json.loads(json.dumps(RankView(3).to_dict()))) == RankView(3)


def test_the_place_in_a_real_stack(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "def work(rank, dump):\n"
        "    if rank == 0:\n"
        "        pass\n"
        "    elif rank in (1, 2):\n"
        "        if dump:\n"
        "            dump()\n"
        "    else:\n"
        "        dump()\n"
    )
    names = {}
    exec(compile(script.read_text(), str(script), "exec"), names)

    def dump():
        with (tmp_path / "stack").open("w") as file:
            file.write('Thread 0x1 (most recent call first):\n  File "x.py", line 1 in wait\n')
            file.flush()
            faulthandler.dump_traceback(file, all_threads=False)

    places = []
    for rank in (1, 3):
        names["work"](rank, dump)
        # this test stands between: as if it were a library's
        text = (tmp_path / "stack").read_text().replace(str(tmp_path.parent), str(tmp_path.parent))
        text = text.replace(__file__, "/x/site-packages/dump.py")
        places.append(locate(text))
    assert [(p.file, p.line, p.source) for p in places] == [
        (str(script), 6, "dump()"),
        (str(script), 8, "dump()"),
    ]
    assert [p.inside for p in places] == ["if rank in (1, 2)", "else of if rank in (1, 2)"]
    assert places[0].text == "at train.py:6 (`dump()`), inside `if rank in (1, 2)`"


def test_an_import_waits_for_nobody():
    frames = [
        ("site-packages/torch/distributed/tensor/_ops.py", 3, "_get_ops"),
        ("site-packages/torch/distributed/tensor/_ops.py", 9, "<module>"),
        ("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
        ("/a/train.py", 2, "<module>"),
    ]
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    dump = "\n".join(["Stack (most recent call first):", *lines, ""])
    assert (locate(dump).waits, locate(dump).line) == ("", 2)
    dump = dump.replace('_ops.py", line 9 in <module>', '_ops.py", line 9 in wait')
    assert locate(dump).waits == "exchange"


def test_a_script_whose_steps_nobody_knows():
    waits = StackPlace("/a/t.py", 9, "fit()", waits="exchange")
    views = [RankView(r, quiet_seconds=700.0, place=waits) for r in (0, 1)]
    assert judge_foreign(views, Limits(600.0), 3) is None  # one is not known yet
    verdict = judge_foreign(views, Limits(600.0))
    assert verdict.sentence == (
        "All ranks have waited for each other for 700 s, at t.py:9 (`fit()`)."
    )
    assert (verdict.rank, verdict.waiting, verdict.slow) == (None, (0, 1), False)
    assert judge_foreign(
        [dataclasses.replace(v, quiet_seconds=40.0) for v in views], Limits(600.0)
    ).slow
    views[1] = dataclasses.replace(views[1], quiet_seconds=1.0)
    assert judge_foreign(views, Limits(600.0)) is None  # one of them works
    reads = StackPlace("/a/t.py", 1, "import numpy", function="import")
    views = [RankView(0, quiet_seconds=40.0, place=reads)]
    assert judge_foreign(views, Limits(20.0)).slow  # a disk may be slow
    views = [dataclasses.replace(views[0], stopped_seconds=6.0)]
    assert judge_foreign(views, Limits(20.0)).sentence == (
        "Rank 0 is stopped (SIGSTOP, or Ctrl-Z), for 6 s; it is at t.py:1 (`import numpy`)."
    )
