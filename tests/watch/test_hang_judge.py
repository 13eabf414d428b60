"""The verdict on a hang: who, where, and who waits, from what every rank says."""

from __future__ import annotations

import dataclasses
import faulthandler
import json

import pytest

from ronde.watch.hang_judge import Limits, RankView, judge_hang
from ronde.watch.stack_place import StackPlace, locate

LIMITS = Limits(10.0)
WAITS = StackPlace("/a/train.py", 12, "run.step(batch)", "", "exchange", "_complete", "x")
SLEEPS = StackPlace("/a/train.py", 14, "time.sleep(9)", "if rank == 1", "", "", "y")


def view(rank: int, place: StackPlace = WAITS, **values) -> RankView:
    known = {"phase": "training", "doing": "run.step(batch)", "begun": 20, "step": 7, "steps": 7}
    return RankView(rank, **{**known, "idle_seconds": 11.0, "place": place, **values})


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
    views = [view(0, idle_seconds=700.0), dataclasses.replace(LATE, **late)]
    assert judge_hang(views, LIMITS) is None
    if "place" not in late or late["place"] is not None:
        views[1] = dataclasses.replace(views[1], idle_seconds=601.0)
        verdict = judge_hang(views, LIMITS)
        assert verdict is not None and not verdict.slow and verdict.rank == 1


def test_a_rank_that_works_is_slow_and_at_last_hung():
    works = dataclasses.replace(
        LATE, working="it uses CPU", reasons=("it is swapping: 900 pages/s",), longest_seconds=0.5
    )
    verdict = judge_hang([view(0), works], LIMITS)
    assert verdict is not None and verdict.slow
    assert verdict.sentence == (
        "Rank 1 is slow: no progress for 11 s in step 8, at most 0.5 s so far; it is at train.py:14 "
        "(`time.sleep(9)`), inside `if rank == 1`, it is swapping: 900 pages/s; rank 0 is waiting "
        "for it."
    )
    verdict = judge_hang([view(0), dataclasses.replace(works, idle_seconds=61.0)], LIMITS)
    assert verdict is not None and not verdict.slow


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
    found = {}
    exec(compile(script.read_text(), str(script), "exec"), found)

    def dump():
        with (tmp_path / "stack").open("w") as file:
            file.write('Thread 0x1 (most recent call first):\n  File "x.py", line 1 in wait\n')
            file.flush()
            faulthandler.dump_traceback(file, all_threads=False)

    places = []
    for rank in (1, 3):
        found["work"](rank, dump)
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
