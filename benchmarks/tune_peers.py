"""Kill the driver of a search once, and start it again as its documentation says: what is lost?

9 trials of at most 9 epochs, rungs after 1, 3, and 9, two at a time, a checkpoint every epoch.
``ronde tune --method halving``; Optuna (SQLite storage with a heartbeat, retries of stale trials,
successive halving) that starts ``torchrun``; Ray Tune's ASHA with ``Tuner.restore``. Each is killed
with signal 9 after a quarter, a half, and three quarters of the steps of its undisturbed search.
Each step that is trained writes a line, so steps trained again are counted, not estimated. It needs
``pip install optuna 'ray[tune]'``::

    python benchmarks/tune_peers.py --json peers.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from ronde.jobs.space import draw_random, read_space

SPACE = ["lr=log:1e-4..1e-1", "hidden=4,16"]
TRIALS, EPOCHS, STEP_SECONDS = 9, 9, 0.01
VALUES = [draw_random(read_space(SPACE), 0, number) for number in range(TRIALS)]
TRAIN = """
import argparse, time, torch, ronde
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--hidden", type=int)
args = parser.parse_args()
torch.manual_seed(0)
x = torch.randn(1200, 8)
y = (x @ torch.randn(8, 1)).sin()
layers = torch.nn.Linear(8, args.hidden), torch.nn.Tanh(), torch.nn.Linear(args.hidden, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
train, test = (torch.utils.data.TensorDataset(x[s], y[s]) for s in (slice(1000), slice(1000, None)))
loss = torch.nn.functional.mse_loss
run = ronde.distribute(model, optimizer, train, loss=loss, batch_size=10, save_every=100)
for _ in run.epochs(EPOCHS):
    for batch in run.batches():
        with open(f"steps-{args.lr}-{args.hidden}.txt", "a") as steps:
            print(run.state.step, file=steps)
        run.step(batch)
        time.sleep(STEP_SECONDS)
    run.evaluate(test)
"""


def train(
    values: dict[str, Any], folder: Path, checkpoint: Path, tell: Callable[[int, float], None]
) -> None:
    """The same training without Ronde, from the checkpoint if there is one."""
    torch.manual_seed(0)
    x = torch.randn(1200, 8)
    y = (x @ torch.randn(8, 1)).sin()
    layers = torch.nn.Linear(8, values["hidden"]), torch.nn.Tanh()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(values["hidden"], 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=values["lr"], momentum=0.9)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    steps = folder / f"steps-{values['lr']}-{values['hidden']}.txt"
    for epoch in range(first, EPOCHS):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(epoch))
        for place, batch in enumerate(order.split(10)):
            with open(steps, "a") as file:
                print(epoch * 100 + place, file=file)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
            time.sleep(STEP_SECONDS)
        with torch.no_grad():
            value = float(torch.nn.functional.mse_loss(model(x[1000:]), y[1000:]))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, checkpoint.with_suffix(f".{os.getpid()}"))
        checkpoint.with_suffix(f".{os.getpid()}").replace(checkpoint)
        tell(epoch, value)


def optuna_driver(folder: Path) -> dict[str, Any]:
    """As ``pytorch_checkpoint.py`` of Optuna's examples, the training in a process of torchrun."""
    import optuna
    from optuna.storages import RetryHeartbeatStaleTrialCallback
    from optuna.trial import TrialState

    def objective(trial: optuna.Trial) -> float:
        values = {
            "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            "hidden": trial.suggest_categorical("hidden", [4, 16]),
        }
        frozen = trial.study.trials[trial.number]  # Optuna 5 asks for this one
        retried = RetryHeartbeatStaleTrialCallback.retried_trial_number(frozen)
        number = trial.number if retried is None else retried
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", __file__]
        words += ["--folder", str(folder), "--trial", str(number), json.dumps(values)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            value = float("inf")
            for line in process.stdout or ():
                epoch, value = int(line.split()[0]), float(line.split()[1])
                trial.report(value, epoch + 1)
                if trial.should_prune():
                    process.terminate()
                    raise optuna.TrialPruned
        return value

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{folder}/study.db",
        heartbeat_interval=5,
        grace_period=15,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
    )
    begins = not (folder / "asked").exists()
    study = optuna.create_study(
        storage=storage,
        study_name="s",
        load_if_exists=True,
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )
    if begins:
        for values in VALUES:
            study.enqueue_trial(values)
        (folder / "asked").touch()
    done = (TrialState.COMPLETE, TrialState.PRUNED)
    limit = optuna.study.MaxTrialsCallback(TRIALS, states=done)
    study.optimize(objective, n_jobs=2, callbacks=[limit])
    return dict(study.best_params)


def ray_driver(folder: Path) -> dict[str, Any]:
    """As its guide on fault tolerance: restore where there is something to restore."""
    import ray
    from ray import tune

    def trainable(config: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as name:
            if before := tune.get_checkpoint():
                before.to_directory(name)

            def tell(epoch: int, value: float) -> None:
                tune.report({"loss": value}, checkpoint=tune.Checkpoint.from_directory(name))

            train(config["values"], folder, Path(name) / "state.pt", tell)

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder / "r"),
        _node_ip_address="127.0.0.1",
    )
    if tune.Tuner.can_restore(str(folder / "results" / "s")):
        path = str(folder / "results" / "s")
        tuner = tune.Tuner.restore(path, trainable, resume_errored=True)
    else:
        scheduler = tune.schedulers.ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)
        tuner = tune.Tuner(
            trainable,
            param_space={"values": tune.grid_search(VALUES)},
            tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
            run_config=tune.RunConfig(name="s", storage_path=str(folder / "results"), verbose=0),
        )
    config: dict[str, Any] = tuner.fit().get_best_result().config or {}
    return dict(config["values"])


def ronde_words(folder: Path) -> list[str]:
    """Begin, or go on."""
    ronde = [sys.executable, "-m", "ronde", "tune", "--quiet", "--devices", "2", "--fixed-workers"]
    if (folder / "runs" / "s" / "tune.json").exists():
        return [*ronde, "--resume", "s"]
    text = TRAIN.replace("STEP_SECONDS", str(STEP_SECONDS)).replace("EPOCHS", str(EPOCHS))
    (folder / "train.py").write_text(text)
    spaces = [word for text in SPACE for word in ("--space", text)]
    words = [*ronde, *spaces, "--goal", "min:loss", "--trials", str(TRIALS), "--method", "halving"]
    return [*words, "--max", "9000", "--min", "1000", "--name", "s", "train.py"]


def steps_of(folder: Path) -> list[list[str]]:
    return [path.read_text().split() for path in folder.glob("steps-*.txt")]


def search(tool: str, kill_at: int | None) -> dict[str, Any]:
    """One search; its driver is killed after so many steps, if any."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        folder, killed = Path(name), False
        own = [sys.executable, __file__, "--folder", name, "--driver", tool]
        try:
            while True:
                words = ronde_words(folder) if tool == "ronde" else own
                with open(folder / "log", "ab") as log:
                    process = subprocess.Popen(
                        words, cwd=folder, stdout=log, stderr=log, start_new_session=True
                    )
                while process.poll() is None:
                    time.sleep(0.02)
                    trained = sum(map(len, steps_of(folder)))
                    if kill_at is not None and not killed and trained >= kill_at:
                        process.kill()
                        killed = True
                if process.returncode != -9:
                    break
            if process.returncode:
                return {"error": (folder / "log").read_text()[-600:]}
            if tool == "ronde":
                result = json.loads((folder / "runs" / "s" / "result.json").read_text())
                best = result["best"]["values"]
            else:
                best = json.loads((folder / "best.json").read_text())
        finally:
            end_all(name)
        steps = steps_of(folder)
        return {
            "best": best,
            "killed": killed,
            "trials": len(steps),
            "steps": sum(map(len, steps)),
            "again": sum(len(each) - len(set(each)) for each in steps),
        }


def end_all(folder: str) -> None:
    """Nothing that a search has started stays, orphans of a killed driver included."""
    for process in psutil.process_iter():
        try:
            if folder in " ".join([*process.cmdline(), process.cwd()]):
                process.kill()
                process.wait(10)
        except psutil.Error:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=["ronde", "optuna", "ray"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    parser.add_argument("--trial", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.trial:
        number, values = asked.trial
        checkpoint = asked.folder / f"{number}.pt"
        train(json.loads(values), asked.folder, checkpoint, lambda *told: print(*told, flush=True))
        return
    if asked.driver:
        best = {"optuna": optuna_driver, "ray": ray_driver}[asked.driver](asked.folder)
        (asked.folder / "best.json").write_text(json.dumps(best))
        return
    answer: dict[str, Any] = {}
    for tool in asked.tools:
        whole = search(tool, None)
        answer[tool] = {"undisturbed": whole}
        for share in asked.shares:
            found = search(tool, round(share * whole["steps"]))
            found["same best"] = found.get("best") == whole["best"]
            answer[tool][f"killed at {share:.0%}"] = found
            print(tool, f"{share:.0%}", json.dumps(found), flush=True)
    print(json.dumps(answer, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
