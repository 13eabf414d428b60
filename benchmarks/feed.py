"""How fast is ronde.feed? Images, tokens and rows a second on one core against those who do the
same, and what it cures.

Each contestant runs in a process of its own, all pinned to the same core, and they take turns, some
batches each, in an order that changes from round to round; what is printed is the median over
rounds. Two figures: a second of *processor* time (of the process, its threads and its children),
which other tenants of the machine disturb little, and a second on the clock.

    python benchmarks/feed.py                              # all; prints tables and writes
    benchmarks/results/feed.json python benchmarks/feed.py --only images --rounds 5
    taskset -c 1 python benchmarks/feed.py --core 1        # which core: --core; it is pinned either
    way

Needs scikit-learn (two photographs, of which the JPEG files are cut) and the extras `images`,
`tables`, `bench` (grain, datasets). DALI is
424 MB and in no extra: `pip install nvidia-dali-cuda120`; it runs without a GPU. Who is not
installed is skipped, and that is said.

What each does for an image, its file being in the page cache: read it, decode it, cut out a random
part (8 % to 100 % of the area), resize that to 224 × 224 with an antialiased filter, mirror every
other one, normalise. `ronde` gives float32 as all the others do; `ronde, bytes` leaves normalising
to the device, as it does where there is one; `ronde, on device` leaves resizing to it too, so that
this core only decodes and cuts out.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BATCH = 32
LENGTH = 1024
ROWS = 4096
NUMERIC = [f"n{k}" for k in range(16)]
CATEGORICAL = [f"c{k}" for k in range(5)]

Batches = Iterator[int]  # each time, how many samples (tokens, rows) came


def sized(value: Any) -> int:
    """Look at a batch, so that nobody can put its work off; gives its length."""
    images = value[0] if isinstance(value, list | tuple) else value
    return len(images)


# -- images ----------------------------------------------------------------------------


def ronde_images(data: Path, **options: Any) -> Batches:
    import torch

    from ronde import feed
    from ronde.plan.batch import shares

    torch.set_num_threads(1)
    pipeline = feed.images(data, size=224, **options)
    loader = _loader(pipeline, "threads")
    n = len(pipeline) // BATCH * BATCH
    for epoch in itertools.count():
        for share, micros in loader.read(lambda epoch=epoch: shares(epoch, 0, n, BATCH, 0, 1)):
            yield sized(loader.finish(share, micros)[0])


def pillow_loader(data: Path, workers: int) -> Batches:
    import torch
    from torch.utils.data import DataLoader

    from feed_job import PillowImages

    torch.set_num_threads(1)
    more: dict[str, Any] = {"persistent_workers": True} if workers else {}
    loader = DataLoader(
        PillowImages(data), BATCH, shuffle=True, drop_last=True, num_workers=workers, **more
    )
    while True:
        for batch in loader:
            yield sized(batch)


def dali(data: Path) -> Batches:
    """As in DALI's own ImageNet example: the decoder cuts out, so that it need not decode all; its
    triangular filter is antialiased.
    """
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(data), random_shuffle=True, name="files")
        x = fn.decoders.image_random_crop(
            files,
            device="cpu",
            random_aspect_ratio=[3 / 4, 4 / 3],
            random_area=[0.08, 1.0],
            num_attempts=10,
        )
        x = fn.resize(x, size=[224, 224], interp_type=types.INTERP_TRIANGULAR)
        mean, std = (
            [255 * m for m in (0.485, 0.456, 0.406)],
            [255 * s for s in (0.229, 0.224, 0.225)],
        )
        x = fn.crop_mirror_normalize(
            x,
            mirror=fn.random.coin_flip(),
            mean=mean,
            std=std,
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        return x, labels

    pipe = pipeline()
    pipe.build()
    while True:
        images, _ = pipe.run()
        yield len(images)


def grain(data: Path) -> Batches:
    """As in Grain's tutorials: a MapDataset, Pillow, numpy."""
    import grain as pygrain
    import numpy as np
    from PIL import Image

    from feed_job import random_box

    files = sorted(data.glob("*/*.jpg"))
    classes = sorted({f.parent.name for f in files})
    mean, std = (
        np.asarray([0.485, 0.456, 0.406], np.float32),
        np.asarray([0.229, 0.224, 0.225], np.float32),
    )

    class Augment(pygrain.transforms.RandomMap):
        def random_map(self, file: Path, rng: Any) -> Any:
            with open(file, "rb") as opened:
                image = Image.open(opened).convert("RGB")
            image = image.crop(random_box(image.width, image.height, rng.uniform)).resize(
                (224, 224), Image.Resampling.BILINEAR
            )
            if rng.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            x = (np.asarray(image, dtype=np.float32) / 255 - mean) / std
            return {"image": x, "label": classes.index(file.parent.name)}

    made = (
        pygrain.MapDataset.source(files)
        .seed(0)
        .shuffle()
        .repeat()
        .random_map(Augment())
        .batch(BATCH, drop_remainder=True)
    )
    for batch in made.to_iter_dataset(pygrain.ReadOptions(num_threads=1, prefetch_buffer_size=2)):
        yield len(batch["image"])


# -- tokens ----------------------------------------------------------------------------


def corpus(folder: Path) -> Path:
    """Some 20 MB of text: the Python that is installed here."""
    out = folder / "corpus.txt"
    if not out.exists():
        import sysconfig

        with open(folder / "corpus.writing", "w", encoding="utf-8") as file:
            for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
                if file.tell() > 20 << 20:
                    break
                file.write(source.read_text(encoding="utf-8", errors="ignore"))
        (folder / "corpus.writing").rename(out)
    return out


def ronde_tokens(data: Path) -> Batches:
    from ronde import feed

    pipeline = feed.Pipeline(feed.tokens(corpus(data), LENGTH, "uint8"))
    for batch in _by_ronde(pipeline, BATCH):
        yield batch[0].numel()


def rows_of_tokens(data: Path) -> Batches:
    """The loader that one writes: a memory map, one sample at a time."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Tokens(Dataset):
        def __init__(self) -> None:
            self.tokens = np.memmap(corpus(data), dtype=np.uint8, mode="r")

        def __len__(self) -> int:
            return (len(self.tokens) - 1) // LENGTH

        def __getitem__(self, i: int) -> Any:
            window = torch.from_numpy(
                self.tokens[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int64)
            )
            return window[:-1], window[1:]

    torch.set_num_threads(1)
    while True:
        for inputs, _ in DataLoader(Tokens(), BATCH, shuffle=True, drop_last=True):
            yield inputs.numel()


def hf_text(data: Path, own_batches: bool = False) -> Batches:
    """Blocks of one length in Arrow, as its examples make them, in torch's format, with a
    DataLoader or its own batches.
    """
    import datasets
    import numpy as np
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    raw = np.fromfile(corpus(data), dtype=np.uint8).astype(np.int64)
    blocks = raw[: len(raw) // LENGTH * LENGTH].reshape(-1, LENGTH)
    folder = data / f"hf-tokens-{os.getpid()}"
    # read from disk, as the others do
    datasets.Dataset.from_dict({"input_ids": blocks}).save_to_disk(folder)
    made = datasets.load_from_disk(folder).with_format("torch")
    for epoch in itertools.count():
        shuffled = (
            made.shuffle(seed=epoch).iter(BATCH, drop_last_batch=True)
            if own_batches
            else DataLoader(made, BATCH, shuffle=True, drop_last=True)
        )
        for batch in shuffled:
            yield batch["input_ids"].numel()


# -- rows ------------------------------------------------------------------------------


def parquet(folder: Path) -> Path:
    """300,000 rows of 16 numbers, 5 categories and a target."""
    out = folder / "table.parquet"
    if not out.exists():
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        rng, n = np.random.default_rng(0), 300_000
        columns: dict[str, Any] = {name: rng.standard_normal(n) for name in NUMERIC}
        columns |= {
            name: pa.array([f"v{i}" for i in rng.integers(0, 50, n)]).dictionary_encode()
            for name in CATEGORICAL
        }
        columns["y"] = rng.integers(0, 2, n)
        pq.write_table(
            pa.table(columns), folder / "table.writing", compression="zstd", row_group_size=50_000
        )
        (folder / "table.writing").rename(out)
    return out


def ronde_table(data: Path) -> Batches:
    from ronde import feed

    steps = {name: {} for name in NUMERIC} | {name: {"codes": True} for name in CATEGORICAL}
    recipe = feed.Recipe(steps, "y").fit(parquet(data))
    pipeline = feed.table(parquet(data), recipe=recipe, cache=data / "matrices")
    for batch in _by_ronde(pipeline, ROWS):
        yield len(batch[1])


def _loader(pipeline: Any, executor: Any = "none") -> Any:
    """What `distribute` reads with; how is said, since trying out what is best on one core that is
    shared finds now this, now that.
    """
    from ronde import feed

    taken = feed.take_over(
        pipeline, seed=0, batch_size=None, shuffle=True, shuffle_dataset=True, drop_last=True
    )
    taken = feed.apply_settings(
        taken, feed.FeedSettings(executor=executor, workers=int(executor != "none"))
    )
    return feed.Feed(taken.dataset, taken.order, taken.settings, 0)


def _by_ronde(pipeline: Any, batch: int) -> Iterator[Any]:
    import torch

    from ronde.plan.batch import shares

    torch.set_num_threads(1)
    loader = _loader(pipeline)
    n = len(pipeline) // batch * batch
    for epoch in itertools.count():
        for _, micros in loader.read(lambda epoch=epoch: shares(epoch, 0, n, batch, 0, 1)):
            yield micros[0]


def row_wise(data: Path) -> Batches:
    """The loader that one writes: matrices in memory, one row at a time."""
    import numpy as np
    import pyarrow.parquet as pq
    import torch
    from torch.utils.data import DataLoader, Dataset

    table = pq.read_table(parquet(data))
    numbers = torch.from_numpy(
        np.stack([table[name].to_numpy() for name in NUMERIC], 1).astype(np.float32)
    )
    codes = torch.from_numpy(
        np.stack(
            [
                table[name].combine_chunks().indices.to_numpy()
                if table[name].num_chunks == 1
                else _codes(table[name])
                for name in CATEGORICAL
            ],
            1,
        ).astype(np.int64)
    )
    target = torch.from_numpy(table["y"].to_numpy().copy())

    class Rows(Dataset):
        def __len__(self) -> int:
            return len(target)

        def __getitem__(self, i: int) -> Any:
            return numbers[i], codes[i], target[i]

    torch.set_num_threads(1)
    while True:
        for _, _, y in DataLoader(Rows(), ROWS, shuffle=True, drop_last=True):
            yield len(y)


def _codes(column: Any) -> Any:
    import numpy as np

    return np.unique(np.asarray(column.to_pylist()), return_inverse=True)[1]


def hf_table(data: Path, own_batches: bool = False) -> Batches:
    """The same columns in datasets' own Arrow files, in torch's format, with a DataLoader or its
    own batches.
    """
    import datasets
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    made = datasets.Dataset.from_parquet(
        str(parquet(data)), cache_dir=str(data / f"hf-rows-{os.getpid()}")
    )
    for name in CATEGORICAL:
        made = made.class_encode_column(name)
    made = made.with_format("torch")
    for epoch in itertools.count():
        shuffled = (
            made.shuffle(seed=epoch).iter(ROWS, drop_last_batch=True)
            if own_batches
            else DataLoader(made, ROWS, shuffle=True, drop_last=True)
        )
        for batch in shuffled:
            yield len(batch["y"])


# -- who takes part --------------------------------------------------------------------

CONTESTS: dict[str, dict[str, tuple[Callable[[Path], Batches], str | None]]] = {
    "images": {
        "ronde": (lambda data: ronde_images(data), None),
        "ronde, bytes": (lambda data: ronde_images(data, normalize=None), None),
        "torch DataLoader + Pillow, 0 workers": (lambda data: pillow_loader(data, 0), None),
        "torch DataLoader + Pillow, 1 worker": (lambda data: pillow_loader(data, 1), None),
        "DALI on the CPU": (dali, "nvidia.dali"),
        "Grain + Pillow": (grain, "grain"),
    },
    "tokens": {
        "ronde": (ronde_tokens, None),
        "memory map, row by row": (rows_of_tokens, None),
        "Hugging Face datasets + DataLoader": (hf_text, "datasets"),
        "Hugging Face datasets, own batches": (lambda data: hf_text(data, True), "datasets"),
    },
    "rows": {
        "ronde": (ronde_table, None),
        "matrices, row by row": (row_wise, None),
        "Hugging Face datasets + DataLoader": (hf_table, "datasets"),
        "Hugging Face datasets, own batches": (lambda data: hf_table(data, True), "datasets"),
    },
}
TURN = {"images": 8, "tokens": 400, "rows": 8}  # batches
SETTLE = 4  # batches that may stand in queues: read before the clock starts


def installed(module: str | None) -> bool:
    try:
        return module is None or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def processor_seconds() -> float:
    """Of this process, its threads, and its children."""
    import psutil

    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def serve(contest: str, name: str, data: Path) -> None:
    """One contestant: for each line on stdin that says how many batches, a line of JSON."""
    sys.path.insert(0, str(HERE))
    batches = CONTESTS[contest][name][0](data)
    for _ in range(3):
        next(batches)
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        quiet()
        cpu, samples = processor_seconds(), 0
        for _ in range(SETTLE):
            samples += next(batches)
        start, timed = time.perf_counter(), 0
        for _ in range(count):
            timed += next(batches)
        wall = time.perf_counter() - start
        quiet()  # what stands in queues now is paid for, as what stood there at the beginning was
        print(
            json.dumps(
                {"cpu": (samples + timed) / (processor_seconds() - cpu), "wall": timed / wall}
            ),
            flush=True,
        )
    os._exit(0)


def quiet() -> None:
    """Wait until nothing is read ahead any more."""
    before = processor_seconds()
    for _ in range(100):
        time.sleep(0.15)
        now = processor_seconds()
        if now - before < 0.02:
            return
        before = now


def contest(which: str, data: Path, rounds: int, core: int) -> dict[str, Any]:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(data / "hf"),
        "XDG_CACHE_HOME": str(data / "cache"),
    }
    running: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    found: dict[str, dict[str, list[float]]] = {}
    try:
        for name, (_, module) in CONTESTS[which].items():
            if not installed(module):
                skipped[name] = f"{module} is not installed"
                print(f"  {name}: skipped, {module} is not installed")
                continue
            command = [
                sys.executable,
                __file__,
                "--serve",
                which,
                name,
                "--data",
                str(data),
                "--core",
                str(core),
            ]
            log = open(data / "stderr.log", "w")  # noqa: SIM115
            running[name] = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            if not answer(running[name], "ready"):
                raise SystemExit(f"{name} failed: {(data / 'stderr.log').read_text()[-2000:]}")
            found[name] = {"cpu": [], "wall": []}
        names = list(running)
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                running[name].stdin.write(f"{TURN[which]}\n")
                running[name].stdin.flush()
                result = json.loads(answer(running[name]) or "{}")
                for kind, value in result.items():
                    found[name][kind].append(value)
    finally:
        for process in running.values():
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    rates = {
        name: {f"per_{k}_second": statistics.median(v) for k, v in kinds.items()}
        | {f"{k}_all": v for k, v in kinds.items()}
        for name, kinds in found.items()
    }
    return {"rates": rates, "skipped": skipped, "rounds": rounds, "batches_a_turn": TURN[which]}


def answer(process: Any, wanted: str | None = None) -> str:
    """The next line that is for us: libraries print, too."""
    while line := process.stdout.readline():
        if (wanted is not None and line.strip() == wanted) or (
            wanted is None and line.startswith("{")
        ):
            return str(line)
    return ""


def show(which: str, result: dict[str, Any]) -> None:
    rates = result["rates"]
    mine = rates["ronde"]["per_cpu_second"]
    print(f"\n{which} a second, one core{'':24} of processor time     on the clock     ronde is")
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]["per_cpu_second"]):
        times = "" if name.startswith("ronde") else f"{mine / rate['per_cpu_second']:.2f} x as fast"
        print(
            f"  {name:42} {rate['per_cpu_second']:15,.0f} {rate['per_wall_second']:18,.0f} "
            f"    {times}"
        )


# -- the cure --------------------------------------------------------------------------

PLAIN = "DataLoader + Pillow, as it is"
ARMS = {
    "synthetic": ["--synthetic"],
    PLAIN: ["--workers", "0"],
    "the same, 2 workers of torch's": ["--workers", "2"],
    "the same, as ronde doctor prescribes": ["--workers", "0"],
    "ronde.feed.images": ["--feed"],
}
PRESCRIBED = "the same, as ronde doctor prescribes"


def lengthen(data: Path, times: int) -> None:
    """Each file under several names: an epoch of some length, since loading begins anew with
    each.
    """
    for file in sorted(data.glob("*/*.jpg")):
        for k in range(1, times):
            (file.parent / f"{file.stem}-{k}.jpg").hardlink_to(file)


def prescription(data: Path, folder: Path, rate: float, env: dict[str, str]) -> dict[str, Any]:
    """What `ronde doctor --apply 1` finds and writes for the plain job."""
    job, out = folder / "feed_job.py", folder / "doctor.json"
    shutil.copy(HERE / "feed_job.py", job)
    (folder / "feed_job.feed.yaml").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "ronde",
        "doctor",
        "--workers",
        "1",
        "--apply",
        "1",
        "--json",
        str(out),
        str(job),
    ]
    done = subprocess.run(
        [*command, "--data", str(data), "--rate", str(rate)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode or not (folder / "feed_job.feed.yaml").exists():
        raise SystemExit(f"ronde doctor prescribed nothing:\n{done.stdout}\n{done.stderr[-2000:]}")
    values = json.loads(out.read_text())
    # The settings file lay in a folder that is gone.
    applied = {k: v for k, v in values["applied"].items() if k != "file"}
    return {"gap": values["gap"], "cause": values["cause"], "applied": applied}


def cure(data: Path, rounds: int, rate: float, seconds: float) -> dict[str, Any]:
    """The job of feed_job.py, on all cores, its device simulated."""
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RONDE_RUNS": "none", "RONDE_PROGRESS": "quiet"}
    doctor = prescription(data, data.parent, rate, env)
    print(
        f"  ronde doctor: {doctor['gap']:.0%} lost, prescribes "
        f"{', '.join(doctor['applied']['prescriptions'])}: {doctor['applied']['settings']}"
    )
    for i in range(rounds):
        names = list(ARMS)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            command = [
                sys.executable,
                str(HERE / "feed_job.py"),
                "--data",
                str(data),
                "--rate",
                str(rate),
                "--seconds",
                str(seconds),
            ]
            settings = str(data.parent / "feed_job.feed.yaml") if name == PRESCRIBED else "none"
            done = subprocess.run(
                [*command, "--json", *ARMS[name]],
                env={**env, "RONDE_FEED": settings},
                capture_output=True,
                text=True,
                timeout=300,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
            found[name].append(json.loads(lines[-1])["images_per_second"])
    rates = {name: statistics.median(values) for name, values in found.items()}
    gaps = {
        name: statistics.median(1 - v / s for v, s in zip(values, found["synthetic"], strict=True))
        for name, values in found.items()
    }
    return {
        "images_per_second": rates,
        "gap": gaps,
        "device_images_per_second": rate,
        "doctor": doctor,
        "all": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=[*CONTESTS, "cure"], action="append", help="several are allowed"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--core", type=int, help="to pin the contestants to; the first that this process may use"
    )
    parser.add_argument("--images", type=int, default=512, help="JPEG files that are made")
    parser.add_argument(
        "--rate",
        type=float,
        action="append",
        help="images a second of the simulated device, in `cure`; default: 300 and 400",
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement, in `cure`")
    parser.add_argument(
        "--names", type=int, default=1, help="of each of the 2,048 files in `cure`: longer epochs"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "feed.json")
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    core = args.core if args.core is not None else min(os.sched_getaffinity(0))
    if args.serve:
        os.sched_setaffinity(0, {core})
        contest_name, name = args.serve
        serve(contest_name, name, args.data / "photos" if contest_name == "images" else args.data)
        return

    sys.path.insert(0, str(HERE))
    from feed_job import make_photographs

    results: dict[str, Any] = (
        json.loads(args.out.read_text()) if args.out.exists() and args.only else {}
    )
    import torch

    machine = {
        "model": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if not args.only:
        results["machine"] = machine
    args.out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ronde-feed-") as folder:
        data = Path(folder)
        make_photographs(data / "photos", args.images)
        sizes = [f.stat().st_size for f in (data / "photos").glob("*/*.jpg")]
        print(
            f"{len(sizes)} JPEG files, {statistics.mean(sizes) / 1000:.0f} kB on average; "
            f"core {core} of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"
        )
        for which in args.only or [*CONTESTS, "cure"]:
            if which == "cure":
                make_photographs(data / "many", 2048)
                lengthen(data / "many", args.names)
                results["cure"] = {"machine": machine}
                for rate in args.rate or [300.0, 400.0]:
                    print(
                        f"\nA training on JPEG files, its device simulated at {rate:.0f} "
                        "images a second; all cores"
                    )
                    found = results["cure"][f"{rate:.0f}"] = cure(
                        data / "many", max(3, args.rounds // 2), rate, args.seconds
                    )
                    for name, value in found["images_per_second"].items():
                        print(
                            f"  {name:42} {value:8.0f} images/s     gap {found['gap'][name]:6.1%}"
                        )
            else:
                results[which] = contest(which, data, args.rounds, core)
                results[which]["load"] = os.getloadavg()
                results[which]["machine"] = machine
                show(which, results[which])
            args.out.write_text(json.dumps(results, indent=1))


def cpu_model() -> str:
    try:
        return next(
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return ""


if __name__ == "__main__":
    main()
