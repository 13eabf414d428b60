"""The table of docs/recipes.md: recipes, and what ``ronde plan`` chooses for a large one.

    python benchmarks/recipes.py --device H100 --devices 64 [RECIPE…]

Each recipe's sample data is made in a temporary folder. ``large`` of its recipe.yaml gives the
arguments. A recipe without ``large`` has a dash.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from ronde.cli.recipe import built_in, catalogue

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("recipes", nargs="*")
parser.add_argument("--device", default="H100")
parser.add_argument("--devices", type=int, default=64)
args = parser.parse_args()


def chosen_plan(recipe):
    """The first part of the answer, which names the plan."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / recipe.name
        recipe.copy(folder, {})
        for command in recipe.test:
            if command.startswith("python "):
                subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=folder, check=True)
        words = [sys.executable, "-m", "ronde", "plan", "--device", args.device]
        words += ["--devices", str(args.devices), "--json", "plan.json", "--accept-noise"]
        words += [recipe.script, *shlex.split(recipe.large)]
        subprocess.run(words, cwd=folder, check=True, stdout=sys.stderr)
        return json.loads((folder / "plan.json").read_text())["sentence"].partition(":")[0]


if __name__ == "__main__":
    print("| recipe | for | what it is | proved under | large |\n|---|---|---|---|---|")
    for recipe in sorted(catalogue(built_in()).values(), key=lambda r: (r.task, r.name)):
        if args.recipes and recipe.name not in args.recipes:
            continue
        large = "–"
        if recipe.large:
            large = f"`{recipe.large}`: {chosen_plan(recipe)}"
        plans = ", ".join(f"`{plan}`" for plan in recipe.plans) or "–"
        print(
            f"| `{recipe.name}` | {recipe.task} | {recipe.about} | {plans} | {large} |", flush=True
        )
