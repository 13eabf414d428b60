"""The live page: one server process and one Chromium for the whole file."""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import os
import random
import re
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from processes import Child, environment, free_port, ronde
from record_lines import append, end, evaluation, resume, start, step
from ronde.jobs.flow import load_flow
from ronde.jobs.flow_run import FlowRun
from ronde.jobs.items import find_items
from ronde.jobs.ledger import JobLedger
from ronde.jobs.map_plan import MapPlan, plan_map
from ronde.jobs.tuner import Tuned, TunePlan

pytest.importorskip("starlette", reason="the page needs starlette and uvicorn: extra 'page'")
pytest.importorskip("uvicorn", reason="the page needs starlette and uvicorn: extra 'page'")

_HOSTILE = "<img src=x onerror=alert(1)>"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Site:
    """A folder of runs, its server, and a browser in front of it."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.port = folder / "runs", free_port()
        self.runs.mkdir()
        self.start()

    def start(self) -> None:
        env = environment({"RONDE_RUNS": None})
        command = ronde("watch", "--page", "--port", str(self.port), "--runs", str(self.runs))
        self.server = Child(command, self.runs.parent, env)
        self.server.wait_for("ssh -L", 30)
        self.url = re.search(r"http://\S+", self.server.stdout)[0]
        self.key = self.url.partition("=")[2]

    def ask(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        link.request("GET", path, headers=headers)
        answer = link.getresponse()
        received = {k.lower(): v for k, v in answer.getheaders()}
        body = b"" if "event-stream" in received.get("content-type", "") else answer.read()
        link.close()
        return answer.status, received, body

    def write(self, name: str, *events: dict, file: str = "record", tail: str = "") -> None:
        append(self.runs / name, *events, file=file, tail=tail)


def steps(first: int, last: int, loss: float = 1.0, later: int = 0) -> list[dict]:
    return [step(s, loss, time=1e9 + s + later, samples=32 * s) for s in range(first, last + 1)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("page"))
    yield site
    site.server.kill()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: extra 'dev'")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as open_ones:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("chromium")))
        playwright = open_ones.enter_context(sync_api.sync_playwright())
        path = path or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        patch.undo()
        open_ones.callback(chromium.close)
        yield chromium


@pytest.fixture
def page(site, browser):
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    # it asks every three seconds, for which a test would wait
    page.add_init_script("{ const s = setInterval; setInterval = (f, ms) => s(f, ms / 15); }")
    page.set_default_timeout(20_000)
    page.trouble, page.asked = [], []
    page.on("pageerror", lambda error: page.trouble.append(str(error)))
    page.on("dialog", lambda dialog: (page.trouble.append("a dialog"), dialog.dismiss()))
    page.on(
        "console",
        lambda message: page.trouble.append(message.text) if "Security" in message.text else None,
    )
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    assert page.trouble == []
    context.close()


def curve(page, name: str = "loss") -> tuple[list[int], list[float]]:
    """The points as they are drawn."""
    return tuple(page.evaluate(f"charts.get({name!r}).data.slice(0, 2)"))


def until(page, true: str) -> None:
    """Until an expression of the page is true. Playwright's own waiting needs ``eval``, which the
    page's policy forbids.
    """
    limit = time.monotonic() + 60
    while not page.evaluate(f"Boolean({true})"):
        assert time.monotonic() < limit, f"never: {true}\n{page.inner_text('body')[:2000]}"
        page.wait_for_timeout(30)


def until_last(page, step: int, name: str = "loss") -> None:
    until(page, f"charts.get({name!r})?.data[0].at(-1) === {step}")


def test_only_who_has_the_key_and_comes_by_loopback(site):
    assert {
        c.laddr.ip
        for c in psutil.Process(site.server.pid).net_connections()
        if c.status == "LISTEN"
    } == {"127.0.0.1"}
    site.write("mine", start(run="mine"))
    status, headers, _ = site.ask(f"/?key={site.key}")
    cookie = headers["set-cookie"].partition(";")[0]
    assert (
        status == 200
        and "HttpOnly" in headers["set-cookie"]
        and "SameSite=Strict" in headers["set-cookie"]
    )
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert not [name for name in headers if name.startswith("access-control")]
    for path in ("/", "/runs", "/files/page.js", "/events?run=mine", "/runs/mine/logs"):
        assert site.ask(path)[0] == 403 and b"link" in site.ask(path)[2]
        assert site.ask(path, Cookie=cookie[:-1] + "x")[0] == 403
        assert site.ask(path, Cookie=cookie, Host="evil.example")[0] == 400, "DNS rebinding"
        assert site.ask(path, Cookie=cookie)[0] == 200
    kept = site.runs / ".page-key"
    assert kept.read_text() == site.key and kept.stat().st_mode & 0o077 == 0


def test_names_lead_nowhere_else(site):
    site.write("mine", start(run="mine"))
    (site.runs.parent / "outside").mkdir(exist_ok=True)
    (site.runs.parent / "outside" / "record.jsonl").write_text('{"type": "start"}\n')
    for name in (
        "..%2Foutside",
        "%2E%2E%2Foutside",
        "../outside",
        ".",
        "..",
        "no",
        "mine%00",
        "%2Fetc",
    ):
        assert site.ask(f"/events?run={name}&key={site.key}")[0] == 404, name
        assert site.ask(f"/runs/{name}/logs?key={site.key}")[0] == 404, name
    for file in ("..%2F..%2Frecord.jsonl", "record.jsonl", "/etc/passwd"):
        assert site.ask(f"/runs/mine/logs?file={file}&key={site.key}")[0] == 404, file
        assert site.ask(f"/files/{file}?key={site.key}")[0] == 404, file
    assert site.ask(f"/events?run=mine&from=x:y&key={site.key}")[0] == 400


def test_nothing_of_a_run_becomes_markup_and_nothing_is_loaded_from_elsewhere(site, page):
    bad = evaluation(2, {_HOSTILE: 0.5, "loss": 1.0}, name=_HOSTILE)
    site.write("hostile", start(run="hostile", arguments=["--out", _HOSTILE], script=_HOSTILE, git={"commit": _HOSTILE}), *steps(1, 3), bad,
        {"type": "warning", "time": 1e9, "text": _HOSTILE}, {"type": "alert", "time": 1e9, "rule": _HOSTILE, "text": _HOSTILE, "step": 2, "remedy": _HOSTILE, "again": _HOSTILE},
        end(status="failed", error=_HOSTILE, step=3))  # fmt: skip
    (site.runs / "hostile" / "logs").mkdir()
    (site.runs / "hostile" / "logs" / "rank-0.log").write_text(_HOSTILE)
    (site.runs / _HOSTILE.replace("/", "")).mkdir()  # no name of a run
    odd = {"type": "start", "time": "now", "arguments": 7, "plan": [1], "git": {"commit": 5}}
    site.write(
        "odd", odd, {"type": "end", "time": 3}, {"type": "hang"}, {"type": "step"}, *steps(1, 2)
    )
    page.goto(site.url + "#run=hostile")
    until_last(page, 3)
    until(page, "document.querySelector('#logs pre').textContent.includes('img')")
    seen = page.inner_text("body")
    assert seen.count(_HOSTILE) >= 8 and page.query_selector("img") is None
    assert page.url.startswith(f"http://127.0.0.1:{site.port}/#") and "key" not in page.url
    assert {url.split("/")[2] for url in page.asked} == {f"127.0.0.1:{site.port}"}
    page.click("#table td:first-child:text-is('odd')")
    until_last(page, 2)
    assert "unreadable" in page.inner_text("#table")
    page.set_viewport_size({"width": 390, "height": 844})
    until(page, "charts.get('loss').width <= 390 && document.documentElement.scrollWidth === 390")


def test_points_come_once_whatever_happens(site, page):
    """100,000 points, a live tail, a torn line, a reload, a kill of the server, a resume."""
    site.write("big", start(run="big"), *steps(1, 100_000))
    page.goto(site.url + "#run=big")
    until_last(page, 100_000)
    site.write("big", *steps(100_001, 100_100), tail='{"type": "step", "step": 100101, "ti')
    until_last(page, 100_100)
    assert page.evaluate("[opens, charts.get('loss').data[0].length]") == [1, 100_100]
    with (site.runs / "big" / "record.jsonl").open("a") as out:
        out.write('me": 1e9, "epoch": 0, "loss": NaN, "lr": 0.1, "samples": 3203232}\n')
    until_last(page, 100_101)
    assert page.evaluate("charts.get('loss').data[1].at(-1)") is None, "NaN is a gap"
    site.server.kill()
    until(page, "document.getElementById('live').textContent === 'connecting again'")
    site.write("big", *steps(100_102, 100_200))
    site.start()
    until_last(page, 100_200)
    assert page.evaluate("[opens, charts.get('loss').data[0].length]") == [2, 100_200]
    site.write("big", *steps(100_201, 100_250), resume(90_000), *steps(90_001, 90_500, loss=0.5))
    until_last(page, 90_500)
    came = curve(page)
    assert came[0] == list(range(1, 90_501)) and came[1][89_999:90_001] == [1.0, 0.5]
    page.reload()
    until_last(page, 90_500)
    assert curve(page) == came, "from the beginning as it came"
    (site.runs / "big" / "record.jsonl").unlink()  # another run takes the name
    site.write("big", start(run="big"), *steps(1, 7, loss=0.25))
    until_last(page, 7)
    assert curve(page) == (list(range(1, 8)), [0.25] * 7)


def test_a_hundred_runs_and_what_differs_between_them(site, page):
    for n in range(100):
        lr = f"{0.001 * (n + 1):g}"
        site.write(f"sweep-{n}", start(run=f"sweep-{n}", arguments=["--lr", lr, "--seed=7"], git={"commit": "abcdef0123456789", "dirty": False}), *steps(1, 5, loss=n), evaluation(5, {"accuracy": n / 100}), *([{"type": "alert", "time": 1e9, "rule": "nan", "text": "t"}] if n == 3 else []))  # fmt: skip
    page.goto(site.url + "#run=sweep-1")
    page.fill("#filter", "sweep-")
    until(page, "document.querySelectorAll('#table tbody tr').length === 100")
    heads = page.locator("#table th").all_inner_texts()
    assert heads == ["run", "status", "step", "loss", "accuracy", "lr", "written"], heads
    page.fill("#filter", "sweep-3")
    until(page, "document.querySelectorAll('#table tbody tr').length === 11")
    row = page.locator("#table tr:has(td:first-child:text-is('sweep-3')) td").all_inner_texts()
    assert row[:6] == ["sweep-3", "running · 1 alert", "5", "3", "0.0300", "0.004"]
    page.click("[aria-label='Add sweep-3 to the curves']")
    page.click("[aria-label='Add sweep-33 to the curves']")
    until(page, "charts.get('loss')?.data.slice(1).map(y => y[0]).join() === '1,3,33'")
    page.click("#axis button:text-is('samples')")
    until(page, "charts.get('loss')?.data[0].at(-1) === 160")


def test_health_resources_and_bands(site, page):
    measured = {"samples": [0, 1], "epoch": 0, "bad_ranks": [], "first_bad": None}
    measured |= {"weight": [1, 1], "update": [0.1, 0.1], "same": [0, 0]}
    tensors = {"type": "tensors", "step": 1, "every": 2, "names": ["a.weight", "b.weight"]}
    tensors |= {"places": ["m.py:4", "m.py:5"], "frozen": [False, False]}
    gradients = [(2, [1.0, 2.0]), (4, [1.0, 2.0]), (4, [3.0, "nan"])]
    health = [{"type": "health", "step": s, "gradient": g, **measured} for s, g in gradients]
    hang = {"type": "hang", "time": 1e9 + 5, "sentence": "rank 1 waits", "rank": 1, "step": 6}
    hang |= {"place": "t.py:3", "waiting": [0], "slow": False}
    restart = {"type": "restart", "time": 1e9 + 6, "generation": 1, "reason": "rank 1 waits"}
    again = [resume(3), *steps(4, 9, later=10)]
    site.write("ill", start(run="ill"), *steps(1, 5), hang, restart, *again)
    site.write("ill", tensors, *health, file="health")
    used = {"type": "resources", "cpu": [10, 50, 90], "memory": 2**30, "memory_limit": 2**32}
    used |= {"disk_free": 2**33, "gpu": [], "throttled": False}
    hosts = [used | {"time": 1e9 + t, "host": h} for t in (0, 10) for h in ("one", "two")]
    site.write("ill", *hosts, file="resources")
    page.goto(site.url + "#run=ill")
    until_last(page, 9)
    until(page, "tracks.get('ill').hosts.size === 2 && tracks.get('ill').health.length === 2")
    page.wait_for_selector("canvas.map")
    page.wait_for_selector("#resources .card >> nth=1")
    seen = page.evaluate("tracks.get('ill').health.map(h => [h.step, h.gradient[1]])")
    assert seen == [[2, 2.0], [4, "nan"]]
    bands = page.evaluate("tracks.get('ill').bands.map(b => [b.kind, b.from.step, b.to.step])")
    assert bands == [["hang", 5, 4]]
    assert "not finite" in page.inner_text("#health")
    assert "1.00 GiB of 4.00 GiB" in page.inner_text("#resources")
    told = page.inner_text("#events")
    assert "rank 1 waits" in told and "resumed at step 3 on 2 workers" in told


def write_search(site, name: str, results: list[list[float | None]], ended: str = "") -> None:
    """A search as ``ronde tune`` keeps it, with the run of each trial that has begun."""
    space = ["lr=log:1e-4..1", f"kind={_HOSTILE},b"]
    plan = TunePlan(["train.py", "--epochs", "9"], space, "max:accuracy", 4, "halving")
    trials = [
        {
            "trial": n,
            "run": str(site.runs / name / "trials" / f"t00{n}"),
            "values": {"lr": 10.0 ** -(n + 1), "kind": _HOSTILE if n % 2 else "b", _HOSTILE: n},
            "results": reached,
            "samples": 100 * len(reached),
            "error": _HOSTILE if None in reached else "",
            "rule": "nan" if n == 3 and reached else "",
            "running": not ended and not reached,
        }
        for n, reached in enumerate(results)
    ]
    done = [t for t in trials if t["results"] and None not in t["results"]]
    best = max(done, key=lambda t: (len(t["results"]), t["results"][-1]))
    tuned = Tuned(
        {**best, "result": best["results"][-1]}, trials, (100, 300), 700, 1200, ended, ["lr"]
    )
    for n in range(len(results)):
        if not (site.runs / name / "trials" / f"t00{n}").exists():
            site.write(f"{name}/trials/t00{n}", start(run=f"t00{n}"), *steps(1, 3, loss=n + 1.0))
    (site.runs / name / "tune.json").write_text(json.dumps(dataclasses.asdict(plan)))
    new = site.runs / name / "result.new"
    new.write_text(json.dumps(tuned.to_dict()))
    os.utime(new, (2e10, 2e10))  # a sign of life, however slow the test is
    new.rename(site.runs / name / "result.json")


def test_a_search_is_listed_drawn_and_opens_its_trials(site, page):
    write_search(site, "search", [[0.5], [0.7], [None], []])
    page.goto(site.url)
    row = page.locator("#jobs tr:has(button:text-is('search')) td")
    row.first.click()
    until_last(page, 3)
    assert row.all_inner_texts()[1:5] == [
        "search",
        "running",
        "4 trials, 1 running",
        "accuracy 0.7000 · t001",
    ]
    rows = "[...document.querySelectorAll('#job .wide tbody tr')].map(r => r.textContent)"
    assert page.evaluate(rows) == [
        f"t001bestpaused0.70001 of 21000.0100{_HOSTILE}1",
        "t000paused0.50001 of 21000.1000b0",
        "t002failed––1000.0010b2",
        f"t003running––961.00e-4{_HOSTILE}3",  # as far as its run is
    ]
    assert page.evaluate("scatters.map(u => u.data[0])") == [[0.01, 0.1], [0, 1], [0, 1]]
    assert page.evaluate("scatters[0].scales.x.distr") == 3, "log, as the space"
    best = "scatters[0].data.at(-1).filter(y => y !== null)"
    assert page.evaluate(best) == [0.7] and page.query_selector("img") is None
    write_search(site, "search", [[0.5, 0.9], [0.7, 0.8], [None], [0.6]], "done")
    until(page, f"{best}[0] === 0.9")
    until(page, "jobs.find(j => j.name === 'search').status === 'completed'")
    assert "stopped by nan" in page.inner_text("#job .wide")
    assert page.evaluate("picked") == ["search/trials/t001"], "what a person looks at stays"
    at = page.evaluate(
        "(u => { u.root.scrollIntoView(); const box = u.over.getBoundingClientRect();"
        " return [box.left + u.valToPos(1e-4, 'x'), box.top + u.valToPos(.6, 'y')]; })(scatters[0])"
    )
    page.mouse.move(*at)
    until(page, "document.querySelector('#job .under').textContent.startsWith('t003')")
    page.mouse.click(*at)
    until(page, "charts.get('loss')?.data[1].join() === '4,4,4'")
    page.click("#job [aria-label='Add search/trials/t000 to the curves']")
    until(page, "charts.get('loss')?.data.slice(1).map(y => y[0]).join() === '4,1'")
    page.reload()
    until(page, "charts.get('loss')?.data.length === 3 && scatters.length === 3")


def test_a_flow_and_a_map_say_what_was_done(site, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.yaml").write_text("""
steps:
  prepare:
    run: >-
      echo '{"rows": 7}'
    in: data
  weak:
    run: >-
      sh -c "echo '<img src=x onerror=alert(1)>' >&2; exit 1"
    needs: prepare
    retries: 1
    retry: any
  after: {run: echo, needs: weak}
  train: {run: echo, needs: prepare, when: prepare.rows > 9}
""")
    (tmp_path / "data").write_text("1")
    flow = load_flow(tmp_path / "flow.yaml", {})
    run = FlowRun(flow, site.runs / "flow", wait=0.01)
    run.run()
    (tmp_path / "items").write_text("a\nb\nc\nd\n")
    items = find_items("@items")
    (site.runs / "map").mkdir()
    plan = MapPlan(["echo", _HOSTILE], True, 2, None, None)
    plan_map(site.runs / "map" / ".map", items, plan, [0, 2, 3, 4])
    os.utime(site.runs / "map" / ".map" / "job.json", (2e10, 2e10))
    ledger = JobLedger(site.runs / "map" / ".map")
    ledger.commit(ledger.claim(), {"outputs": []})
    ledger.set_aside(ledger.claim(), _HOSTILE)
    page.goto(site.url + "#job=flow")
    table = "[...document.querySelectorAll('#job .wide tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    until(page, f"{table}.length === 4")
    seen = {row[0].splitlines()[0]: row for row in page.evaluate(table)}
    assert seen["prepare"][1] == "done" and seen["prepare"][5:7] == ["it was never done", "rows 7"]
    assert seen["weak"][1:5:2] == ["failed", "2"] and _HOSTILE in seen["weak"][5]
    assert seen["after"][1] == "not run" and seen["after"][4:6] == ["weak", "weak failed"]
    assert seen["train"][1] == "skipped" and "prepare.rows is 7" in seen["train"][5]
    row = page.locator("#jobs tr:has(button:text-is('flow')) td").all_inner_texts()
    assert row[1:5] == ["flow", "failed", "2 of 4 steps", "1 failed"]
    FlowRun(flow, site.runs / "flow", wait=0.01).run()
    until(page, f"{table}[0][1] === 'kept'")
    (tmp_path / "data").write_text("2")
    FlowRun(flow, site.runs / "flow", wait=0.01).run()
    until(page, f"{table}[0][5] === 'data has changed'")
    row = page.locator("#jobs tr:has(button:text-is('map')) td")
    assert row.all_inner_texts()[1:5] == ["map", "running", "3 of 4 items", "1 failed"]
    row.first.click()
    until(page, "job?.kind === 'map'")
    assert page.evaluate(table) == [["item 2", "1", _HOSTILE]]
    ledger.commit(ledger.claim(), {"outputs": []})
    until(page, "document.querySelector('#job .status').textContent === 'completed'")
    assert page.query_selector("img") is None


def test_a_job_that_is_damaged_or_was_killed_is_told_as_such(site, page):
    write_search(site, "killed", [[0.5], []])
    os.utime(site.runs / "killed" / "result.json", (1e9, 1e9))
    (site.runs / "broken").mkdir()
    (site.runs / "broken" / "flow.json").write_text('{"steps": {"a": ')
    page.goto(site.url + "#job=broken")
    until(page, "document.querySelector('#job .error')")
    assert "it cannot be read" in page.inner_text("#job .error")
    rows = page.locator("#jobs tbody tr").all_inner_texts()
    assert any(re.match(r"killed\s+search\s+stopped", text) for text in rows), rows
    assert any(re.match(r"broken\s+flow\s+unreadable", text) for text in rows), rows
    for name in ("..%2Foutside", "no", "killed/..", "killed%2F..%2F..", "killed/trials"):
        assert site.ask(f"/jobs/{name}?key={site.key}")[0] == 404, name
    assert site.ask("/jobs/killed")[0] == 403


@pytest.mark.parametrize("block", [150, 4 << 20])
def test_messages_hold_every_whole_line_once_and_begin_with_their_resume(
    tmp_path, monkeypatch, block
):
    from ronde.watch import page as page_module

    monkeypatch.setattr(page_module, "_BLOCK_BYTES", block)
    rng, kinds = random.Random(block), ("step", "step", "step", "resume", "warning", "bad", "part")
    path, expected = tmp_path / "record.jsonl", []
    with path.open("w") as out:
        for n in range(1, 400):
            kind = rng.choice(kinds)
            line = steps(n, n)[0]
            if kind == "bad":
                odd = '{"type": ', "[1", "2]", '"x"', json.dumps({**line, "loss": "x"}), "x" * 999
                out.write(rng.choice(odd) + "\n")
                continue
            if kind == "part":
                line["part"] = "actor"
            elif kind == "step" and n % 7 == 0:
                line["loss"] = float("nan")
            elif kind == "step" and n % 90 == 0:
                line = dict(reversed(line.items()))  # in another order
            elif kind != "step":
                line = {"type": kind, "step": n}
            expected.append((line["type"], n, line.get("part", "")))
            out.write(json.dumps(line) + "\n")
        out.write('{"type": "step", "step": 7')
    came, offset = [], 0
    while True:
        new, text = page_module._pack(path, offset)
        message = json.loads(text)
        if new == offset:
            break
        assert new == path.stat().st_size - 26 or message["more"]
        offset, events = new, message["events"]
        came.append(
            [("event", e["type"], e["step"]) for e in events]
            + [
                (part, "step", step)
                for part, columns in message["steps"].items()
                for step, loss in zip(columns["step"], columns["loss"], strict=True)
                if loss is None or math.isfinite(loss)
            ]
        )
    assert offset == path.stat().st_size - 26 and not message["more"]
    flat = [entry for message in came for entry in message]
    for part in ("", "actor"):
        wanted = [n for kind, n, of in expected if (kind, of) == ("step", part)]
        assert [n for of, kind, n in flat if (of, kind) == (part, "step")] == wanted
    events = [(kind, n) for kind, n, _ in expected if kind != "step"]
    assert [(kind, n) for of, kind, n in flat if of == "event"] == events
    order = {n: k for k, (_, n, _) in enumerate(expected)}
    for message in came:  # no step of a message stands before a resume of it
        resumes = [order[n] for _, kind, n in message if kind == "resume"]
        first = [order[n] for _, kind, n in message if kind == "step"]
        assert not resumes or not first or max(resumes) < min(first)
