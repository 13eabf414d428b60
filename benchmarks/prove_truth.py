"""How true ``ronde prove`` is: planted faults found and named, sound models blamed; each with n.

    python benchmarks/prove_truth.py [NAME…] [--plans all] [--workers 2]

The scripts are in prove_scripts/; what must be said of each is in cases.py beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "prove_scripts"))

from cases import EVERY, HEALTHY, HERE, NOISY, healthy_command, judge

from ronde.prove.plan_list import chosen_plans
from ronde.prove.process_pool import Pool
from ronde.prove.proof import Study


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only these scripts")
    parser.add_argument("--plans", default="replicate", help="for the sound models: a plan, or all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    faults = [f for f in EVERY if not given.names or f.fault in given.names]
    sound = {name: healthy_command(name) for name in HEALTHY}
    sound |= {name: [str(HERE / script), name] for script, name in NOISY}
    healthy = [h for h in sound if not given.names or h in given.names]
    rows = []
    began = time.monotonic()
    with Pool(given.workers) as pool:
        for case in faults:
            verdict = Study(pool, case.command, given.steps, 120).verdict(case.plans)
            found, named, said = judge(case, verdict)
            rows.append(
                {
                    "fault": case.fault,
                    "found": found,
                    "named": named,
                    "said": said,
                    "expected": case.cause,
                }
            )
            mark = "ok   " if named else "FOUND" if found else "MISS "
            print(f"{mark} {case.fault:22} {verdict.seconds:5.1f} s  {said}", flush=True)
        for name in healthy:
            plans = chosen_plans(
                given.plans if given.plans == "all" else [given.plans], given.workers
            )
            verdict = Study(pool, sound[name], given.steps, 120).verdict(plans, explicit=False)
            blamed = verdict.status == "differs"
            told = ", ".join(f"{p.plan} {p.status} {p.largest:.0e}" for p in verdict.plans)
            why = (
                f"  {verdict.difference}  {verdict.cause.id if verdict.cause else ''}"
                if blamed
                else f"  {verdict.error[:200]}"
            )
            rows.append(
                {"healthy": name, "blamed": blamed, "status": verdict.status, "plans": told}
            )
            print(
                f"{'BLAMED' if blamed else verdict.status:6} {name:22} "
                f"{verdict.seconds:5.1f} s  {told}{why}",
                flush=True,
            )
    n = len(faults)
    print(
        f"faults: {sum(bool(r.get('found')) for r in rows)} of {n} found, "
        f"{sum(bool(r.get('named')) for r in rows)} of {n} named; "
        f"sound models: {sum(bool(r.get('blamed')) for r in rows)} of {len(healthy)} blamed, "
        f"{sum(r.get('status') == 'equal' for r in rows)} equal; {time.monotonic() - began:.0f} s"
    )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
