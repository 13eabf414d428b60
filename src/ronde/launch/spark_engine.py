"""Executors of a Spark cluster: the first task of a barrier stage on a host runs the agent."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ronde.launch import tunnel
from ronde.launch.driver import Driven, serve
from ronde.world import ArgumentError, WorldError, usable_cores
from ronde.world.paths import need_java

__all__ = ["Spark"]

_FIRST_SECONDS = 120.0  # until the first executor is there

# Spark's own values wait for executors for ten minutes.
_SETTINGS = {
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "false",
}


class Spark(Driven):
    """Starts agents in the tasks of a barrier stage: all at once, or none.

    Args:
        master: as Spark writes it: ``spark://HOST:7077``, ``yarn``, ``local[4]`` …; ``auto``: that
            of Spark's configuration, or this machine.
        workers: how many tasks.
        python: the interpreter on the executors; None: ``PYSPARK_PYTHON``, or the path of this one.

    Raises:
        ArgumentError: there is no Java here, or nobody says how many workers.
    """

    def __init__(self, master: str, workers: int | None, python: str | None = None) -> None:
        if workers is None:
            raise ArgumentError("--spark needs --workers N: Spark does not say how many it has.")
        need_java("--spark")
        request = {"master": master, "workers": workers, "python": python}
        super().__init__("Spark", __name__, "spark", "pyspark", request, python)


def _task(
    address: str, port: int, token: str, run_agent: Callable[..., int]
) -> Callable[[Any], Iterable[int]]:
    """What each task does; Spark carries it by value."""

    def task(_: Any) -> Iterable[int]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        place = context.partitionId()
        gpus = context.resources().get("gpu")
        hello = {
            "place": place,
            "host": context.getTaskInfos()[place].address.rpartition(":")[0],
            "gpus": list(gpus.addresses) if gpus else [],
        }
        return [run_agent(address, port, token, hello)]

    return task


class _Tasks:
    """The application, as the driver process sees it."""

    seconds = 90.0

    def __init__(self, request: dict[str, Any]) -> None:
        if python := request["python"] or os.environ.get("PYSPARK_PYTHON") or sys.executable:
            os.environ["PYSPARK_PYTHON"] = python
        from pyspark import SparkConf, SparkContext

        self._workers = int(request["workers"])
        conf = SparkConf().setAppName("ronde").setAll(list(_SETTINGS.items()))
        master = request["master"]
        if master != "auto":
            conf.setMaster(master)
        elif not conf.contains("spark.master"):
            conf.setMaster(f"local[{max(usable_cores(), self._workers)}]")
        try:
            self._spark = SparkContext(conf=conf)
        except Exception as error:  # of Java, in many forms
            raise WorldError(_said(error)) from None
        self._spark.setLogLevel("OFF")
        self.address = str(self._spark.getConf().get("spark.driver.host"))
        self._ended = ""
        self._gpus: dict[int, list[str]] = {}

    def start(self, port: int, token: str) -> int:
        """One barrier task a worker: they hold the slots, and one a host runs the agent."""
        from pyspark import cloudpickle

        self._wait_for_executors()
        cloudpickle.register_pickle_by_value(tunnel)  # executors may have another Ronde, or none
        task = _task(self.address, port, token, tunnel.run_agent)
        stage = self._spark.parallelize(range(self._workers), self._workers).barrier()

        def run() -> None:
            try:
                stage.mapPartitions(task).collect()
                self._ended = "the stage has ended"
            except Exception as error:
                self._ended = self._why(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        return self._workers

    def _slots(self) -> int:
        """How many tasks can run at once on the executors that are there."""
        java = self._spark._jsc.sc()
        profile = java.resourceProfileManager().defaultResourceProfile()
        return int(java.maxNumConcurrentTasks(profile))

    def _wait_for_executors(self) -> None:
        """Until there is a slot for each worker.

        Raises:
            WorldError: no executor came up in two minutes, or no further one, and what to do.
        """
        if self._spark.getConf().get("spark.dynamicAllocation.enabled") == "true":
            return  # Spark refuses barrier stages then, and says so
        slots, here = 0, bool(re.match(r"local(\[|$)", self._spark.master))
        limit = time.monotonic() + _FIRST_SECONDS
        while (now := self._slots()) < self._workers:
            if now != slots:
                slots, limit = now, time.monotonic() + 20.0  # executors come up together
            if here or time.monotonic() > limit:
                raise WorldError(self._too_few(now))
            time.sleep(0.2)

    def _too_few(self, slots: int) -> str:
        wanted = f"{self._workers} workers need {self._workers} slots (cores of executors)"
        if not slots:
            return (
                f"{wanted}, and no executor came up in {_FIRST_SECONDS:.0f} s. The pages of "
                f"{self._spark.master} show whether workers have free cores and memory, and the "
                "logs of executors that failed."
            )
        return (
            f"{wanted}, and Spark has {slots}. Use --workers {slots}, or give it more executors or "
            "cores."
        )

    def _why(self, error: Exception) -> str:
        if "more slots than" in str(error):
            return self._too_few(self._slots())  # an executor has gone again
        return _said(error)

    def hosts(self, hellos: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
        """The executors' hosts, in the order of the tasks."""
        on: dict[str, list[dict[str, Any]]] = {}
        for hello in hellos:
            on.setdefault(hello["host"], []).append(hello)
        for several in on.values():
            self._gpus[several[0]["place"]] = [gpu for each in several for gpu in each["gpus"]]
        return [(host, len(several), several[0]["place"]) for host, several in on.items()]

    def environment(self, place: int) -> dict[str, str]:
        """The GPUs of all tasks of a host."""
        gpus = self._gpus.get(place)
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}

    def lost(self, place: int) -> str:
        """Why the stage has ended."""
        return self._ended

    def close(self) -> None:
        """Let the tasks end, then the application."""
        self._thread.join(3.0)
        with contextlib.suppress(Exception):
            self._spark.cancelAllJobs()
        self._spark.stop()


def _said(error: Exception) -> str:
    """The cause in a Java exception: the last error of Python in it, or else its first message."""
    text = str(error)
    python = re.findall(r"^(\w+(?:Error|Exception): .+)$", text, re.M)
    java = re.findall(r"^:? ?(?:\w+\.)+(\w+(?:Error|Exception): .+)$", text, re.M)
    lines = text.strip().splitlines() or [type(error).__name__]
    return (python[-1:] or java[:1] or lines)[0]


def main() -> None:
    """Run the driver process."""
    serve(_Tasks)
