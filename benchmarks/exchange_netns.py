"""Reducers where the network is the bottleneck: hosts in network namespaces, shaped to one rate.

    sudo python benchmarks/exchange_netns.py [--rate 100mbit] [--only workers|servers|nodes]
        [--parts bench|auto] [--sizes 64KiB,…]

Four workers on hosts of their own; the same with four servers on four more hosts; two nodes with
two workers each, whose inner link is ten times as fast. Four buckets are in flight, as in a
training (of 64 MiB, one); times are of one. The bound is that of the bytes: 2(N−1)/N of the bucket
over the rate of one TCP stream between two of these hosts.
Prints a table and one line for each bar. Without root it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NET, TAG = "10.91.7", f"x{os.getpid() % 10_000}"
SHARD = 400 << 10
SERVER = [sys.executable, "-u", "-m", "ronde.exchange.reduction_server"]


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [t for t in ("ip", "tc") if shutil.which(t) is None]:
        return f"{', '.join(absent)} not found: install iproute2"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        return "this machine makes no network namespaces"
    return ""


def do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def address(host: int) -> str:
    return f"{NET}.{10 + host}"


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[None]:
    """``count`` hosts on one bridge, each link shaped both ways."""
    try:
        do("ip", "link", "add", f"{TAG}b", "type", "bridge")
        do("ip", "link", "set", f"{TAG}b", "up")
        for i in range(count):
            name, end = f"{TAG}-{i}", f"{TAG}v{i}"
            do("ip", "netns", "add", name)
            do("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            do("ip", "link", "set", end, "master", f"{TAG}b", "up")
            do("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", "eth0")
            do("ip", "-n", name, "link", "set", "lo", "up")
            do("ip", "-n", name, "link", "set", "eth0", "up")
            limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
            do("tc", "-n", name, "qdisc", "replace", "dev", "eth0", *limit)
            do("tc", "qdisc", "replace", "dev", end, *limit)
        yield
    finally:
        for i in range(count):
            subprocess.run(["ip", "netns", "del", f"{TAG}-{i}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{TAG}v{i}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{TAG}b"], capture_output=True)


def on(host: int, command: Sequence[str], env: dict[str, str], **pipes: Any) -> subprocess.Popen:
    words = ["ip", "netns", "exec", f"{TAG}-{host}", *command]
    return subprocess.Popen(words, env={**os.environ, **env}, **pipes)


@contextlib.contextmanager
def servers(places: Sequence[int]) -> Iterator[dict[str, str]]:
    """Reduction servers on hosts; yields the workers' variables."""
    started: list[subprocess.Popen] = []
    try:
        for host in places:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started.append(on(host, SERVER, {}, **pipes))
        told = []
        for process, host in zip(started, places, strict=True):
            process.stdin.write(f"{'0' * 32}\n")
            process.stdin.flush()
            at = json.loads(process.stdout.readline())["places"]
            told.append(next(place for place in at if place.startswith(address(host))))
        yield {"RONDE_SERVERS": " ".join(told), "RONDE_SERVERS_TOKEN": "0" * 32}
    finally:
        for process in started:
            process.kill()
            process.wait()


def workers(placed: Sequence[int], arguments: Sequence[str], extra: dict[str, str]) -> Any:
    """Run one worker on each host of ``placed``; returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        started = []
        for rank, host in enumerate(placed):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(placed)),
                "LOCAL_RANK": str(list(placed[:rank]).count(host)),
                "LOCAL_WORLD_SIZE": str(list(placed).count(host)),
                "GROUP_RANK": str(host),
                "MASTER_ADDR": address(placed[0]),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "RONDE_DEVICE": "cpu",
                "RONDE_STATE": folder,
                **extra,
            }
            started.append(on(host, [sys.executable, *arguments, "--output", str(answer)], env))
        status = [process.wait() for process in started]
        if any(status):
            raise SystemExit(f"workers ended with {status}")
        return json.loads(answer.read_text())


def stream(argument: str) -> None:
    """One end of a stream; the sender prints its bytes per second."""
    listening = argument == "listen"
    size = 12 << 20
    if listening:
        with socket.create_server(("", 29400)) as server:
            print("ready", flush=True)
            connection, _ = server.accept()
    else:
        connection = socket.create_connection((argument, 29400))
    if listening:
        left = size
        while left:
            left -= len(connection.recv(1 << 20))
        connection.sendall(b"!")
        return
    start = time.perf_counter()
    connection.sendall(bytes(size))
    connection.recv(1)
    print(size / (time.perf_counter() - start), flush=True)


def goodput() -> float:
    """What TCP carries from one host to another."""
    pipes = {"stdout": subprocess.PIPE, "text": True}
    one = on(0, [sys.executable, __file__, "--stream", "listen"], {}, **pipes)
    one.stdout.readline()
    other = on(1, [sys.executable, __file__, "--stream", address(0)], {}, **pipes)
    rate = float(other.communicate()[0])
    one.communicate()
    return rate


def choose(sizes: str, output: str) -> None:
    """A worker that asks ``auto`` what it takes for gradients of each size, and times them all."""
    import torch.distributed as dist

    from ronde.exchange import Exchange, Members, build_reducer, choose_reducer
    from ronde.exchange.auto import bucket_sizes, exact_candidates, time_buckets
    from ronde.measure.bench_exchange import parse_sizes
    from ronde.plan import parse_reducer
    from ronde.world.connect import connect
    from ronde.world.consensus import gather_json

    me = connect()
    members = Members.of(me)
    answer: dict[str, Any] = {}
    for n in parse_sizes(sizes):
        chosen = choose_reducer(me, members, n, build_reducer)[0]
        names = exact_candidates(members)
        exchanges = {name: Exchange(build_reducer(parse_reducer(name), members)) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(-1, 3 if n > 8 << 20 else 15):
            for name in names if turn % 2 else reversed(names):
                buckets = bucket_sizes(n, exchanges[name].reducer.bucket_mib)
                seconds = max(gather_json(me, time_buckets(exchanges[name], buckets, members)))
                times[name] += [seconds] * (turn >= 0)
        for exchange in exchanges.values():
            exchange.reducer.close()
        medians = {name: statistics.median(values) for name, values in times.items()}
        answer[str(n)] = {"chosen": chosen, "seconds": medians}
    if me.is_main:
        Path(output).write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def table(title: str, answer: Any, bound: float | None = None) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for row in answer["rows"]:
        rows.setdefault(row["bytes"], {})[row["reducer"]] = row["seconds"]
    print(f"\n{title}")
    for size, times in rows.items():
        shown = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in times.items())
        n = answer["workers"]
        of = f"  ring at {2 * (n - 1) / n * size / bound / times['ring']:.1%}" if bound else ""
        print(f"  {size / 2**20:8.3f} MiB  {shown}{of}")
    return rows


def bar(name: str, holds: bool, figures: str) -> None:
    print(f"{'holds' if holds else 'FAILS'}  {name}: {figures}", flush=True)


def nodes_inside(rate: str, nodes: int) -> None:
    """Make the loopback of each node ten times as fast as its link."""
    number = "".join(c for c in rate if c.isdigit())
    limit = ["rate", f"{number}0{rate[len(number) :]}", "burst", "256kb", "latency", "50ms"]
    for i in range(nodes):
        do("tc", "-n", f"{TAG}-{i}", "qdisc", "replace", "dev", "lo", "root", "tbf", *limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--sizes", default="64KiB,400KiB,1600KiB,4MiB,16MiB,64MiB")
    parser.add_argument("--only", default="workers,servers,nodes")
    parser.add_argument("--parts", default="bench,auto")
    parser.add_argument("--stream")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.stream:
        return stream(options.stream)
    if options.choose:
        return choose(options.sizes, options.output)
    if why := missing():
        print(f"skipped: {why}")
        return None
    bench = ["-m", "ronde.measure.bench_exchange", "--sizes", options.sizes, "--in-flight", "4"]
    bench += ["--reducers"]
    ask = [__file__, "--choose", "--sizes", options.sizes]
    four, two = [0, 1, 2, 3], [0, 0, 1, 1]
    only = options.only.split(",")
    parts = options.parts.split(",")
    if {"workers", "servers"} & set(only):
        with hosts(8, options.rate):
            rate = goodput()
            control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
            print(f"links of {options.rate}: TCP ({control}) carries {rate * 8 / 1e6:.1f} Mbit/s")
            if "workers" in only and "bench" in parts:
                own = table("4 workers", workers(four, [*bench, "ring,servers"], {}), rate)
                best = {s: 1.5 * s / rate / own[s]["ring"] for s in own if s >= 16 << 20}
                bar("ring >= 95 % of its bound", min(best.values()) >= 0.95, _percent(best))
                gain = {s: t["ring"] / t["servers"] for s, t in own.items() if s >= 4 * SHARD}
                bar("servers >= 0.95x the ring", min(gain.values()) >= 0.95, _times(gain))
            if "workers" in only and "auto" in parts:
                auto(workers(four, ask, {}))
            if "servers" in only:
                with servers([4, 5, 6, 7]) as env:
                    if "bench" in parts:
                        title = "4 workers, 4 servers on 4 more hosts"
                        far = table(title, workers(four, [*bench, "ring,servers"], env), rate)
                        large = {s: t for s, t in far.items() if s >= 16 << 20}
                        gain = {s: t["ring"] / t["servers"] for s, t in large.items()}
                        bar("servers >= 1.5x the ring", min(gain.values()) >= 1.5, _times(gain))
                    if "auto" in parts:
                        auto(workers(four, ask, env))
    if "nodes" in only:
        with hosts(2, options.rate):
            nodes_inside(options.rate, 2)
            if "bench" in parts:
                answer = workers(two, [*bench, "ring,hierarchical,servers"], {})
                near = table("2 nodes × 2 workers, 10× as fast inside", answer)
                gain = {s: t["ring"] / t["hierarchical"] for s, t in near.items()}
                bar("hierarchical is faster than the ring", min(gain.values()) > 1.0, _times(gain))
            if "auto" in parts:
                auto(workers(two, ask, {}))
    return None


def auto(answer: dict[str, Any]) -> None:
    """Whole gradients of each size, in the buckets of each reducer."""
    over = {}
    for size, row in answer.items():
        times = row["seconds"]
        over[int(size)] = times[row["chosen"]] / min(times.values())
        shown = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in times.items())
        print(f"  {int(size) / 2**20:8.3f} MiB  {shown}  auto takes {row['chosen']}")
    bar("auto within 5 % of the best", max(over.values()) <= 1.05, _times(over))


def _percent(values: dict[int, float]) -> str:
    return ", ".join(f"{v:.1%} at {s / 2**20:g} MiB" for s, v in values.items())


def _times(values: dict[int, float]) -> str:
    return ", ".join(f"{v:.2f}x at {s / 2**20:g} MiB" for s, v in values.items())


if __name__ == "__main__":
    main()
