"""Take the pictures of the live page and of a summary again, from real trainings.

    python docs/pictures/make.py

Trains ``examples/digits`` with several learning rates on two workers, searches over its learning
rate and batch, runs a flow, opens the page in Chromium, and writes the files beside this one. Needs
the extras ``page``, ``examples``, and ``dev``, and Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from ronde.cli.summary import print_summary
from ronde.watch import RunDir, summarise

HERE = Path(__file__).absolute().parent
ROOT = HERE.parent.parent
RATES = ("0.001", "0.003", "0.01", "0.1")
VIEWS = {  # name: width, height, color scheme, what is in the address
    "page": (1280, 1000, "light", "run=digits-3&run=digits-2&run=digits-1&smooth=1"),
    "page-dark": (1280, 1000, "dark", "run=digits-4"),
    "page-phone": (390, 1300, "light", "run=digits-3"),
    "page-search": (1280, 1060, "light", "job=digits-search"),
    "page-flow": (1280, 650, "dark", "job=flow"),
}
SEARCH = "--space lr=log:1e-4..0.3 --space batch=16,32,64 --goal max:accuracy --trials 16"
SEARCH += " --method halving --max 9ep digits/train.py --epochs 9"


def train(folder: Path) -> None:
    """Train, as a person would, and leave this machine's name out of the files."""
    shutil.copytree(ROOT / "examples" / "digits", folder / "digits")
    for number, rate in enumerate(RATES, 1):
        command = [sys.executable, "-m", "ronde", "run", "--workers", "2", "--watch=4"]
        command += ["--name", f"digits-{number}", "digits/train.py", "--lr", rate]
        subprocess.run(command, cwd=folder, check=True)
    ronde = [sys.executable, "-m", "ronde"]
    subprocess.run(
        [*ronde, "tune", "--name", "digits-search", *SEARCH.split()], cwd=folder, check=True
    )
    shutil.copytree(ROOT / "examples" / "flow", folder / "flow")
    subprocess.run(
        [*ronde, "flow", "--runs", str(folder / "runs"), "flow.yaml"],
        cwd=folder / "flow",
        check=True,
    )
    for file in folder.glob("runs/**/*.jsonl"):
        file.write_text(file.read_text().replace(f'"{socket.gethostname()}"', '"node1"'))


def main() -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train(folder)
        os.chdir(folder)  # paths are shown as seen from here
        run = RunDir(Path("runs/digits-3"))
        console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
        print_summary(run, console, summarise(run).seconds or 0.0)
        text = console.export_svg(title="ronde run --workers 2 digits/train.py --lr 0.01")
        text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.S)  # nothing from elsewhere
        (HERE / "summary.svg").write_text(text)
        page = [sys.executable, "-m", "ronde", "watch", "--page"]
        server = subprocess.Popen(page, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[2]
            path = shutil.which("chromium") or shutil.which("google-chrome")
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
                for name, (width, height, scheme, shown) in VIEWS.items():
                    size = {"width": width, "height": height}
                    view = browser.new_page(viewport=size, color_scheme=scheme)
                    view.goto(f"{address}#{shown}")
                    view.wait_for_selector(".uplot")
                    view.wait_for_timeout(2000)
                    if "job=" in shown:
                        view.evaluate("scrollTo(0, document.getElementById('jobs').offsetTop - 20)")
                        view.wait_for_timeout(500)
                    view.screenshot(path=HERE / f"{name}.png")
                    view.screenshot(path=folder / f"{name}-whole.png", full_page=True)
                browser.close()
            if len(sys.argv) > 1:  # where to keep whole pages, to look at them
                for file in folder.glob("*-whole.png"):
                    shutil.copy(file, sys.argv[1])
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(10)
            os.chdir(HERE)


if __name__ == "__main__":
    main()
