"""The table of docs/recipes.md: recipes, and what ``ronde plan`` chooses for a large one.

    python benchmarks/recipes.py [--device H100 --devices 64 RECIPE…]

A recipe is planned by the commands of its recipe.yaml under ``large``, in a temporary folder;
without --device nothing is planned.
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
parser.add_argument("--device")
parser.add_argument("--devices", type=int, default=64)
args = parser.parse_args()


def plan(recipe):
    """The best plan, its step, and its speed-up."""
    options = ["--device", args.device, "--devices", str(args.devices), "--json", "plan.json"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / recipe.name
        recipe.copy(folder, {})
        for command in recipe.large:
            words = shlex.split(command)
            if words[:2] == ["ronde", "plan"]:
                words[2:2] = options
            words = ["-m", *words] if words[0] == "ronde" else words[1:]
            subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=sys.stderr)
        best = json.loads((folder / "plan.json").read_text())["plans"][0]
        step = f"{1000 * best['step_seconds']:,.0f} ms"
        return f"`{best['spec']}`: ≈ {step} a step, {best['speedup']:.1f} × one device"


if __name__ == "__main__":
    chosen = {
        name: recipe
        for name, recipe in catalogue(built_in()).items()
        if not args.recipes or name in args.recipes
    }
    print("| recipe | for | what it is | proved under |\n|---|---|---|---|")
    for recipe in sorted(chosen.values(), key=lambda r: (r.task, r.name)):
        plans = ", ".join(f"`{plan}`" for plan in recipe.plans) or "–"
        print(f"| `{recipe.name}` | {recipe.task} | {recipe.about} | {plans} |")
    if args.device:
        print(f"\n| recipe | large | on {args.devices} {args.device} |\n|---|---|---|")
        for name, recipe in sorted(chosen.items()):
            if recipe.large:
                words = recipe.large[-1].removeprefix("ronde plan ")
                print(f"| `{name}` | `{words}` | {plan(recipe)} |", flush=True)
