"""Who makes a run hang: a pure function of what each rank says, its process, and its stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ronde.watch.stack_place import StackPlace
from ronde.world.identity import ranks_text

__all__ = [
    "GOES_ON",
    "HangVerdict",
    "Limits",
    "RankView",
    "STOPPED_SECONDS",
    "is_step",
    "judge_foreign",
    "judge_hang",
    "rate_text",
    "waits_for_others",
]

STOPPED_SECONDS = 5.0
"""After so long, a process that a signal has stopped hangs."""
GOES_ON = "it goes from one exchange to the next"
"""A sign of life of a rank that waits for others."""
_SAY_SECONDS = 10.0
_LIMIT_PAUSES = 5  # the longest pause so far, before the end
_SAY_PAUSES = 1.4  # the same, before something is said
_EVALUATE, _SAVE, _FIRST, _START, _WORKS = 3, 6, 6, 60, 360  # grace, in limits for a sentence
_WORKING_LIMITS = 6  # a rank that gives signs of life may take so many limits
_DOING = {
    "compiling": "compiling a model",
    "loading": "waiting for a sample",
    "saving": "writing or reading a checkpoint",
    "a subprocess": "waiting for a subprocess",
    "a lock": "waiting for a lock or another thread",
    "a queue": "waiting for a queue",
}


@dataclass(frozen=True)
class Limits:
    """When a rank without progress is hung.

    Attributes:
        seconds: after how many without a sign of life the run is ended, unless a deadlock is
            certain.
    """

    seconds: float = 600.0

    @property
    def say(self) -> float:
        """After how many seconds without progress that is said; a certain deadlock is ended."""
        return min(_SAY_SECONDS, self.seconds)


@dataclass(frozen=True)
class RankView:
    """What is known of a rank at one moment.

    Attributes:
        rank: which one.
        phase: ``unwatched`` until the script calls Ronde, ``start-up``, ``training``, ``ended``.
        doing: the call of Ronde under way; empty in the script's own code.
        begun: calls of the whole world that it has begun.
        step: optimizer steps of the run that are done.
        steps: those of this process.
        idle_seconds: since the last sign of progress.
        longest_seconds: the longest time between two signs of progress so far.
        stopped_seconds: for how long a signal has stopped its process; 0 if it runs.
        cuda: whether it trains on a GPU.
        working: the last sign of life, if it is recent: ``it uses CPU``; empty if there is none.
        reasons: why it may be slow, as the machine says.
        place: where it is; None if nobody has asked yet.
        exchanges: the last exchange of each of its process groups.
        module: of the model, whose code it runs.
        error: the last error that a call raised into its script.
        host: where it runs; empty for this machine.
        quiet_seconds: since the last progress or other sign of life.
        bytes_per_second: that came over TCP, while it made no progress.
        in_flight: whether it has sent bytes that have not arrived.
        lost_loader: whether a loading process of it is dead or stopped.
        gone: whether its process has ended, and did not say so.
    """

    rank: int
    phase: str = "unwatched"
    doing: str = ""
    begun: int = 0
    step: int = 0
    steps: int = 0
    idle_seconds: float = 0.0
    longest_seconds: float = 0.0
    stopped_seconds: float = 0.0
    cuda: bool = False
    working: str = ""
    reasons: tuple[str, ...] = ()
    place: StackPlace | None = None
    exchanges: tuple[Mapping[str, Any], ...] = ()
    module: str = ""
    error: str = ""
    host: str = ""
    quiet_seconds: float = 0.0
    bytes_per_second: float = 0.0
    in_flight: bool = False
    lost_loader: bool = False
    gone: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without those that are their defaults: a launcher gets many of these."""
        values = {name: v for name, v in vars(self).items() if v != _DEFAULTS.get(name)}
        return {**values, "place": dataclasses.asdict(self.place)} if self.place else values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankView:
        """From what :meth:`to_dict` gave, perhaps through JSON."""
        own = dict(values)
        if "place" in own:
            own["place"] = StackPlace(**own["place"])
        for name in ("reasons", "exchanges"):
            own[name] = tuple(own.get(name, ()))
        return cls(**own)

    @property
    def at(self) -> StackPlace:
        """Where it is; an unknown place if nobody has asked yet."""
        return self.place or StackPlace()

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return waits_for_others(self.place, self.cuda, self.exchanges)


def waits_for_others(
    place: StackPlace | None, cuda: bool, exchanges: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether a rank at a place waits for other ranks."""
    if place is None:
        return False
    if place.waits in ("exchange", "meeting"):
        return True
    # A GPU's exchange is waited for wherever a value is read first.
    return cuda and not place.waits and any(not e["done"] for e in exchanges)


def is_step(doing: str) -> bool:
    """Whether a call of Ronde is part of a step."""
    return doing.startswith(("run.step", "run.backward", "run.update", "run.batches"))


def rate_text(bytes_per_second: float) -> str:
    """A rate as links are named: ``0.9 Mbit/s``."""
    bits = 8 * bytes_per_second
    unit, size = (
        ("Gbit/s", 1e9) if bits >= 1e9 else ("Mbit/s", 1e6) if bits >= 1e5 else ("kbit/s", 1e3)
    )
    return f"{bits / size:.2g} {unit}"


_DEFAULTS = {each.name: each.default for each in dataclasses.fields(RankView)}


@dataclass(frozen=True)
class HangVerdict:
    """Who hangs.

    Attributes:
        sentence: for people.
        rank: the rank that hangs; None if all wait for each other.
        step: the optimizer step, from 1.
        place: where the rank is: ``train.py:88``; empty if unknown.
        waiting: ranks that wait for it.
        slow: whether the run goes on: it is only said.
        usual: whether pauses as long were seen before: nothing new, if it was said once.
    """

    sentence: str
    rank: int | None
    step: int
    place: str = ""
    waiting: tuple[int, ...] = field(default=())
    slow: bool = False
    usual: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HangVerdict:
        """From ``dataclasses.asdict``, perhaps through JSON."""
        return cls(**{**values, "waiting": tuple(values["waiting"])})


def _grace(view: RankView) -> int:
    """How many limits a rank may take for what it does."""
    waits = view.at.waits
    starts = view.phase == "unwatched" or (view.phase == "start-up" and not is_step(view.doing))
    if starts or waits == "compiling":
        return _START
    if view.doing.startswith(("run.save", "run.export", "run.whole_model")) or waits == "saving":
        return _SAVE
    if view.steps < 2:
        return _FIRST
    return _EVALUATE if view.doing.startswith("run.evaluate") and waits != "meeting" else 1


def _limit(view: RankView, limits: Limits) -> float:
    """After how many seconds without a sign of life a rank is hung."""
    seconds = max(limits.seconds, _LIMIT_PAUSES * view.longest_seconds)
    grace = _grace(view)
    return seconds if grace == 1 else max(grace * limits.say, seconds)


def _says(view: RankView, waited: bool, limits: Limits) -> bool:
    """Whether it is time to say that a rank makes no progress."""
    if view.idle_seconds < limits.say or (view.working and _is_usual(view)):
        return False
    grace = _grace(view)
    if grace == _START:  # one that loads its data, or compiles, is not worth a word
        return view.quiet_seconds >= limits.say
    if grace == _FIRST and view.working and not waited:
        return view.idle_seconds >= grace * limits.say
    return True


def _is_usual(view: RankView) -> bool:
    """Whether pauses as long were seen before."""
    return view.idle_seconds < _SAY_PAUSES * view.longest_seconds


def judge_hang(
    views: Sequence[RankView], limits: Limits, size: int | None = None
) -> HangVerdict | None:
    """Find the rank that makes the run hang.

    Args:
        views: the ranks that are known.
        size: how many there are in all; None for as many as ``views``.

    Returns:
        HangVerdict | None: None while everything goes on, as far as can be told. ``slow`` is set
        where the run is not to be ended yet.
    """
    for view in views:
        if view.stopped_seconds >= STOPPED_SECONDS:
            return _stopped(view, views)
    active = [v for v in views if v.phase != "ended"]
    ends = any(v.phase != "unwatched" for v in active)  # else the script's loop is its own
    if not active:  # after the loop, one may be waited for all the same
        active = [v for v in views if v.place is not None]
        if not any(v.waits for v in active):
            return None
    if not active or max(v.idle_seconds for v in active) < limits.say:
        return None
    if any(v.place is None for v in active):
        return None  # their stacks come with the next look
    if all(v.waits for v in active):  # perhaps for one that has left the loop
        active = [v for v in views if v.place is not None]
    # Who waits is never the cause: those who do not are looked at, the one behind first.
    late = [v for v in active if not v.waits]
    if late:
        view = min(late, key=lambda v: (v.begun, -v.quiet_seconds, -v.idle_seconds, v.rank))
        return _judge_late(view, late, active, limits, ends)
    if size is not None and len(views) < size:
        return None  # they may wait for a rank that somebody else watches
    if any(v.idle_seconds < limits.say or v.working == GOES_ON for v in active):
        return None
    if any(v.phase == "unwatched" and v.quiet_seconds < limits.say for v in active):
        return None  # its steps are not known
    usual = all(_is_usual(v) for v in active)
    if any(v.working for v in active):
        return dataclasses.replace(_slow_link(active), usual=usual)
    # Nobody is missing: a deadlock, or a network that is slower than the limit.
    verdict = _all_wait(active)
    certain = _is_certain(active) and len(active) == len(views)
    later = max(_limit(v, limits) for v in active)
    limit = limits.say if certain else later
    quiet = min(v.quiet_seconds for v in active)
    if ends and (quiet >= limit or min(v.idle_seconds for v in active) >= _works(limit, limits)):
        return verdict
    return _notice(verdict, later if ends else 0.0, usual, limits)


def judge_foreign(
    views: Sequence[RankView], limits: Limits, size: int | None = None
) -> HangVerdict | None:
    """The same for a script whose steps nobody knows: it hangs when no rank gives a sign of life.

    Example:
        >>> views = [RankView(0, place=StackPlace("a/t.py", 8, "fit()", waits="exchange")),
        ...          RankView(1, place=StackPlace("a/t.py", 5, "sleep(9)"))]
        >>> quiet = [dataclasses.replace(v, quiet_seconds=20.0) for v in views]
        >>> judge_foreign(quiet, Limits(20.0)).sentence
        'Rank 1 has done nothing for 20 s; it is at t.py:5 (`sleep(9)`); rank 0 is waiting for it.'
    """
    for view in views:
        if view.stopped_seconds >= STOPPED_SECONDS:
            return _stopped(view, views)
    if not views or len(views) < (size or 0) or any(v.place is None for v in views):
        return None
    quiet, limit = min(v.quiet_seconds for v in views), limits.seconds
    if quiet < min(3 * limits.say, limit):
        return None
    if any(v.at.function == "import" for v in views):  # from a slow disk, perhaps
        limit = max(limit, _START * limits.say)
    waiting = [v.rank for v in views if v.waits]
    view = min(views, key=lambda v: (v.waits, -v.quiet_seconds, v.rank))
    place = view.at
    if view.waits:
        sentence = f"All ranks have waited for each other for {quiet:.0f} s, {place.text}."
    else:
        who = f"Rank {view.rank}{_on(view)} has done nothing for {quiet:.0f} s"
        sentence = f"{who}; it is {place.text}{_tail(waiting)}."
    rank = None if view.waits else view.rank
    verdict = HangVerdict(sentence, rank, view.step, _short(place), tuple(waiting))
    return verdict if quiet >= limit else _notice(verdict, limit, False, limits)


def _works(limit: float, limits: Limits) -> float:
    """How long a rank may give signs of life and make no progress."""
    return max(_WORKING_LIMITS * limit, _WORKS * limits.say)


def _judge_late(
    view: RankView,
    late: Sequence[RankView],
    active: Sequence[RankView],
    limits: Limits,
    ends: bool,
) -> HangVerdict | None:
    """A rank that does not wait for others."""
    limit = _limit(view, limits)
    lost = view.lost_loader and view.at.waits == "loading"
    if lost or view.gone:
        limit = limits.say  # what is dead does not come back
    quiet = min(v.quiet_seconds for v in late)  # it may wait for another one of them, by a file
    works = view.phase != "unwatched" and view.idle_seconds >= _works(limit, limits)
    if ends and (quiet >= limit or works):
        return _late(view, late, active)
    if not _says(view, len(late) < len(active), limits):
        return None
    if view.working:
        return _slow(view, active)
    return _notice(_late(view, late, active), limit if ends else 0.0, _is_usual(view), limits)


def _is_certain(active: Sequence[RankView]) -> bool:
    """Whether ranks that all wait do so for different exchanges, and nothing else goes on."""
    if any(v.in_flight or v.phase != "training" for v in active):
        return False
    if any(v.at.helped for v in active):
        return False  # another thread may make the exchange that is missing
    if len({(v.doing, v.begun, v.at.file, v.at.line) for v in active}) > 1:
        return True
    by_group: dict[str, set[tuple[Any, ...]]] = {}
    for view in active:
        for each in view.exchanges:
            if not each.get("pair"):
                by_group.setdefault(each["group"], set()).add((each["number"], each["name"]))
    return any(len(exchanges) > 1 for exchanges in by_group.values())


def _notice(verdict: HangVerdict, limit: float, usual: bool, limits: Limits) -> HangVerdict | None:
    """A hang that does not end the run yet; never where ``limit`` is 0. None where the end is as
    near as what is said.
    """
    if 0 < limit <= limits.say:
        return None
    until = f" Without a sign of life, the run ends after {limit:.0f} s (--hang-timeout)."
    sentence = f"{verdict.sentence}{until if limit else ''}"
    return dataclasses.replace(verdict, sentence=sentence, slow=True, usual=usual)


def _who(ranks: Sequence[int]) -> str:
    text = ranks_text(sorted(ranks))
    return text[0].upper() + text[1:]


def _tail(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"; {ranks_text(sorted(ranks))} {_are(ranks)} waiting for it"


def _are(ranks: Sequence[object]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _on(view: RankView) -> str:
    return f" on {view.host}" if view.host else ""


def _stopped(view: RankView, views: Sequence[RankView]) -> HangVerdict:
    others = [v.rank for v in views if v.rank != view.rank and v.phase != "ended"]
    step = view.step + 1
    tail = _tail(others)
    at = f"; it is {view.at.text}" if view.at.file else ""
    where = "" if view.phase == "unwatched" else f" in step {step}"
    sentence = (
        f"Rank {view.rank}{_on(view)} is stopped (SIGSTOP, or Ctrl-Z){where}, for "
        f"{view.stopped_seconds:.0f} s{at}{tail}."
    )
    return HangVerdict(sentence, view.rank, step, _short(view.at), tuple(others))


def _awaited(waiting: Sequence[RankView]) -> str:
    """What the others wait for, as what the rank has not done."""
    meeting = [v for v in waiting if v.at.waits == "meeting" and v.doing]
    if meeting:
        return f"has not called {meeting[0].doing}"
    if not waiting:
        return "makes no progress"
    first = waiting[0]
    if is_step(first.doing):
        named = f"{first.module} in " if first.module else ""
        return f"has not reached the exchange of {named}step {first.step + 1}"
    if first.doing:
        return f"has not reached an exchange of {first.doing}"
    function = first.at.function
    at = first.at.text if first.at.file else ""
    return f"has not reached the others' {function or 'exchange'} {at}".rstrip()


def _late(view: RankView, late: Sequence[RankView], active: Sequence[RankView]) -> HangVerdict:
    """A rank that does not wait for others."""
    waiting = [v for v in active if v.waits]
    place = view.at
    step = max(v.step for v in (view, *waiting)) + 1
    awaited = _awaited(waiting)
    if awaited == "makes no progress":
        call = f"in {view.doing}, " if view.doing else ""
        awaited = f"has made no progress for {view.idle_seconds:.0f} s, {call}step {step}"
        if view.phase in ("start-up", "unwatched"):
            awaited = f"has not finished its start-up after {view.idle_seconds:.0f} s"
    elif view.doing.startswith(("run.evaluate", "run.save")):
        awaited = f"is stuck in {view.doing} after step {view.step}"
    said = [f"it is {place.text}"]
    if place.waits in _DOING:
        said.append(_DOING[place.waits])
    if view.lost_loader:
        said.append("a loading process of it is dead or stopped")
    if view.reasons:
        said.append(" and ".join(view.reasons))
    if view.working:
        said.append(f"{view.working}, and makes no progress")
    same = [v.rank for v in late if v.rank != view.rank and v.at.line == place.line]
    same = [r for r in same if place.file]
    also = f" (so {_are(same)} {ranks_text(same)})" if same else ""
    ranks = _ranks(waiting)
    sentence = (
        f"Rank {view.rank}{_on(view)} {awaited}; {', '.join(said)}{also}{_tail(ranks)}."
        f"{_caught(view)}"
    )
    return HangVerdict(sentence, view.rank, step, _short(place), tuple(ranks))


def _caught(view: RankView) -> str:
    return (
        f" A call raised an error before that its script has caught: {view.error}"
        if view.error
        else ""
    )


def _short(place: StackPlace) -> str:
    return f"{place.file.rpartition('/')[2]}:{place.line}" if place.file else ""


def _slow(view: RankView, active: Sequence[RankView]) -> HangVerdict:
    waiting = _ranks([v for v in active if v.waits])
    place, step = view.at, view.step + 1
    why = " and ".join(view.reasons) or view.working
    usual = f", at most {view.longest_seconds:.1f} s so far" if view.longest_seconds else ""
    sentence = (
        f"Rank {view.rank}{_on(view)} is slow: no progress for {view.idle_seconds:.0f} s in step "
        f"{step}{usual}; it is {place.text}, {why}{_tail(waiting)}."
    )
    return HangVerdict(sentence, view.rank, step, _short(place), tuple(waiting), slow=True)


def _all_wait(active: Sequence[RankView]) -> HangVerdict:
    """All wait, for different things: some have gone another way."""
    step = max(v.step for v in active) + 1
    ways: dict[tuple[Any, ...], list[RankView]] = {}
    for v in active:
        place = v.at
        way = (v.doing, v.begun, place.file, place.line, place.function)
        ways.setdefault(way, []).append(v)
    if len(ways) > 1:
        # The odd ones are those that are fewer, or have left the step that the others are in.
        groups = sorted(
            ways.values(),
            key=lambda g: (len(g), g[0].doing.startswith("run.step"), g[0].begun, -g[0].rank),
        )
        return _odd(groups[0], [v for g in groups[1:] for v in g], step)
    # At the same place in the script: the one whose groups have made fewer exchanges is behind.
    numbers = {v.rank: [(e["group"], e["number"]) for e in v.exchanges] for v in active}
    behind = min(active, key=lambda v: sum(n for _, n in numbers[v.rank]))
    if len({str(n) for n in numbers.values()}) > 1:
        others = [v for v in active if numbers[v.rank] != numbers[behind.rank]]
        return _odd([v for v in active if v not in others], others, step)
    if len({str([(e["name"], e["sizes"]) for e in v.exchanges]) for v in active}) > 1:
        return _odd([active[-1]], list(active[:-1]), step)
    why = "no rank is missing, so look at the network between them"
    return _nobody(active, "the same", why)


def _slow_link(active: Sequence[RankView]) -> HangVerdict:
    rate = rate_text(max(v.bytes_per_second for v in active))
    why = f"the exchange moves {rate}. A slow link does not end the run"
    return dataclasses.replace(_nobody(active, "an", why), slow=True)


def _nobody(active: Sequence[RankView], which: str, why: str) -> HangVerdict:
    """All wait for the same, and no rank is to blame."""
    step, place = max(v.step for v in active) + 1, active[0].at
    seconds = min(v.idle_seconds for v in active)
    sentence = (
        f"All ranks wait in {which} exchange of step {step} for {seconds:.0f} s, {place.text}: "
        f"{why}."
    )
    return HangVerdict(sentence, None, step, _short(place), tuple(v.rank for v in active))


def _odd(odd: Sequence[RankView], others: Sequence[RankView], step: int) -> HangVerdict:
    """Ranks that wait for something else than the others do."""
    view, other = odd[0], others[0]
    where = f"{_way(view)}, {view.at.text}"
    there = f"{_way(other)}, {other.at.text}"
    left = ""
    steps = other.doing.startswith("run.step"), view.doing.startswith(("run.step", "run.ba"))
    if view.error and steps == (True, False):  # what its script has caught took it out of the step
        left = f" left step {other.step + 1} without its exchange and"
    ranks = _ranks(others)
    sentence = (
        f"{_who([v.rank for v in odd])}{left} {_are(odd)} {where}, while {ranks_text(ranks)} "
        f"{_are(ranks)} {there}: they wait for each other. Every rank must make the same exchanges "
        f"in the same order.{_caught(view)}"
    )
    return HangVerdict(sentence, view.rank, step, _short(view.at), tuple(ranks))


def _ranks(views: Sequence[RankView]) -> list[int]:
    return sorted(v.rank for v in views)


def _way(view: RankView) -> str:
    """What a rank waits in: ``in all_reduce of step 12``."""
    pending = [e for e in view.exchanges if not e["done"]]
    function = view.at.function
    if view.doing.startswith("run.step") or not view.doing:
        named = pending[0]["name"] if pending else function
        named = function if not view.doing and function else named
        sizes = f" of {pending[0]['sizes'][0]}" if pending and pending[0]["sizes"] else ""
        return f"in {named or 'an exchange'}{sizes} in step {view.step + 1}"
    return f"in {view.doing}"
