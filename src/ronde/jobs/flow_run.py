"""Run a flow: each step once its needs are done, on the ledger, so that its effect is committed
once, whoever is killed or started twice.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ronde.jobs.child_process import end_child, has_ended, how_ended, last_line, start_child
from ronde.jobs.flow import Flow, FlowStep, fill
from ronde.jobs.ledger import JobLedger, Lease, LeaseLost
from ronde.watch import RunDir, summarise
from ronde.watch.record import Ended, read
from ronde.world import RondeError
from ronde.world.whole_file import write_whole

__all__ = ["FlowResult", "FlowRun", "content_digest"]

_WAIT_SECONDS = 10.0, 600.0  # before a step is tried again: doubled each time, at most


@dataclass(frozen=True)
class FlowResult:
    """How a flow ended.

    Attributes:
        steps: by name: ``state`` (``done``, ``kept``, ``skipped``, ``failed``, ``not run``),
            ``seconds``, ``tries``, ``values``, and ``why``.
    """

    steps: Mapping[str, Mapping[str, Any]]

    @property
    def is_good(self) -> bool:
        """Whether all steps are done, kept, or left out on purpose."""
        return all(step["state"] in ("done", "kept", "skipped") for step in self.steps.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class _Busy:
    thread: threading.Thread
    outcome: dict[str, Any]


class _Stopped(Exception):
    """The flow was asked to leave."""


class FlowRun:
    """A flow in its folder.

    Args:
        flow: the steps.
        folder: where it keeps what it knows: the ledger, logs, and run directories.
        parallel: how many steps run at once.
        only: run this step alone, on what there is.
        anew: run this step and all after it, whether anything has changed or not.
        tell: called with a line about each change.
        wait: seconds before the first new try.
        patience: seconds after which another process that runs a step is taken for lost.
    """

    def __init__(
        self,
        flow: Flow,
        folder: Path,
        *,
        parallel: int = 4,
        only: str = "",
        anew: str = "",
        tell: Callable[[str], None] = lambda text: None,
        wait: float = _WAIT_SECONDS[0],
        patience: float = 10.0,
    ) -> None:
        self.flow, self.folder, self.tell = flow, folder, tell
        self._parallel, self._only, self._wait = parallel, only, wait
        self._anew = {anew} | flow.after(anew) if anew else set()
        self._ledger = JobLedger(folder / "ledger", patience)
        self._states: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, str] = {}
        self._parts: dict[str, dict[str, str]] = {}
        self._busy: dict[str, _Busy] = {}
        self._reasons: dict[str, str] = {}
        self._tries: dict[str, int] = {}
        self._shown = ""
        self._stop = threading.Event()

    def stop(self, *_: object) -> None:
        """Let the steps leave: for a signal."""
        self._stop.set()

    def run(self) -> FlowResult:
        """Run all steps that can be run."""
        names = [self._only] if self._only else self.flow.order()
        if self._only:
            self._recall(self.flow.before(self._only))
        while not self._stop.is_set() and any(name not in self._states for name in names):
            for name in names:
                if name not in self._states and name not in self._busy:
                    self._consider(name)
            self._collect()
            self._show()
            time.sleep(0.1)
        for busy in self._busy.values():
            busy.thread.join()
        self._collect()
        for name in names:
            self._states.setdefault(name, {"state": "not run", "why": "stopped"})
        self._show()
        return FlowResult({name: self._states[name] for name in names})

    def why(self, name: str) -> list[str]:
        """What has changed for a step since it was last done; empty if nothing has.

        Raises:
            RondeError: a step before it has no result yet.
        """
        self._recall(self.flow.before(name))
        return self._changes(name, self._parts_of(self.flow.steps[name]))

    def _changes(
        self, name: str, now: Mapping[str, str], lost: Sequence[str] | None = None
    ) -> list[str]:
        file = self._step_folder(name) / "done.json"
        if not file.is_file():
            return ["it was never done"]
        done = json.loads(file.read_text())
        if "skipped" in done:
            return [f"it was skipped: {done['skipped']}"]
        then = done["parts"]
        changes = [f"{part} is new" for part in now if part not in then]
        changes += [f"{part} is gone" for part in then if part not in now]
        changes += [
            f"{part} has changed" for part in now if part in then and then[part] != now[part]
        ]
        lost = self._lost_outputs(name) if lost is None else lost
        return changes + [f"{output}, which it makes, is gone or has changed" for output in lost]

    def _show(self) -> None:
        """Keep ``flow.json`` as the flow is now, for those who look at it from outside."""
        steps = {}
        for name, step in self.flow.steps.items():
            idle = "waiting" if self._only in ("", name) else "not run"
            known = {k: v for k, v in self._states.get(name, {}).items() if k in ("state", "why")}
            steps[name] = {
                "state": "running" if name in self._busy else idle,
                **known,
                "run": step.run,
                "needs": step.needs,
                "key": self._keys.get(name, ""),
                "reason": self._reasons.get(name, ""),
                "tries": self._tries.get(name, 0),
            }
        text = json.dumps(steps)
        if text != self._shown:
            self._shown = text
            with contextlib.suppress(OSError):  # what is shown ends no flow
                self.folder.mkdir(parents=True, exist_ok=True)
                _write(self.folder / "flow.json", {"steps": steps})

    def _recall(self, names: set[str]) -> None:
        for name in (n for n in self.flow.order() if n in names):
            file = self._step_folder(name) / "done.json"
            if not file.is_file():
                raise RondeError(f"{name}, which comes before, has no result yet: run the flow.")
            done = json.loads(file.read_text())
            if "skipped" in done:
                self._states[name] = {"state": "skipped", "why": done["skipped"]}
                continue
            self._keys[name] = done["key"]
            self._states[name] = {"state": "kept", "values": done["values"]}

    def _step_folder(self, name: str) -> Path:
        return self.folder / "steps" / name

    def _consider(self, name: str) -> None:
        """Start a step if it can be, or say why it will not."""
        step = self.flow.steps[name]
        for need in step.needs:
            state = self._states.get(need, {}).get("state")
            if state is None:
                return
            if state in ("failed", "not run"):
                self._set(name, "not run", why=f"{need} {state}")
                return
            if state == "skipped" and need not in step.optional:
                self._set(name, "skipped", why=f"{need} was skipped")
                return
        for condition in step.when:
            value = self._value(condition.step, condition.key)
            if not condition.holds(value):
                text = f"{condition.step}.{condition.key} is {value}"
                self._set(
                    name, "skipped", why=f"{text}, not {condition.operator} {condition.number:g}"
                )
                return
        if len(self._busy) < self._parallel:
            try:
                self._begin(step)
            except (RondeError, OSError) as error:
                self._set(name, "failed", why=str(error))

    def _begin(self, step: FlowStep) -> None:
        """Keep what is there, or claim the step and run it."""
        name = step.name
        if name not in self._keys:
            self._parts[name] = self._parts_of(step)
            text = json.dumps(self._parts[name], sort_keys=True)
            self._keys[name] = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        key = self._keys[name]
        elsewhere = functools.partial(self._is_elsewhere, name, key)
        if elsewhere():
            return
        anew, lost = name in self._anew, []
        if self._ledger.is_committed(key):
            info = self._ledger.info(key)
            lost = [] if anew else self._lost_outputs(name, info)
            if not anew and not lost:
                _write(self._step_folder(name) / "done.json", info)
                self._set(name, "kept", values=info["values"])
                return
            self._ledger.forget(key)
        self._anew.discard(name)
        self._ledger.add([] if self._ledger.is_known(key) else [key])
        lease = self._ledger.claim(only=key)
        if lease is None:  # another `ronde flow` is at it
            return
        if anew or (lost and step.each):  # what is there is done: --resume would do nothing
            shutil.rmtree(self._step_folder(name) / key, ignore_errors=True)
        if elsewhere():  # both have begun at once: whoever comes first the next time
            self._ledger.give_back(lease)
            return
        reasons = ["--from"] if anew else self._changes(name, self._parts[name], lost)
        self._reasons[name] = "; ".join(reasons)
        outcome: dict[str, Any] = {}
        thread = threading.Thread(target=self._work, args=(step, lease, outcome))
        self._busy[name] = _Busy(thread, outcome)
        self.tell(f" {name:<12} runs      {self._filled(step.run)}")
        thread.start()

    def _is_elsewhere(self, name: str, key: str) -> bool:
        """Whether another `ronde flow` runs this step from other values or inputs: what it prints
        and makes goes into the same files.
        """
        return self._ledger.is_under_way(lambda k: k != key and k.rpartition("-")[0] == name)

    def _collect(self) -> None:
        for name, busy in list(self._busy.items()):
            if not busy.thread.is_alive():
                del self._busy[name]
                if busy.outcome:
                    self._set(name, **busy.outcome)

    def _set(self, name: str, state: str, **more: Any) -> None:
        self._states[name] = {"state": state, **more}
        if state == "skipped":
            self._step_folder(name).mkdir(parents=True, exist_ok=True)
            _write(self._step_folder(name) / "done.json", {"skipped": more["why"]})
        took = f"{more['seconds']:.1f} s" if "seconds" in more else ""
        self.tell(f" {name:<12} {state:<9} {took}{more.get('why', '')}".rstrip())

    def _value(self, name: str, key: str) -> Any:
        value: Any = self._states[name].get("values", {})
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _filled(self, text: str, out: str = "{out}") -> str:
        def look_up(name: str, key: str) -> Any:
            if not key:
                return out if name == "out" else self.flow.values[name]
            value = self._value(name, key)
            if value is None:
                raise RondeError(f"{{{name}.{key}}} has no value: {name} gave {self._names(name)}.")
            return value

        return fill(text, look_up)

    def _names(self, name: str) -> str:
        return ", ".join(self._states[name].get("values", {})) or "none"

    def _parts_of(self, step: FlowStep) -> dict[str, str]:
        """What decides whether a step is run again."""
        parts = {"the command": self._filled(step.run), "on": json.dumps(step.on, sort_keys=True)}
        for pattern in [*step.inputs, *([step.each] if step.each else [])]:
            paths = sorted(glob.glob(self._filled(pattern), recursive=True))  # noqa: PTH207
            if not paths:
                raise RondeError(f"its input {pattern} is not there")
            for path in paths:
                parts[path] = content_digest(Path(path))
        for need in step.needs:
            if need in self._keys:
                parts[f"the step {need}"] = self._keys[need]
        for name, value in step.env.items():
            parts[f"${name}"] = self._filled(value)
        return parts

    def _lost_outputs(self, name: str, info: Mapping[str, Any] | None = None) -> list[str]:
        if info is None:
            info = json.loads((self._step_folder(name) / "done.json").read_text())
        return [
            path
            for path, digest in info["outputs"].items()
            if not Path(path).exists() or content_digest(Path(path)) != digest
        ]

    def _work(self, step: FlowStep, lease: Lease, outcome: dict[str, Any]) -> None:
        """Run a step until it is done, is given up, or is another's; in a thread of its own."""
        began, tries = time.monotonic(), 0
        try:
            while True:
                tries += 1
                self._tries[step.name] = tries
                status, why = self._try(step, lease, tries)
                if not status:
                    break
                # 75: it was asked to leave, and saved; above 128: a shell's word for a signal
                lost = status < 0 or status == os.EX_TEMPFAIL or status > 128
                lost = lost or (status == 1 and self._lost_run(step, lease.key))
                # wrong arguments, status 2, are so the next time too
                again = status != 2 and (lost or step.retry == "any")
                if not again or tries > step.retries:
                    self._ledger.give_back(lease)
                    log = self._step_folder(step.name) / "log.txt"
                    reason = f"{why}: {last_line(log) or 'it said nothing'} ({log})"
                    outcome |= {"state": "failed", "why": reason, "tries": tries}
                    return
                self.tell(f" {step.name:<12} try {tries + 1:<5} {why}")
                self._pause(lease, min(self._wait * 2 ** min(tries - 1, 20), _WAIT_SECONDS[1]))
            values = self._values_of(step)
            outputs = {}
            for output in map(self._filled, step.outputs):
                if not Path(output).exists():
                    self._ledger.give_back(lease)
                    outcome |= {"state": "failed", "why": f"it made no {output}", "tries": tries}
                    return
                with self._ledger.alive(lease):  # of many gigabytes, it takes minutes
                    outputs[output] = content_digest(Path(output))
            seconds = round(time.monotonic() - began, 3)
            key = lease.key
            info = {
                "key": key,
                "values": values,
                "outputs": outputs,
                "parts": self._parts[step.name],
            }
            if self._ledger.commit(lease, {**info, "seconds": seconds, "tries": tries}):
                _write(self._step_folder(step.name) / "done.json", info)
                outcome |= {"state": "done", "seconds": seconds, "tries": tries, "values": values}
        except LeaseLost:
            pass  # another `ronde flow` has it: looked at again
        except _Stopped:
            self._ledger.give_back(lease)
            outcome |= {"state": "not run", "why": "stopped", "tries": tries}
        except Exception as error:  # a thread's traceback would be nobody's
            self._ledger.give_back(lease)
            kind = "" if isinstance(error, RondeError) else f"{type(error).__name__}: "
            outcome |= {"state": "failed", "why": f"{kind}{error}"}

    def _lost_run(self, step: FlowStep, key: str) -> bool:
        """Whether a training ended with its host, or by a signal to a worker: its record knows."""
        record = self._step_folder(step.name) / key / "run" / "record.jsonl"
        if step.verb != "run" or not record.is_file():
            return False
        ends = [event for event in read(record) if isinstance(event, Ended)]
        if not ends:
            return False
        error = str(ends[-1].error)
        lost = ends[-1].rank is None and error.startswith("host ") and " is lost" in error
        return lost or error.startswith("killed by signal")

    def _pause(self, lease: Lease, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop.wait(min(1.0, seconds)):
                raise _Stopped
            self._ledger.beat(lease)

    def _try(self, step: FlowStep, lease: Lease, tries: int) -> tuple[int, str]:
        """Run the command once: its status, and what happened."""
        folder = self._step_folder(step.name)
        folder.mkdir(parents=True, exist_ok=True)
        words = self._words(step, lease.key)
        environment = {**os.environ, **{k: self._filled(v) for k, v in step.env.items()}}
        # python and ronde are those that run the flow, in a virtual environment that is not active
        here = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join([here, environment.get("PATH", os.defpath)])
        answer = folder / "answer.txt"  # apart from the log: values are read from it
        with (
            open(folder / "log.txt", "ab" if tries > 1 else "wb") as log,
            open(answer, "wb") as out,
        ):
            process = start_child(
                [shutil.which(words[0], path=environment["PATH"]) or words[0], *words[1:]],
                environment,
                at_end=signal.SIGTERM,
                stdout=out,
                stderr=log,
            )
        began, asked = time.monotonic(), 0.0
        try:
            while not has_ended(process, 0.5):
                late = step.time is not None and time.monotonic() - began > step.time
                if (late or self._stop.is_set()) and not asked:
                    asked = time.monotonic()
                    process.terminate()
                if asked and time.monotonic() - asked > 30:  # it saves, if it can
                    os.killpg(process.pid, signal.SIGKILL)
                self._ledger.beat(lease)
        except BaseException:
            end_child(process)
            raise
        if process.returncode:
            end_child(process)  # a shell leaves without what it has started
        with open(folder / "log.txt", "ab") as log:
            log.write(answer.read_bytes())
        if self._stop.is_set() and process.returncode:
            raise _Stopped
        status = process.returncode
        if asked and status:
            return -signal.SIGKILL, f"it took longer than {step.time:g} s"
        return status, how_ended(status)

    def _words(self, step: FlowStep, key: str) -> list[str]:
        """The command, with what ``on``, ``time`` and ``each`` add to it."""
        folder = self._step_folder(step.name)
        # a value is one word, whatever is in it
        words = [self._filled(word, str(folder)) for word in shlex.split(step.run)]
        on = dict(step.on)
        if step.each:
            given = ["--items", self._filled(step.each), "--out", str(folder / key)]
            if (folder / key / ".map").exists():
                given = ["--resume", str(folder / key)]
                words = []
            more = ["--workers", str(on["workers"])] if "workers" in on else []
            words = ["ronde", "map", "--json", *given, *more, *(["--", *words] if words else [])]
        elif step.verb in ("run", "tune") and not {"--name", "--runs"} & set(words):
            begun = any((folder / key / "run").glob("checkpoints/step-*"))
            begun = begun or (folder / key / "run" / "trials.jsonl").exists()
            own = ["--runs", str(folder / key)]
            if step.verb == "run":
                own += ["--name", "run", *(["--resume"] if begun else [])]
                own += ["--time-limit", f"{step.time:g}s"] if step.time else []
                if not begun:  # killed before its first checkpoint: its name is taken
                    shutil.rmtree(folder / key, ignore_errors=True)
            elif begun:
                words, own = words[:2], ["--runs", str(folder / key), "--resume", "run"]
            else:
                own += ["--name", "run"]
            words[2:2] = [*own, *(["--json"] if step.verb == "tune" else [])]
        for option in ("workers", "hosts"):
            if option in on and not step.each:
                words[2:2] = [f"--{option}", str(on[option])]
        if "slurm" in on and step.verb in ("run", "map"):
            words[2:2] = ["--slurm"]
        if "slurm" in on:  # it waits for the allocation, and gives it back
            words = [
                "salloc",
                *(f"--{name}={value}" for name, value in on["slurm"].items()),
                *words,
            ]
        return words

    def _values_of(self, step: FlowStep) -> dict[str, Any]:
        """What later steps may ask for: the JSON that it printed, ``metrics.json`` among its
        outputs, and for a training its summary.
        """
        folder = self._step_folder(step.name)
        values: dict[str, Any] = {}
        text = (folder / "answer.txt").read_text(errors="replace")
        # --json prints an object over several lines; a script of its own, its last line
        start = text.find("{\n") if text.find("{\n") >= 0 else text.rfind("\n{") + 1
        with contextlib.suppress(ValueError):
            printed = json.loads(text[max(start, 0) :])
            values |= printed if isinstance(printed, dict) else {}
        for output in map(self._filled, step.outputs):
            if fnmatch.fnmatch(Path(output).name, "*metrics*.json"):
                try:
                    values |= json.loads(Path(output).read_text())
                except (ValueError, TypeError):
                    raise RondeError(f"{output} is not a JSON object") from None
        run = folder / self._keys[step.name] / "run"
        if step.verb == "run" and (run / "record.jsonl").is_file():
            summary = summarise(RunDir(run))
            for metrics in summary.evaluations.values():
                values |= metrics
            values |= {"run": str(run), "samples": summary.samples, "step": summary.step}
        elif step.verb == "tune" and "best" in values:
            values["best"] = {**values["best"].get("values", {}), **values["best"]}
        return values


def content_digest(path: Path) -> str:
    """SHA-256 of a file's content, or of all names and contents in a folder, behind links too."""
    # names and sizes too: bytes that move from one file to the next would give the same digest
    digest = hashlib.sha256()
    files: Sequence[Path] = sorted(_files_in(path)) if path.is_dir() else [path]
    for file in files:
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _files_in(folder: Path) -> Iterator[Path]:
    seen: set[str] = set()  # a link to a folder above has no end
    for root, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (path for name in files if (path := Path(root, name)).is_file())


def _write(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")
