"""Checkpoints that are damaged, and saves that are killed: is everything noticed, and does the
checkpoint before always load?

    python benchmarks/checkpoint_damage.py [--flips 200] [--seed 0]

Two layouts: whole (rank 0 writes all) and pieces (two ranks write their own). In each, the newer of
two checkpoints is damaged in every way below, one at a time; it must be refused, and the older one
must load with its very values. Then saves are killed at every point where they flush, rename, or
remove something, in the background and not. Last, disks that are full, read-only, and slow (these
need root). Prints a table; exit status 1 if anything was not noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RONDE_DEVICE"] = "cpu"

import torch

from ronde.checkpoint import (
    Box,
    Piece,
    Saver,
    find_valid,
    list_checkpoints,
    prepare_pieces,
    write,
)
from ronde.world import CheckpointError
from ronde.world.connect import connect

torch.set_num_threads(1)
RESULTS = Path(__file__).parent / "results" / "checkpoint_damage.json"
ROWS, PER_RANK = 24, 12


def values(step: int, run: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * run + step)
    return {
        "layer.weight": torch.randn(ROWS, 40, generator=g),
        "layer.bias": torch.randn(ROWS, generator=g),
    }


def save(folder: Path, step: int, run: int, ranks: int, background: bool) -> None:
    """One checkpoint, written by this process or, with its peers, by two."""
    saver, state = Saver(), {"step": step, "run": run}
    tensors = values(step, run)
    copied = saver.copy if background else dict
    if ranks == 1:
        files = {"model.safetensors": tensors, "optimizer.safetensors": values(step + 1, run)}
        job: Callable[[], Path | None] = partial(write, folder, step, copied(files), state, 2)
    else:
        me = connect()
        low = PER_RANK * me.rank
        pieces = {
            name: Piece(
                t[low : low + PER_RANK],
                tuple(t.shape),
                Box((low, *[0] * (t.dim() - 1)), (PER_RANK, *t.shape[1:])),
            )
            for name, t in tensors.items()
        }
        whole = (
            {"random.safetensors": {"x": torch.full((4,), step + 0.1 * run)}} if me.is_main else {}
        )
        job = prepare_pieces(me, folder, step, {"model": pieces}, whole, state, 2, None, copied)
    saver.begin(step, job, time.perf_counter(), wait=not background)
    if background:
        for t in tensors.values():
            t.fill_(-1.0)  # the training goes on
    written = saver.finish()
    if written is not None and written.error:
        raise CheckpointError(written.error)


def save_as(folder: Path, step: int, run: int, ranks: int, _rank: int) -> None:
    save(folder, step, run, ranks, False)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def fork(ranks: int, work: Callable[[int], None], seconds: float = 60.0) -> list[int]:
    """Run ``work(rank)`` in processes; exit statuses by rank. If one is killed, so are the rest."""
    port, pids, statuses = free_port(), {}, {}
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            status = 1
            with contextlib.suppress(BaseException):
                if ranks > 1:
                    os.environ.update(
                        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                        LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                    )  # fmt: skip
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                work(rank)
                status = 0
            if ranks > 1 and not status:
                with contextlib.suppress(BaseException):
                    torch.distributed.barrier()
            os._exit(status)
        pids[pid] = rank
    limit = time.monotonic() + seconds
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        if any(statuses.values()) or time.monotonic() > limit:
            for each in pids:
                os.kill(each, signal.SIGKILL)
        if not pid:
            time.sleep(0.002)
    return [statuses[rank] for rank in range(ranks)]


def intact(folder: Path, step: int, run: int = 0) -> bool:
    """Whether the newest whole checkpoint is that of ``step``, with its very values."""
    found, _ = find_valid(folder)
    if found is None or found.step != step:
        return False
    there = found.whole("model")
    wanted = values(step, run)
    return there.keys() == wanted.keys() and all(
        torch.equal(there[n], t) for n, t in wanted.items()
    )


# -- damage ----------------------------------------------------------------------------


def flips(path: Path, draw: random.Random, count: int) -> Iterator[Callable[[], None]]:
    files = sorted(path.iterdir())
    sizes = [f.stat().st_size for f in files]
    for _ in range(count):
        file = draw.choices(files, sizes)[0]
        bit = draw.randrange(8 * file.stat().st_size)

        def flip(file: Path = file, bit: int = bit) -> None:
            data = bytearray(file.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)

        yield flip


def truncations(path: Path, draw: random.Random) -> Iterator[Callable[[], None]]:
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        for length in {0, 1, size - 1, *(draw.randrange(size) for _ in range(5))}:
            yield lambda file=file, length=length: os.truncate(file, length)


def missing(path: Path) -> Iterator[Callable[[], None]]:
    for file in sorted(path.iterdir()):
        yield file.unlink


def swapped(path: Path) -> Iterator[Callable[[], None]]:
    files = sorted(path.iterdir())
    for i, a in enumerate(files):
        for b in files[:i]:

            def swap(a: Path = a, b: Path = b) -> None:
                one, two = a.read_bytes(), b.read_bytes()
                a.write_bytes(two)
                b.write_bytes(one)

            yield swap


def foreign(path: Path, other: Path) -> Iterator[Callable[[], None]]:
    """Files of the same name and size, of another step and of another run."""
    for source in (path.with_name("step-000000002"), other):
        for file in sorted(path.iterdir()):
            if (source / file.name).is_file():
                yield lambda file=file, source=source: shutil.copy(source / file.name, file)


def damaged(layout: str, base: Path, other: Path, draw: random.Random, count: int) -> list[Any]:
    newest, rows = list_checkpoints(base)[0], []
    kinds: dict[str, list[Callable[[], None]]] = {
        "bit flipped": list(flips(newest, draw, count)),
        "truncated": list(truncations(newest, draw)),
        "missing": list(missing(newest)),
        "swapped": list(swapped(newest)),
        "foreign": [
            *foreign(newest, other),
        ],
    }
    kept = newest.with_name("kept")
    for kind, damages in kinds.items():
        noticed = loads = 0
        for damage in damages:
            shutil.copytree(newest, kept)
            damage()
            _, refused = find_valid(base)
            noticed += len(refused) == 1
            loads += intact(base, 2)
            shutil.rmtree(newest)
            kept.rename(newest)
        rows.append([layout, kind, len(damages), noticed, loads])
    return rows


# -- saves that are killed -------------------------------------------------------------


def die_at(point: int) -> None:
    crossed = 0

    def crossing(call: Any) -> Any:
        def counted(*args: Any, **named: Any) -> Any:
            nonlocal crossed
            crossed += 1
            if crossed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return counted

    os.fsync = crossing(os.fsync)
    Path.rename = crossing(Path.rename)  # type: ignore[method-assign]
    Path.mkdir = crossing(Path.mkdir)  # type: ignore[method-assign]
    shutil.rmtree = crossing(shutil.rmtree)  # type: ignore[assignment]


def killed(layout: str, ranks: int, base: Path, background: bool) -> list[Any]:
    """Kill the save of step 6, which also removes that of step 2."""
    kills = loads = 0
    for rank in range(ranks):
        for point in range(1, 100):
            folder = base.with_name("killing")
            shutil.copytree(base, folder)

            def work(me: int, rank: int = rank, point: int = point, folder: Path = folder) -> None:
                if ranks > 1:
                    connect()
                if me == rank:
                    die_at(point)
                save(folder, 6, 0, ranks, background)

            statuses = fork(ranks, work)
            died = statuses[rank] == -signal.SIGKILL
            kills += died
            if died:
                _, refused = find_valid(folder)
                loads += not refused and (intact(folder, 4) or intact(folder, 6))
            shutil.rmtree(folder)
            if statuses == [0] * ranks:
                break
    how = "background" if background else "waiting"
    return [layout, f"killed, {how}", kills, kills, loads]


# -- disks -----------------------------------------------------------------------------


def disk(kind: str, folder: Path) -> None:
    """In a mount namespace of its own: a save that the disk refuses."""
    for step in (2, 4):
        fork(1, partial(save_as, folder, step, 0, 1))
    if kind == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    elif kind == "full":
        (folder / "ballast").write_bytes(b"x" * (shutil.disk_usage(folder).free - 4096))
    noticed = []
    for background in (False, True):
        started = time.monotonic()
        try:
            save(folder, 6, 0, 1, background)
            noticed.append(False)
        except CheckpointError as error:
            noticed.append("could not be written" in str(error))
        assert time.monotonic() - started < 30
    print(json.dumps([sum(noticed), 2 * intact(folder, 4)]))


def disks(folder: Path) -> list[Any]:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        print("full and read-only disks: mounting needs root, left out")
        return []
    rows = []
    for kind in ("full", "read-only"):
        place = folder / kind
        place.mkdir()
        inner = 'mount -t tmpfs -o size=200k none "$1" && exec "$2" "$3" --disk "$4" "$1"'
        command = [
            "unshare",
            "-m",
            "sh",
            "-c",
            inner,
            "sh",
            str(place),
            sys.executable,
            __file__,
            kind,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        noticed, loads = json.loads(done.stdout.splitlines()[-1])
        rows.append(["whole", f"{kind} disk", 2, noticed, loads])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.disk:
        disk(options.disk[0], Path(options.disk[1]))
        return
    draw, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for layout, ranks in (("whole", 1), ("pieces", 2)):
            base, other = folder / layout / "base", folder / layout / "other"
            for place, run, steps in ((base, 0, (2, 4)), (other, 1, (4,))):
                for step in steps:
                    statuses = fork(ranks, partial(save_as, place, step, run, ranks))
                    assert statuses == [0] * ranks, statuses
            assert intact(base, 4)
            rows += damaged(layout, base, list_checkpoints(other)[0], draw, options.flips)
            for background in (False, True):
                rows.append(killed(layout, ranks, base, background))
        rows += disks(folder)
    print(f"{'layout':8} {'damage':20} {'cases':>6} {'noticed':>8} {'loads':>6}")
    for layout, kind, cases, noticed, loads in rows:
        print(f"{layout:8} {kind:20} {cases:6} {noticed:8} {loads:6}")
    total = Counter()
    for _, _, cases, noticed, loads in rows:
        total.update(cases=cases, noticed=noticed, loads=loads)
    print(f"all noticed: {total['noticed']} of {total['cases']}; the last good checkpoint loads: "
          f"{total['loads']} of {total['cases']}")  # fmt: skip
    names = ("layout", "damage", "cases", "noticed", "loads")
    RESULTS.write_text(
        json.dumps([dict(zip(names, r, strict=True)) for r in rows], indent=1) + "\n"
    )
    sys.exit(total["noticed"] != total["cases"] or total["loads"] != total["cases"])


if __name__ == "__main__":
    main()
