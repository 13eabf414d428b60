"""Events and labels of a point-in-time join, and an oracle that looks at every event."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq

from ronde.tables.feature_store import FeatureStore

HOUR = timedelta(hours=1)
OSLO = ZoneInfo("Europe/Oslo")


class Case:
    """Events and labels with what goes wrong in practice, drawn by a seed."""

    def __init__(self, seed: int):
        self.draw = draw = random.Random(seed)
        self.zoned, self.late = draw.random() < 0.5, draw.random() < 0.8
        self.keys = ["user", "shop"] if draw.random() < 0.3 else ["user"]
        self.texts = draw.random() < 0.4
        self.max_age = draw.choice([None, 2, 5])
        self.infinite = draw.random() < 0.5  # else the file's statistics hide that there is NaN
        # clocks go back an hour on the 27th, at three
        self.start = datetime(2024, 10, 26, 20, tzinfo=UTC)
        self.events = []
        for n in range(draw.choice([0, 1, 40, 120, 120])):
            self._event(n)
        for n, event in enumerate(self.events):
            event["seq"] = n
        draw.shuffle(self.events)
        self.labels = [
            {**self._entity(5), "at": self._time(), "row": n}
            for n in range(draw.choice([1, 60, 60]))
        ]
        for label in self.labels:
            if draw.random() < 0.05:
                label[draw.choice([*self.keys, "at"])] = None

    def _entity(self, many):
        drawn = {key: self.draw.randrange(many) for key in self.keys}
        return {k: f"Zoë'{v}\\" for k, v in drawn.items()} if self.texts else drawn

    def _time(self):
        when = self.start + self.draw.randrange(14) * HOUR
        if self.draw.random() < 0.2:  # as people write it: twice the same hour, and told apart
            local = when.astimezone(OSLO)
            when = datetime(*local.timetuple()[:6], tzinfo=OSLO, fold=local.fold).astimezone(UTC)
        return when

    def _event(self, n):
        draw, when = self.draw, self._time()
        event = {**self._entity(4), "ts": when, "id": n}
        event["arr"] = when + draw.choice([-1, 0, 0, 0, 1, 3, 9]) * HOUR
        versions = draw.choice([1, 1, 1, 2, 3])  # corrected, even twice
        for version in range(versions):
            odd = [math.nan, None, math.inf if self.infinite else math.nan]
            value = draw.choice([draw.gauss(0, 1e3), draw.gauss(0, 1e-6), *odd])
            self.events.append(
                {
                    **event,
                    "arr": event["arr"] + version * draw.choice([0, 1, 2]) * HOUR,
                    "x": value,
                    "k": draw.choice([None, draw.randrange(-5, 2**53 + 5)]),
                    "word": draw.choice([None, "", "Ärztin", "a"]),
                    "when": when,
                }
            )
        if draw.random() < 0.05:
            self.events[-1][draw.choice(["ts", "arr", *self.keys])] = None

    def write(self, folder):
        zone = "UTC" if self.zoned else None
        time = pa.timestamp("us", zone)
        entity = [(key, pa.string() if self.texts else pa.int64()) for key in self.keys]
        named = [("ts", time), ("arr", time), ("when", time), ("x", pa.float64())]
        named += [("k", pa.int64()), ("word", pa.string()), ("id", pa.int64()), ("seq", pa.int64())]
        schema = pa.schema([*entity, *named])
        bare = lambda rows: [  # noqa: E731
            {k: self.bare(v) for k, v in row.items()} for row in rows
        ]
        half = len(self.events) // 2
        for n, part in enumerate((self.events[:half], self.events[half:])):
            pq.write_table(pa.Table.from_pylist(bare(part), schema), folder / f"events-{n}.parquet")
        pq.write_table(
            pa.Table.from_pylist(
                bare(self.labels), pa.schema([*entity, ("at", time), ("row", pa.int64())])
            ),
            folder / "labels.parquet",
        )
        shared = f"path: events-*.parquet, entity: [{', '.join(self.keys)}], event_time: ts"
        shared += ", arrival_time: arr" if self.late else ""
        age = f", max_age: {self.max_age}h" if self.max_age else ""
        (folder / "features.yaml").write_text(
            f"last: {{{shared}{age}, order_by: seq, columns: {{x: x, k: k, word: word, w: when}}}}\n"
            f"sums: {{{shared}, windows: {{n: {{count: 3h}}, sx: {{sum: x, over: 3h}}, "
            "sk: {sum: k, over: 7h}, mx: {mean: x, over: 7h}}}\n"
            f"right: {{{shared}, event_id: id, windows: {{versions: {{count: 5h}}}}}}\n"
        )
        return FeatureStore(folder / "features.yaml")

    def bare(self, value):
        return (
            value.replace(tzinfo=None) if isinstance(value, datetime) and not self.zoned else value
        )

    def of(self, event, entity):
        return all(event[k] is not None and event[k] == entity[k] for k in self.keys)

    def known(self, entity, now):
        """The events that one knows of at a time, each with the moment since when."""
        if now is None:
            return []
        known = []
        for e in self.events:
            arrival = e["arr"] if self.late else e["ts"]
            if None in (e["ts"], arrival) or not self.of(e, entity):
                continue
            if max(e["ts"], arrival) <= now:
                known.append((e, arrival))
        return known

    def last(self, entity, now, aged=True):
        known = self.known(entity, now)
        if not known:
            return dict.fromkeys(["x", "k", "word", "w"])
        e, _ = max(known, key=lambda pair: (pair[0]["ts"], pair[1], pair[0]["seq"]))
        if aged and self.max_age and now - e["ts"] > self.max_age * HOUR:
            return dict.fromkeys(["x", "k", "word", "w"])
        return {"x": e["x"], "k": e["k"], "word": e["word"], "w": self.bare(e["when"])}

    def sums(self, entity, now):
        within = lambda hours: [  # noqa: E731
            e for e, _ in self.known(entity, now) if now - e["ts"] < hours * HOUR
        ]
        finite = lambda rows: [  # noqa: E731
            e["x"] for e in rows if e["x"] is not None and math.isfinite(e["x"])
        ]
        short, long = within(3), within(7)
        return {
            "n": len(short),
            "sx": float(sum(map(Fraction, finite(short)), Fraction(0))),
            "sk": sum(e["k"] or 0 for e in long),
            "mx": float(sum(map(Fraction, finite(long)), Fraction(0))) / len(finite(long))
            if finite(long)
            else None,
        }

    def right(self, entity, now):
        newest = {}
        for e, arrival in self.known(entity, now):
            order = (max(e["ts"], arrival), arrival, e["ts"])
            if e["id"] not in newest or order >= newest[e["id"]][0]:
                newest[e["id"]] = (order, e)
        return {"versions": sum(now - e["ts"] < 5 * HOUR for _, e in newest.values())}

    def future(self, hours):
        """Labels for which event time alone would show an event that is not known yet."""
        if not self.late:
            return None
        count = 0
        for label in self.labels:
            seen = [
                e
                for e in self.events
                if None not in (e["ts"], e["arr"], label["at"])
                and self.of(e, label)
                and e["ts"] <= label["at"]
            ]
            if hours is None and seen:
                top = max(seen, key=lambda e: (e["ts"], e["arr"]))
                fresh = not self.max_age or label["at"] - top["ts"] <= self.max_age * HOUR
                count += top["arr"] > label["at"] and fresh
            elif hours is not None:
                count += any(
                    label["at"] < e["arr"] and label["at"] - e["ts"] < hours * HOUR for e in seen
                )
        return count


def same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        nan = isinstance(value, float) and math.isnan(value)
        assert got[name] == value or (nan and got[name] != got[name]), (name, got, expected)
