"""Write the raw files of a made-up phone company: customers who stay, and customers who leave."""

import csv
from pathlib import Path

import numpy as np

CITIES = ["Rome", "Oslo", "Zürich", "Lyon", "Porto", "Gdańsk"]


def write(file: Path, first: int, rows: int) -> None:
    draw = np.random.default_rng(first)
    with file.open("w", newline="", encoding="utf-8") as opened:
        out = csv.writer(opened)
        out.writerow(["id", "age", "income", "city", "contract", "opened", "note", "left"])
        for i in range(rows):
            age, income = draw.integers(18, 90), draw.lognormal(10, 0.8)
            city = CITIES[min(draw.geometric(0.35) - 1, 5)]
            contract = draw.choice(["monthly", "yearly"])
            opened_at = np.datetime64("2019-01-01T00:00:00") + draw.integers(0, 1.5e8)
            angry = draw.random() < 0.2
            score = 2.2 * angry + 1.5 * (contract == "monthly") + (income < 15_000) - age / 40 - 0.6
            left = int(draw.random() < 1 / (1 + np.exp(-2 * score)))
            row = [first + i, age, round(income, 2), city, contract, opened_at]
            gaps = draw.random(len(row)) < [0, 0.08, 0.1, 0.03, 0, 0]
            row = ["" if gap else value for gap, value in zip(gaps, row, strict=True)]
            out.writerow([*row, "too expensive, bad service" if angry else "all fine", left])


for number, first in enumerate((0, 3000)):
    write(Path(f"raw-{number}.csv"), first, 3000)
write(Path("test.csv"), 6000, 1500)
