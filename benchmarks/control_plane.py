"""What leading many hosts costs the launcher: stand-in agents, without torch, on this machine.

The launcher is the real one: it asks the hosts, chooses a meeting point, starts 8 workers on each,
judges their reports, loses a host, and ends the others. The agents of all hosts are one process, to
which ``bash`` leads each host's pipes, as ssh would::

    python benchmarks/control_plane.py --hosts 10 100 500
    python benchmarks/control_plane.py --meetings

It counts the processor time and memory of the launcher's process alone: ssh, srun and mpirun are
processes beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

import psutil

from ronde.launch import Fleet, Job, Output
from ronde.launch import messages as m
from ronde.launch.engine import Host
from ronde.launch.facts import collect
from ronde.launch.job import Outcome
from ronde.launch.messages import MARKER, from_line, to_line
from ronde.watch.hang_judge import RankView

WORKERS = 8
VIEWS_SECONDS = 2.0  # as agents report
LEAD = 'exec 3<>/dev/tcp/127.0.0.1/$0; echo "$1" >&3; cat <&0 >&3 2>/dev/null & exec cat <&3'


class Agent:
    """One host's stand-in: answers orders, and beats while its workers would run."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, facts) -> None:
        self.reader, self.writer, self.facts = reader, writer, facts
        self.running: list[asyncio.Task[None]] = []

    def send(self, message: m.Message) -> None:
        self.writer.write(to_line(message))

    async def serve(self) -> None:
        self.name = (await self.reader.readline()).decode().strip()
        self.writer.write(MARKER)
        while line := await self.reader.readline():
            order = from_line(line)
            if isinstance(order, m.Hello):
                self.send(m.Told({**self.facts, "host": self.name, "machine": self.name}))
            elif isinstance(order, m.Listen):
                self.send(m.Listening([("10.0.0.1", 1)]))
            elif isinstance(order, m.Reach):
                self.send(m.Reached({"10.0.0.1": "10.0.0.2"}))
            elif isinstance(order, m.StartWorkers):
                tasks = asyncio.get_running_loop().create_task
                self.running = [tasks(self.beat(order)), tasks(self.script(order))]
            elif isinstance(order, m.Stop) and self.running:
                self.send(m.WorkersEnded(Outcome(130, interrupted=True)))
                self.stop()
            elif isinstance(order, m.End):
                break
        self.stop()
        self.writer.close()

    async def beat(self, run: m.StartWorkers) -> None:
        """Ranks that train ten steps a second. An agent that reports says nothing else."""
        self.send(m.Alive())
        for steps in itertools.count(20, 20):
            ranks = range(run.nodes.first, run.nodes.first + run.job.workers)
            progress = (steps, steps, steps, 0.05, 0.1)
            self.send(m.Views([RankView(rank, "training", "", *progress) for rank in ranks]))
            await asyncio.sleep(VIEWS_SECONDS)

    async def script(self, run: m.StartWorkers) -> None:
        """The last host is lost after so many seconds."""
        if run.nodes.rank == run.nodes.count - 1:
            await asyncio.sleep(float(run.job.environment["LOST_AFTER"]))
            self.running[0].cancel()
            self.writer.close()

    def stop(self) -> None:
        for task in self.running:
            task.cancel()
        self.running = []


async def stand_in() -> None:
    """Serve all hosts; prints the port."""
    facts = collect(["-m", "json"], None)
    server = await asyncio.start_server(lambda r, w: Agent(r, w, facts).serve(), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Bash:
    """Leads the launcher's pipes to the stand-ins."""

    name = "bash"

    def __init__(self, port: int) -> None:
        self.port = port

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        return ["bash", "-c", LEAD, str(self.port), host.name]

    def meaning(self, host: Host, status: int, printed: str) -> str:
        return ""

    def close(self) -> None:
        return


def spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def lead(hosts: int, seconds: float) -> dict[str, float]:
    """Lead a run on so many hosts; what it cost."""
    words = [sys.executable, __file__, "--stand-in"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as agents:
        assert agents.stdout is not None
        port = int(agents.stdout.readline())
        found: dict[str, float] = {"hosts": hosts}
        rates: list[float] = []
        over = threading.Event()

        def look() -> None:
            over.wait(2.0)  # the start
            while not over.is_set():
                before, at = spent(), time.monotonic()
                if not over.wait(1.0):
                    rates.append((spent() - before) / (time.monotonic() - at))
                found["memory"] = psutil.Process().memory_info().rss / 1e6

        begun, cost = time.monotonic(), spent()
        names = [Host(f"h{n}", WORKERS) for n in range(hosts)]
        with Fleet(names, Bash(port)) as fleet:
            fleet.ask(["-m", "json"], {}, None)
            found["asked"], found["ask cost"] = time.monotonic() - begun, spent() - cost
            count = hosts * WORKERS
            environment = {"LOST_AFTER": str(seconds)}
            job = Job(["-m", "json"], count, None, environment, hang_timeout=600.0)
            watching = threading.Thread(target=look)
            watching.start()
            began = time.monotonic()
            outcome = fleet.run(job, [WORKERS] * hosts, Output(count, None, print, print))
            over.set()
            found["ended"] = time.monotonic() - began - seconds
            watching.join()
        assert outcome.status == 1 and f"host h{hosts - 1} is lost" in str(outcome.error), outcome
        found["cores"] = statistics.median(rates)
        agents.kill()
    return found


class Counted:
    """A store whose calls are counted."""

    def __init__(self, store) -> None:
        self.store, self.calls = store, Counter()

    def __getattr__(self, name: str):
        self.calls[name] += 1
        return getattr(self.store, name)


def meet(ranks: int, meetings: int) -> dict[str, float]:
    """Messages of each rank for one meeting. While it waits for others, it looks (``check``)."""
    import torch  # the launcher has none
    import torch.distributed as dist

    from ronde.world import World
    from ronde.world.rendezvous import Rendezvous

    store = dist.HashStore()
    host = {"local_rank": 0, "local_size": 1, "node": 0, "launcher": "none", "host": "h"}
    device = torch.device("cpu")
    each = [
        Rendezvous(World(rank=rank, size=ranks, device=device, **host), store)
        for rank in range(ranks)
    ]
    stores = []
    for rendezvous in each:
        stores.append(Counted(rendezvous._store))
        rendezvous._store = stores[-1]

    def run(rendezvous) -> None:
        for _ in range(meetings):
            rendezvous.meet("run.barrier()", {"rank": rendezvous.me.rank})

    threads = [threading.Thread(target=run, args=[rendezvous]) for rendezvous in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    most = Counter()
    for counted in stores:
        most |= counted.calls
    return {name: count / meetings for name, count in sorted(most.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--meetings", action="store_true", help="count messages of ranks instead")
    options = parser.parse_args()
    if options.stand_in:
        asyncio.run(stand_in())
    if options.meetings:
        for ranks in (4, 16, 64):
            told = ", ".join(f"{name} {count:.1f}" for name, count in meet(ranks, 10).items())
            print(f"a meeting of {ranks} ranks, messages of the rank with most: {told}")
        return
    results = []
    for hosts in options.hosts:
        found = lead(hosts, options.seconds)
        results.append(found)
        print(
            f"{hosts:4} hosts × {WORKERS}: asked in {found['asked']:.1f} s "
            f"({1e3 * found['ask cost'] / hosts:.1f} ms of processor time each), running "
            f"{100 * found['cores']:.1f} % of a core "
            f"({1e6 * found['cores'] / hosts:.0f} µs/s each), "
            f"{found['memory']:.0f} MB, ended {found['ended']:.1f} s after one was lost",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
