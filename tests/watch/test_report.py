"""Reports: well formed, self-contained, escaped, and the answer that the screen shows."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.table import Table

from ronde.cli.answer_screen import answer_line, report_answer
from ronde.cli.scale import answer_parts
from ronde.doctor.doctor_report import losses_chart
from ronde.scale.meter import Start
from ronde.scale.scale_report import speedup_chart
from ronde.scale.scaling import summarize_scale
from ronde.world import RondeError

EVIL = "<script>alert('$x$ & \"y\"')</script>"

DOCTOR = {
    "stages": [
        {"name": "read", "lost_points": 0.2},
        {"name": "decode", "lost_points": 14.1},
        {"name": "copy", "lost_points": 0},
        {"name": EVIL, "lost_points": 1.5},
    ],
    "exchange_points": 4.0,
    "straggler": {"rank": 5, "slower": 1.06, "points": 0.9},
    "neighbour": None,
}


class Strict(HTMLParser):
    """Every tag is closed; nothing is fetched."""

    VOID = ("meta", "br", "use", "path", "line", "rect", "stop")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe", "object"), tag
        for name in ("src", "href", "xlink:href"):
            assert str(values.get(name, "#")).startswith("#"), values
        if "id" in values:
            self.ids.append(values["id"])
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


def report(folder: Path, headline: str, parts, chart: str) -> Path:
    path = folder / "report.html"
    report_answer(path, "ronde doctor", EVIL, headline, parts, [(EVIL, "", chart)])
    return path


def test_a_report_has_the_lines_the_tables_and_the_chart(tmp_path):
    table = Table("  stage", EVIL)
    table.add_row(answer_line(("decode", "bold")), "14")
    table.add_row(EVIL, "[bold]")
    parts = [answer_line("CAUSE  ", ("decode", "red")), answer_line(EVIL), table]
    text, words, [chart] = read(report(tmp_path, "CAUSE  decode", parts, losses_chart(DOCTOR)))
    assert "<script" not in text and words.count("alert('$x$") >= 6
    assert words.count("CAUSE") == 1 and "14" in words and "[bold]" in words
    for part in ("decode 14.1 points", "exchange", "straggler"):
        assert part in chart, part
    assert "copy" not in chart
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_the_scaling_report_has_every_size_and_note(tmp_path):
    starts = {
        n: [
            Start(
                n,
                (s,),
                (r,),
                None,
                {"synthetic": 0.0, "real": 0.0},
                "keep",
                64,
                "replicate",
                1000,
                "cpu",
            )
        ]
        for n, s, r in ((1, 100.0, 95.0), (2, 190.0, 110.0))
    }
    answer = summarize_scale(EVIL, starts, to=4, cores=8.0, per_node=8)
    parts = list(answer_parts(answer, verbose=True))
    path = report(tmp_path, answer.sentence, parts, speedup_chart(answer.to_dict()))
    text, words, [chart] = read(path)
    for part in ("stroke-dasharray", "ideal", "Extrapolated, real: 4: "):
        assert part in chart, part
    assert "<script" not in text and "~4" in words and "device-s" in words
    assert all(" ".join(note.split()) in " ".join(words.split()) for note in answer.notes)


def test_a_chart_without_losses_is_left_out(tmp_path):
    nothing = {"stages": [], "exchange_points": None, "straggler": None, "neighbour": None}
    assert read(report(tmp_path, "healthy", [], losses_chart(nothing)))[2] == []


def test_a_report_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(RondeError, match=r"the report .* cannot be written"):
        report(tmp_path / "absent", "healthy", [], "")


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
