"""Point-in-time joins and the online store against an oracle that looks at every event."""

import contextlib
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime

import pytest

pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from feature_cases import HOUR, Case, same  # noqa: E402
from processes import environment, ronde_batch  # noqa: E402
from ronde.tables import feature_store  # noqa: E402
from ronde.tables.feature_store import FeatureStore  # noqa: E402
from ronde.tables.online import Online  # noqa: E402
from ronde.world import ArgumentError, RondeError  # noqa: E402
from sampling import some  # noqa: E402


@pytest.mark.parametrize("seed", some(range(500), 25))
def test_a_label_sees_what_was_known_and_a_reader_sees_the_same(seed, tmp_path):
    case = Case(seed)
    store = case.write(tmp_path)
    joined = store.join(str(tmp_path / "labels.parquet"), at="at")
    rows = joined.table.to_pylist()
    assert [row["row"] for row in rows] == list(range(len(case.labels)))
    for row, label in zip(rows, case.labels, strict=True):
        expected = {**case.last(label, label["at"]), **case.sums(label, label["at"])}
        expected |= case.right(label, label["at"])
        if label["at"] is None:
            expected = dict.fromkeys(expected)
        same({name: row[name] for name in expected}, expected)
    assert [facts.future for facts in joined.facts][:2] == [case.future(None), case.future(7)]

    now = case.start + 8 * HOUR
    store.publish(tmp_path / "online.db", at=case.bare(now).isoformat())
    online = Online(tmp_path / "online.db")
    micros = int(now.timestamp()) * 1_000_000
    for entity in {json.dumps({k: label[k] for k in case.keys}) for label in case.labels}:
        entity = json.loads(entity)
        if None in entity.values():
            continue
        got = online.read("last", entity, micros)
        expected = case.last(entity, now)
        if isinstance(expected["x"], float) and math.isnan(expected["x"]):
            expected["x"] = None
        same({name: got[name] for name in expected}, expected)
        sums = online.read("sums", entity, micros)
        assert sums.pop("as_of") == case.bare(now)
        same(sums, case.sums(entity, now))
        assert (
            online.read("right", entity, micros)["versions"] == case.right(entity, now)["versions"]
        )
    checked = store.check(tmp_path / "online.db")
    assert checked.different == 0, checked.differences


DAY = datetime(2024, 5, 1, tzinfo=UTC)
CLICKS = {
    "user": [1, 1, 2],
    "ts": [DAY, DAY + HOUR, DAY],
    "arr": [DAY, DAY + 3 * HOUR, DAY],
    "country": ["NO", "SE", "DK"],
}
SPEC = "path: clicks.parquet, entity: user, event_time: ts"


def store_of(folder, clicks=CLICKS, spec=f"clicks: {{{SPEC}, columns: [country]}}"):
    pq.write_table(pa.table(clicks), folder / "clicks.parquet")
    (folder / "features.yaml").write_text(spec)
    return FeatureStore(folder / "features.yaml")


@pytest.mark.parametrize(
    "spec, says",
    [
        ("", "features.yaml: expected tables"),
        ("clicks: [1]", "table 'clicks': expected keys and values"),
        ("a: {", "features.yaml is not YAML: "),
        (f"c: {{{SPEC}, column: [x]}}", "table 'c': unknown key 'column'; did you mean 'columns'?"),
        (f"c: {{{SPEC}}}", "table 'c': expected either columns: or windows:."),
        ("c: {path: x, entity: user, columns: [a]}", "table 'c': event_time is missing."),
        (f"c: {{{SPEC}, columns: [a, a]}}", "columns: a column is there twice."),
        (f"c: {{{SPEC}, columns: [a], max_age: 3 days}}", "max_age: '3 days' is not a duration"),
        (f"c: {{{SPEC}, windows: {{n: {{count: 7d}}}}, max_age: 1d}}", "max_age has no meaning"),
        (f"c: {{{SPEC}, windows: {{n: {{median: x}}}}}}", "expected one of count, sum, mean."),
        (f"c: {{{SPEC}, windows: {{n: {{sum: x}}}}}}", "expected {sum: column, over: 7d}."),
        (f"c: {{{SPEC}, columns: [a]}}\nd: {{{SPEC}, columns: [a]}}", "'c' has a feature 'a' too."),
        (f"c: {{{SPEC}, columns: [a]}}\nd: {{{SPEC}, columns: [A]}}", "'c' has a feature 'A' too."),
        (f"c: {{{SPEC}, columns: [known_at]}}", "'known_at' is the name of a time that readers"),
        (f"c: {{{SPEC}, columns: {{event_time: a}}}}", "'event_time' is the name of a time"),
        (f"c: {{{SPEC}, windows: {{as_of: {{count: 7d}}}}}}", "'as_of' is the name of a time"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, spec, says):
    with pytest.raises(ArgumentError, match=re.escape(says)):
        store_of(tmp_path, spec=spec)


COUNTRY = "columns: [country]"


@pytest.mark.parametrize(
    "labels, spec, says",
    [
        ({}, "columns: [contry]", "clicks.parquet has no column 'contry'; did you mean 'country'?"),
        ({"user": None, "usr": [1]}, COUNTRY, "there is no column 'user' (entity)"),
        ({"user": ["1"]}, COUNTRY, "'user' is VARCHAR; in 'clicks' it is BIGINT."),
        ({"at": [1]}, COUNTRY, "'at' is BIGINT; expected a timestamp or a date."),
        ({"at": [datetime(2024, 5, 1)]}, COUNTRY, "'at' has no time zone, 'clicks' has a"),
        ({"country": ["x"]}, COUNTRY, "there is a column 'country' already"),
        ({"Country": ["x"]}, COUNTRY, "there is a column 'country' already"),
        ({"ronde_t": [1]}, COUNTRY, "'ronde_t' is a name of Ronde's own"),
        ({}, "windows: {s: {sum: country, over: 1d}}", "s adds up 'country', which is VARCHAR;"),
        ({}, f"arrival_time: country, {COUNTRY}", "'country' is VARCHAR; expected a timestamp"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, labels, spec, says):
    store = store_of(tmp_path, spec=f"clicks: {{{SPEC}, {spec}}}")
    given = {"user": [1], "at": [DAY], **labels}
    with pytest.raises(ArgumentError, match=re.escape(says)):
        store.join(pa.table({k: v for k, v in given.items() if v}), at="at")


def test_rows_that_tie_with_different_values_are_refused_where_a_label_meets_them(tmp_path):
    clicks = {k: [*v, v[0], v[0]] for k, v in CLICKS.items()}
    clicks["country"] = ["NO", "SE", "DK", "FI", "NO"]
    store = store_of(tmp_path, clicks)
    labels = pa.table({"user": [1, 1], "at": [DAY, DAY + HOUR]})
    with pytest.raises(ArgumentError, match=r"clicks': 1 times .* equal times .* Add order_by:"):
        store.join(labels, at="at")
    later = store.join(labels.slice(1), at="at").table
    assert later["country"].to_pylist() == ["SE"]


@pytest.mark.parametrize("frame", ["arrow", "pandas", "polars", "csv"])
def test_labels_may_be_any_frame(tmp_path, frame):
    store = store_of(tmp_path)
    labels = pa.table({"user": [2, 1, 9], "at": [DAY + HOUR, DAY + HOUR, DAY]})
    given = labels
    if frame == "pandas":
        given = labels.to_pandas()
    elif frame == "polars":
        given = pytest.importorskip("polars").from_arrow(labels)
    elif frame == "csv":
        given = tmp_path / "labels.csv"
        given.write_text(
            "user,at\n2,2024-05-01T01:00:00Z\n1,2024-05-01T01:00:00Z\n9,2024-05-01T00:00Z\n"
        )
    assert store.join(given, at="at").table["country"].to_pylist() == ["DK", "SE", None]


def test_nanoseconds_never_show_an_event_early(tmp_path):
    """What pandas writes. An event counts from the next whole microsecond."""
    stamp = int(DAY.timestamp()) * 1_000_000_000
    ns = lambda values: pa.array(values, pa.timestamp("ns", "UTC"))  # noqa: E731
    store = store_of(tmp_path, {**CLICKS, "ts": ns([stamp + 1, stamp + 2001, stamp])})
    labels = pa.table({"user": [1, 1, 1], "at": ns([stamp, stamp + 999, stamp + 1000])})
    assert store.join(labels, at="at").table["country"].to_pylist() == [None, None, "NO"]


def test_a_row_that_arrives_on_a_date_is_known_from_the_end_of_that_day(tmp_path):
    clicks = {"user": [1], "ts": [DAY.date()], "arr": [DAY.date()], "country": ["NO"]}
    spec = f"clicks: {{{SPEC}, arrival_time: arr, columns: [country]}}\n"
    store = store_of(tmp_path, clicks, spec + f"c: {{{SPEC}, columns: {{at_once: country}}}}")
    times = [DAY + n * HOUR for n in (-1, 0, 9, 23, 24)]
    labels = pa.table({"user": [1] * 5, "at": [time.replace(tzinfo=None) for time in times]})
    joined = store.join(labels, at="at").table
    assert joined["country"].to_pylist() == [None, None, None, None, "NO"]
    assert joined["at_once"].to_pylist() == [None, "NO", "NO", "NO", "NO"]


def test_files_are_read_under_their_own_names_and_with_their_own_columns(tmp_path):
    (tmp_path / "user=5").mkdir()
    spec = "c: {path: 'user=5/a[[]0].parquet', entity: user, event_time: ts, columns: [country]}"
    store = store_of(tmp_path, spec=spec)
    pq.write_table(pa.table(CLICKS), tmp_path / "user=5" / "a[0].parquet")
    other = {**CLICKS, "country": ["?"] * 3}
    pq.write_table(pa.table(other), tmp_path / "user=5" / "a0.parquet")
    labels = pa.table({"user": [1, 2, 5], "at": [DAY] * 3})
    assert store.join(labels, at="at").table["country"].to_pylist() == ["NO", "DK", None]


@pytest.mark.parametrize("where", ["file", "arrow", "pandas"])
def test_columns_that_differ_only_in_case_are_refused(tmp_path, where):
    labels = pa.table({"user": [1], "at": [DAY], "v": [1], "V": [2]})
    store = store_of(
        tmp_path, {**CLICKS, "v": [1, 2, 3], "V": [4, 5, 6]} if where == "file" else CLICKS
    )
    given = labels.to_pandas() if where == "pandas" else labels
    with pytest.raises(ArgumentError, match="two columns have the same name, or differ only in"):
        store.join(given, at="at")


@pytest.mark.parametrize("name", ["arr", "known", "ts", "e0", "x0", "d0", "k0", "until", "end0"])
def test_a_window_adds_up_its_column_whatever_its_name(tmp_path, name):
    clicks = {"user": [1, 1], "t": [DAY, DAY], "id": [1, 2], name: [2, 3]}
    clicks |= {"other": [0.5, 0.5]}
    spec = "path: clicks.parquet, entity: user, event_time: t, event_id: id"
    windows = f"{{s: {{sum: {name}, over: 1d}}, o: {{sum: other, over: 2h}}}}"
    store = store_of(tmp_path, clicks, f"c: {{{spec}, windows: {windows}}}")
    joined = store.join(pa.table({"user": [1], "at": [DAY]}), at="at").table
    assert (joined["s"].to_pylist(), joined["o"].to_pylist()) == ([5], [1.0])


def test_null_is_no_id_and_loses_every_tie(tmp_path):
    clicks = {"user": [1] * 4, "ts": [DAY] * 4, "id": [None, None, 7, 7], "n": [None, 1, None, 2]}
    clicks |= {"m": [0, 1, 2, 3]}
    spec = f"n: {{{SPEC}, event_id: [id, user], windows: {{events: {{count: 1d}}}}}}\n"
    store = store_of(tmp_path, clicks, f"{spec}c: {{{SPEC}, order_by: n, columns: [m]}}")
    label = pa.table({"user": [1], "at": [DAY]})
    assert store.join(label, at="at").table.select(["events", "m"]).to_pylist() == [
        {"events": 3, "m": 3}
    ]


def test_sums_refuse_a_column_in_which_small_values_would_be_lost(tmp_path):
    spec = f"c: {{{SPEC}, windows: {{s: {{sum: x, over: 1d}}}}}}"
    label = pa.table({"user": [1, 2], "at": [DAY + HOUR] * 2})
    store = store_of(tmp_path, {**CLICKS, "x": [0.1, 0.0, 2e11]}, spec)
    assert store.join(label, at="at").table["s"].to_pylist() == [0.1, 2e11]
    store = store_of(tmp_path, {**CLICKS, "x": [0.5, 0.0, 1.797e308]}, spec)
    with pytest.raises(ArgumentError, match=r"'c': 'x' has values from 0.5 to 1.8e\+308. Sums"):
        store.join(label, at="at")


def test_numbers_and_files_that_sqlite_cannot_hold_are_refused_by_name(tmp_path, monkeypatch):
    clicks = {**CLICKS, "big": pa.array([2**63, 1, 2], pa.uint64())}
    store = store_of(tmp_path, clicks, f"clicks: {{{SPEC}, columns: [big]}}")
    with pytest.raises(ArgumentError, match=r"'clicks': a whole number is 2\*\*63 or more"):
        store.publish(tmp_path / "online.db", at=DAY.isoformat())
    assert not list(tmp_path.glob("online*"))
    store.publish(tmp_path / "online.db")
    with pytest.raises(ArgumentError, match="user=18446744073709551616 does not fit 64 bits"):
        Online(tmp_path / "online.db").get("clicks", user=2**64)
    with pytest.raises(ArgumentError, match="is no store of features"):
        Online(tmp_path)
    part = tmp_path / "online.db.writing"
    monkeypatch.setattr("fcntl.flock", lambda *_: part.unlink())  # as the other publisher does
    with pytest.raises(RondeError, match="another publication is under way"):
        store.publish(tmp_path / "online.db")


def features(folder, *commands):
    return ronde_batch([["features", *command.split()] for command in commands], folder)


def test_the_command_line_joins_publishes_reads_and_checks(tmp_path):
    store_of(tmp_path, spec=f"clicks: {{{SPEC}, arrival_time: arr, columns: [country]}}")
    (tmp_path / "plain.yaml").write_text(f"clicks: {{{SPEC}, columns: [country]}}")
    pq.write_table(pa.table({"user": [1, 2], "at": [DAY + HOUR] * 2}), tmp_path / "labels.parquet")
    wrong = {
        "get online.db click --user 1": "has no table 'click'; there are clicks.",
        "get online.db clicks --usr 1": "'clicks' is by user=…; given: usr.",
        "get online.db clicks --user x": "--user x: expected a whole number.",
        "check plain.yaml labels.parquet": "labels.parquet is no store of features",
    }
    late, plain, published, got, checked, *refused = features(
        tmp_path,
        "join features.yaml labels.parquet --at at --out late.parquet",
        "join plain.yaml labels.parquet --at at --out plain.parquet",
        "publish features.yaml --to online.db",
        "get online.db clicks --user 1",
        "check features.yaml online.db",
        *wrong,
    )
    assert late.returncode == 0, late.stderr
    assert re.search(r"join +2 labels, 1 table, 3 events: [\d.]+ s", late.stdout)
    assert "clicks: 0.0 % of labels without a value; 50.0 % would have seen the" in late.stdout
    assert pq.read_table(tmp_path / "late.parquet")["country"].to_pylist() == ["NO", "DK"]
    assert plain.stdout.count("clicks has no arrival_time: late corrections count as if known") == 1
    assert pq.read_table(tmp_path / "plain.parquet")["country"].to_pylist() == ["SE", "DK"]
    assert "publish  online.db: clicks 2 entities" in published.stdout, published.stderr
    assert json.loads(got.stdout) == {
        "country": "SE",
        "event_time": "2024-05-01T01:00:00+00:00",
        "known_at": "2024-05-01T03:00:00+00:00",
    }
    assert "online = offline on 2 entities" in checked.stdout, checked.stderr
    for done, says in zip(refused, wrong.values(), strict=True):
        assert (done.returncode, done.stdout) == (2, "") and says in done.stderr
    # a late correction, as if it had been known
    changed = {**CLICKS, "country": ["NO", "FI", "DK"]}
    pq.write_table(pa.table(changed), tmp_path / "clicks.parquet")
    (done,) = features(tmp_path, "check features.yaml online.db")
    assert done.returncode == 1
    assert "differs  clicks user=1 country: online 'SE', offline 'FI'" in done.stdout


def test_max_age_ends_a_published_value_when_it_is_read(tmp_path):
    store = store_of(tmp_path, spec=f"clicks: {{{SPEC}, max_age: 2h, columns: [country]}}")
    store.publish(tmp_path / "online.db", at="2024-05-01T01:00:00")
    online, hour = Online(tmp_path / "online.db"), 3_600_000_000
    day = int(DAY.timestamp()) * 1_000_000
    assert online.read("clicks", {"user": 1}, day + 3 * hour)["country"] == "SE"
    assert online.read("clicks", {"user": 1}, day + 3 * hour + 1)["country"] is None
    assert online.get("clicks", user=1)["country"] is None


_PUBLISHER = """
import sys
from ronde.tables.online import OnlineTable, publish_tables
path, value = sys.argv[1], int(sys.argv[2])
while True:
    value += 1
    tables = [
        (OnlineTable(name, {"id": "int"}, {"v": "int"}, {}, False, None, 0, True),
         ((i, 0, 0, value) for i in range(3000)))
        for name in ("a", "b")
    ]
    publish_tables(path, tables)
    print(value, flush=True)
"""


def test_a_reader_never_sees_half_a_publication_that_was_killed(tmp_path):
    path, value, seen = tmp_path / "online.db", 0, []
    for round_ in range(6):
        publisher = subprocess.Popen(
            [sys.executable, "-c", _PUBLISHER, path, str(value)],
            env=environment(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            for _ in range(1 + round_ % 3):
                value = int(publisher.stdout.readline())
                online = Online(path)
                with contextlib.closing(
                    sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)
                ) as db:
                    whole = [{v for (v,) in rows_of(db, name)} for name in ("a", "b")]
                assert whole[0] == whole[1] and len(whole[0]) == 1  # one publication, both tables
                seen.append(online.get("a", id=2999)["v"])
            while not (tmp_path / "online.db.writing").exists():
                time.sleep(0)  # killed in the middle of the next one
        finally:
            os.kill(publisher.pid, signal.SIGKILL)
            publisher.wait()
            publisher.stdout.close()
        assert Online(path).get("b", id=0)["v"] >= value
        value = Online(path).get("b", id=0)["v"]
    assert seen == sorted(seen) and len(set(seen)) > 6


def rows_of(db, name):
    rows = list(db.execute(f"SELECT v FROM {name}"))
    assert len(rows) == 3000
    return rows


def test_a_new_publication_is_read_by_readers_that_are_there(tmp_path):
    store = store_of(tmp_path)
    store.publish(tmp_path / "online.db")
    online = Online(tmp_path / "online.db")
    assert online.get("clicks", user=2)["country"] == "DK"
    store_of(tmp_path, {**CLICKS, "country": ["NO", "SE", "IS"]}).publish(tmp_path / "online.db")
    countries = []
    threads = [
        threading.Thread(target=lambda: countries.append(online.get("clicks", user=2)["country"]))
        for _ in range(4)
    ]
    for thread in [*threads]:
        thread.start()
    for thread in threads:
        thread.join()
    assert countries == ["IS"] * 4 and online.get("clicks", user=2)["country"] == "IS"


def test_a_publication_that_changes_while_it_is_compared_is_said(tmp_path, monkeypatch):
    store, file, compare = store_of(tmp_path), tmp_path / "online.db", feature_store._compare
    store.publish(file, at="2024-05-01T00:30Z")

    def published_before(*given):
        store.publish(file, at="2024-05-02T00:00Z")
        compare(*given)

    monkeypatch.setattr(feature_store, "_compare", published_before)
    with pytest.raises(RondeError, match="published again during the comparison"):
        store.check(file)


def test_a_publication_that_cannot_be_written_keeps_the_previous_one(tmp_path):
    store = store_of(tmp_path)
    store.publish(tmp_path / "online.db")
    script = (
        "import resource, signal, sys\n"
        "from ronde.tables.online import OnlineTable, publish_tables\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "table = OnlineTable('a', {'id': 'int'}, {'v': 'int'}, {}, False, None, 0, True)\n"
        "publish_tables(sys.argv[1], [(table, ((i, 0, 0, i) for i in range(100000)))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "online.db"],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert "online.db cannot be written: " in done.stderr
    assert "The previous publication is kept." in done.stderr
    assert sorted(p.name for p in tmp_path.glob("online*")) == ["online.db"]
    assert Online(tmp_path / "online.db").get("clicks", user=2)["country"] == "DK"
    with pytest.raises(RondeError, match="another publication is under way"):
        import fcntl

        with open(tmp_path / "online.db.writing", "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            store.publish(tmp_path / "online.db")


def test_reading_needs_the_standard_library_only(tmp_path):
    store_of(tmp_path).publish(tmp_path / "online.db")
    script = (
        "import sys\nfrom ronde.tables import Online\n"
        "print(Online(sys.argv[1]).get('clicks', user=2)['country'])\n"
        "print([m for m in ('duckdb', 'pyarrow', 'numpy', 'torch', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "online.db"],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "DK\n[]\n", done.stderr
