"""Reports: well formed, self-contained, escaped, and made of whatever values there are."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ronde.doctor.doctor_report import doctor_report
from ronde.scale.scale_report import scale_report
from ronde.world import RondeError

EVIL = "<script>alert('$x$ & \"y\"')</script>"

DOCTOR = {
    "script": "train.py",
    "workers": 8,
    "device": "NVIDIA H200",
    "samples_per_second": {"synthetic": 10480, "real": 7940, "alone": 11000},
    "gap": 0.242,
    "gap_low": 0.23,
    "gap_high": 0.254,
    "healthy": False,
    "refused": None,
    "cause": {"stage": "decode", "points": 14.1},
    "stages": [
        {
            "name": "read",
            "capacity_samples_per_second": 21900,
            "cpu_ms_per_sample": 0.08,
            "lost_points": 0.2,
            "low": 0,
            "high": 0.6,
            "note": "",
        },
        {
            "name": "decode",
            "capacity_samples_per_second": 7900,
            "cpu_ms_per_sample": 1.36,
            "lost_points": 14.1,
            "low": 12,
            "high": 16,
            "note": EVIL,
        },
        {
            "name": "copy",
            "capacity_samples_per_second": None,
            "cpu_ms_per_sample": None,
            "lost_points": 0,
            "low": None,
            "high": None,
            "note": None,
        },
    ],
    "exchange_points": 4.0,
    "straggler": {"rank": 5, "slower": 1.06, "points": 0.9},
    "neighbour": {"slowdown": 0.031, "points": 4.0, "cause": "threads"},
    "startup_seconds": 2.3,
    "scale": [
        {"devices": 8, "nodes": 1, "gap": 0.24, "low": 0.22, "high": 0.27, "wall": "decode"},
        {"devices": 16, "nodes": 2, "gap": 0.24, "low": 0.22, "high": 0.29, "wall": "decode"},
        {"devices": 32, "nodes": 4, "gap": 0.42, "low": 0.38, "high": 0.45, "wall": "read"},
    ],
    "walls": [{"stage": "decode", "devices": 6}, {"stage": "read", "devices": 18}],
    "prescriptions": [
        {
            "number": 1,
            "id": "decoder",
            "text": "decode with simplejpeg",
            "settings": {"decoder": "simplejpeg"},
            "label": "same distribution",
            "gap_here": 0.09,
            "gap_largest": 0.42,
            "gain_here_points": 15,
        },
        {
            "number": 2,
            "id": "script-loop",
            "text": EVIL,
            "settings": None,
            "label": "same bits",
            "gap_here": 0.0,
            "gap_largest": 0.1,
            "gain_here_points": 3,
        },
    ],
    "notes": [EVIL],
}

ROW = {
    "workers": 1,
    "batch_per_worker": 64,
    "synthetic": 100.0,
    "real": 95.0,
    "synthetic_low": 99,
    "synthetic_high": 101,
    "real_low": 94,
    "real_high": 96,
    "gap": 0.05,
    "speedup_synthetic": 1.0,
    "speedup_real": 1.0,
    "efficiency_synthetic": 1.0,
    "efficiency_real": 1.0,
    "epoch_seconds": 12.0,
    "cost_per_epoch_device_seconds": 12.0,
    "cost_per_epoch": None,
}
FIT = {
    "contention": 0.1,
    "coherency": 0.0,
    "low": {"contention": 0.05, "coherency": 0.0},
    "high": {"contention": 0.2, "coherency": 0.01},
    "peak": None,
    "relative_error": 0.05,
    "error_assumed": True,
    "degrees_of_freedom": 10**6,
}
SCALE = {
    "script": EVIL,
    "rows": [
        ROW,
        {
            **ROW,
            "workers": 2,
            "synthetic": 190.0,
            "real": 110.0,
            "gap": 0.42,
            "speedup_synthetic": 1.9,
            "speedup_real": 1.16,
            "efficiency_synthetic": 0.95,
            "efficiency_real": 0.58,
        },
    ],
    "fits": {"synthetic": {"amdahl": FIT}, "real": {"amdahl": FIT, "usl": {**FIT, "peak": 12.0}}},
    "laws": {"synthetic": "amdahl", "real": "amdahl"},
    "extrapolated": [
        {
            "workers": 4,
            "synthetic": 340.0,
            "synthetic_low": 300.0,
            "synthetic_high": 380.0,
            "real": 115.0,
            "low": 90.0,
            "high": 140.0,
            "gap": 0.66,
            "efficiency_real": 0.3,
            "epoch_seconds": 10.0,
            "cost_per_epoch": None,
        }
    ],
    "wall": {"stage": "read", "devices": 3, "limit": "storage"},
    "stop_at": 1,
    "sentence": "Stop at 1.",
    "notes": [EVIL],
}


class Strict(HTMLParser):
    """Every tag is closed; nothing is fetched."""

    VOID = ("meta", "br", "use", "path", "line", "rect", "stop")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe", "object"), tag
        for name in ("src", "href", "xlink:href"):
            assert str(found.get(name, "#")).startswith("#"), found
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        if "id" in dict(attrs):
            self.ids.append(dict(attrs)["id"])

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(path):
    text = path.read_text()
    parser = Strict()
    parser.feed(text)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids)), "an id occurs twice"
    assert not re.search(r"https?://", text.replace("http://www.w3.org/", ""))
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    for drawing in drawings:
        root = ElementTree.fromstring(drawing.replace("xlink:href", "href"))
        assert root.get("role") == "img" and "width" not in root.attrib and root.get("viewBox")
        named = {e.get("id"): e.text for e in root.iter() if e.tag in ("title", "desc")}
        assert all(named[i] for i in root.get("aria-labelledby").split())
        for reference in re.findall(r'(?:url\(|href=")#([^")]+)', drawing):
            assert f'id="{reference}"' in drawing, reference
        assert re.search(r"<text[ >]", drawing)  # words are words, not outlines
        assert "var(--" in drawing and not re.search(r"#0[1-6]0[1-6]0[1-6]", drawing)
    return text, " ".join(parser.words), drawings


def test_the_doctors_report(tmp_path):
    doctor_report(DOCTOR, tmp_path / "report.html")
    text, words, drawings = read(tmp_path / "report.html")
    assert len(drawings) == 2
    assert "idle for 24% of what they could do, 14 points of it in decode" in words
    assert "<script" not in text and "alert('$x$" in words
    losses, curve = drawings
    for part in ("decode", "14", "noisy neighbour", "exchange", "straggler"):
        assert part in losses, part
    for part in ("decode wall at 6", "read wall at 18", "32 devices: 42%"):
        assert part in curve, part
    for part in (
        "same distribution",
        "same bits",
        "decoder: simplejpeg",
        "gap at 32",
        "gap at 8",
        "ronde doctor --apply 1 train.py",
    ):
        assert part in words, part
    assert (
        "prefers-color-scheme: dark" in text
        and "@media print" in text
        and 'name="viewport"' in text
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"healthy": True, "gap": 0.012, "prescriptions": [], "walls": []},
            "Healthy: input costs 1%",
        ),
        (
            {"refused": "two runs of the same differ by 9 points"},
            "No verdict: two runs of the same differ by 9 points",
        ),
        (
            {
                "scale": [],
                "walls": [],
                "neighbour": None,
                "straggler": None,
                "exchange_points": None,
            },
            "idle for 24%",
        ),
        ({"stages": [], "samples_per_second": {"synthetic": 100.0, "real": 90.0}}, "idle for 24%"),
        (
            {"cause": {"stage": "neighbour", "points": 20.0}},
            "20 points of it in neighbour",
        ),
        (
            {"cause": {"stage": "exchange", "points": 30.0, "of": "ideal"}},
            "30 points are lost to exchange; the input costs 24%",
        ),
        (
            {"cause": {"stage": "straggler", "points": 9.0, "rank": 2, "within": "read"}},
            "9.0 points of it in straggler, rank 2",
        ),
        (
            {
                "scale": [
                    {"devices": 2, "nodes": 1, "gap": 0.1, "low": 0.1, "high": 0.2, "wall": None}
                ]
            },
            "idle for 24%",
        ),
    ],
)
def test_whatever_was_found_can_be_shown(tmp_path, changed, told):
    doctor_report({**copy.deepcopy(DOCTOR), **changed}, tmp_path / "report.html")
    _, words, _ = read(tmp_path / "report.html")
    assert told in words


def test_the_scaling_report_sets_what_is_extrapolated_apart(tmp_path):
    scale_report(SCALE, tmp_path / "report.html")
    text, words, drawings = read(tmp_path / "report.html")
    assert len(drawings) == 1 and "Stop at 1." in words and "<script" not in text
    (speedup,) = drawings
    for part in ("stroke-dasharray", "ideal", "Extrapolated, real: 4: 1.2"):
        assert part in speedup, part
    assert "~4" in words and "90 to 140" in words and "extrapolated, not measured" in words
    assert "5.0%, assumed" in words and "read (storage) is met at 3 workers" in words


def test_names_from_the_script_are_escaped_wherever_they_stand(tmp_path):
    values = copy.deepcopy(DOCTOR)
    values.update(
        script=EVIL,
        device=EVIL,
        cause={"stage": EVIL, "points": 1.0},
    )
    values["stages"][1]["name"] = values["walls"][0]["stage"] = EVIL
    values["prescriptions"][0].update(settings={EVIL: EVIL}, label=EVIL, number=EVIL)
    doctor_report(values, tmp_path / "doctor.html")
    wall = {"stage": EVIL, "devices": 4, "limit": EVIL}
    laws = {EVIL: {EVIL: {**FIT, "error_assumed": False, "degrees_of_freedom": EVIL}}}
    scale_report({**SCALE, "wall": wall, "fits": laws, "sentence": EVIL}, tmp_path / "scale.html")
    for name in ("doctor", "scale"):
        text, words, _ = read(tmp_path / f"{name}.html")
        assert "<script" not in text and words.count("alert(") >= 8


def test_a_report_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(RondeError, match="cannot be written"):
        scale_report(SCALE, tmp_path / "absent" / "report.html")


def test_without_matplotlib_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from ronde.watch.html import check_drawing\n"
        "from ronde.world import ArgumentError\n"
        "try:\n    check_drawing()\nexcept ArgumentError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert "pip install '.[report]' in a clone of Ronde" in done.stdout, done.stderr
