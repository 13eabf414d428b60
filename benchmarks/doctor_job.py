"""A training on a fixed-time accelerator, with a fault planted in exactly one place. Run by
doctor_truth.py.

``python doctor_job.py plain SPEC`` trains with torch alone, in a plain loop, and prints its rates
as JSON: that is the truth. ``ronde doctor … doctor_job.py ronde SPEC`` is what the doctor sees.
SPEC is JSON: see :class:`Spec`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, default_collate

from ronde.feed import stage


@dataclass
class Spec:
    """A case.

    Attributes:
        fault: how: ``delay``, ``burn`` (lets go of the lock), ``gil`` (holds it), ``bandwidth``,
            ``threads``, ``large``, ``pickle``, ``exchange``, ``slow_step``, ``block``, ``images``,
            or empty.
        where: the stage it is planted in.
        ms: how much, for a sample (for a batch in collate, copy, step and exchange).
        rank: only on this rank; -1 on all.
        loaders: loading processes of each worker.
        step_ms: of the accelerator, for a step; ``busy_ms`` of it on the CPU.
        batch: samples of each worker and step.
        workers: training processes.
        kind: of data set: ``named`` (stages by name), ``plain`` (nothing is named).
    """

    fault: str = ""
    where: str = ""
    ms: float = 0.0
    rank: int = -1
    loaders: int = 2
    step_ms: float = 30.0
    busy_ms: float = 0.0
    batch: int = 16
    workers: int = 1
    kind: str = "named"
    threads: int = 4
    payload: int = 0


def burn(seconds: float) -> None:
    """CPU time of this thread, with Python's lock let go of most of the time."""
    end = time.thread_time() + seconds
    data = bytes(60_000)
    while time.thread_time() < end:
        zlib.crc32(data)


def hold(seconds: float) -> None:
    """CPU time of this thread, in Python."""
    end = time.thread_time() + seconds
    n = 0
    while time.thread_time() < end:
        for i in range(50):
            n += i


class Bucket:
    """So many seconds of storage for each sample, shared by all who read: a token bucket, in memory
    that all see.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.free_at = context.Value("d", 0.0)

    def take(self, seconds: float) -> None:
        with self.free_at.get_lock():
            now = time.monotonic()
            start = max(now, self.free_at.value)
            self.free_at.value = start + seconds
        time.sleep(max(0.0, start + seconds - now))


class Fault:
    """What is planted."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec = spec
        self.active = spec.rank in (-1, rank)
        self.bucket = Bucket() if spec.fault == "bandwidth" else None

    def at(self, where: str) -> None:
        spec = self.spec
        if not self.active or spec.where != where:
            return
        seconds = spec.ms / 1e3
        if spec.fault == "delay":
            time.sleep(seconds)
        elif spec.fault == "burn":
            burn(seconds)
        elif spec.fault == "gil":
            hold(seconds)
        elif spec.fault == "bandwidth":
            assert self.bucket is not None
            self.bucket.take(seconds)
        elif spec.fault == "threads":
            many_threads(spec.threads, seconds)


def many_threads(threads: int, seconds: float) -> None:
    """Small operations over several OpenMP threads: with one thread they take about ``seconds``."""
    torch.set_num_threads(threads)
    x = torch.ones(64 * 1024)
    for _ in range(max(1, round(seconds / 15e-6))):
        x = x.add(1.0)


class Slow:
    """A sample that takes its time to be pickled."""

    def __init__(self, value: torch.Tensor, seconds: float) -> None:
        self.value, self.seconds = value, seconds

    def __getstate__(self) -> dict[str, object]:
        time.sleep(self.seconds)
        return {"value": self.value, "seconds": self.seconds}


class Named(Dataset):
    """Its stages have names."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 4096

    @stage("read")
    def load(self, i: int) -> np.ndarray:
        self.fault.at("read")
        return np.full(256, i % 251, dtype=np.uint8)

    @stage("decode")
    def decode(self, data: np.ndarray) -> torch.Tensor:
        self.fault.at("decode")
        return torch.from_numpy(data.astype(np.float32))

    @stage("augment")
    def augment(self, x: torch.Tensor) -> torch.Tensor:
        self.fault.at("augment")
        return x / 255

    @stage("parse")
    def parse(self, x: torch.Tensor) -> torch.Tensor:
        self.fault.at("parse")
        return x

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.parse(self.augment(self.decode(self.load(i))))
        self.fault.at("python")
        return x, torch.tensor([0.5])


class Plain(Dataset):
    """Nobody has told the doctor anything: files, Pillow, a transform."""

    def __init__(self, fault: Fault, folder: str) -> None:
        self.fault = fault
        self.folder = folder
        self.files = sorted(f.name for f in Path(folder).iterdir())
        self.transform = self.change

    def __len__(self) -> int:
        return 4096

    def change(self, image: object) -> torch.Tensor:
        self.fault.at("augment")
        return (
            torch.from_numpy(np.asarray(image, dtype=np.float32)[:16, :16, 0].reshape(-1).copy())
            / 255
        )

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        from PIL import Image

        with open(f"{self.folder}/{self.files[i % len(self.files)]}", "rb") as file:
            data = file.read()
        image = Image.open(io.BytesIO(data)).convert("RGB")
        x = self.transform(image)
        self.fault.at("python")
        return x, torch.tensor([0.5])


def write_images(folder: str, size: int) -> None:
    """Some JPEG files."""
    from PIL import Image

    Path(folder).mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for k in range(24):
        small = rng.integers(0, 255, (size // 8, size // 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC).save(
            f"{folder}/{k}.jpg", quality=90
        )


class Collate:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.payload = np.zeros(fault.spec.payload if fault.active else 0, dtype=np.uint8)

    def __call__(self, samples: list[object]) -> object:
        self.fault.at("collate")
        batch = default_collate(samples)
        if len(self.payload):
            return [*batch, self.payload]  # it costs nothing to make, and is sent with every batch
        if self.fault.spec.fault == "pickle" and self.fault.active:
            return [Slow(batch[0], self.fault.spec.ms / 1e3), batch[1]]
        return batch


class Accelerator(nn.Module):
    """Takes a fixed time, whatever it is given."""

    def __init__(self, spec: Spec, rank: int) -> None:
        super().__init__()
        self.weight = nn.Linear(256, 1)
        self.spec = spec
        self.slower = spec.ms / 1e3 if spec.fault == "slow_step" and spec.rank == rank else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.busy_ms:
            burn(self.spec.busy_ms / 1e3)
        time.sleep((self.spec.step_ms - self.spec.busy_ms) / 1e3 + self.slower)
        return self.weight(x[:, :256])


class Way:
    """From a batch to what the loss takes: with a copy that has a name."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    @stage("copy")
    def copy(self, batch: object) -> object:
        if self.fault.spec.fault != "block":
            self.fault.at("copy")
        return batch

    def __call__(self, model: nn.Module, batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fault.spec.fault == "block":
            with stage("copy"):
                time.sleep(self.fault.spec.ms / 1e3)
        x, y, *_ = self.copy(batch)
        if isinstance(x, Slow):
            x = x.value
        return model(x), y


def plant_exchange(spec: Spec) -> None:
    """Every bucket of gradients takes longer on its way."""
    if spec.fault != "exchange":
        return
    before = DistributedDataParallel.__init__

    def slow(
        state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        time.sleep(spec.ms / 1e3)
        tensor = bucket.buffer().div_(torch.distributed.get_world_size())
        return (
            torch.distributed.all_reduce(tensor, async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    # DDP looks at them
    slow.__annotations__ = {
        "bucket": torch.distributed.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }

    def init(self: DistributedDataParallel, *args: object, **kwargs: object) -> None:
        before(self, *args, **kwargs)
        self.register_comm_hook(None, slow)

    DistributedDataParallel.__init__ = init


def made(spec: Spec, rank: int) -> tuple[Fault, Dataset, Collate]:
    fault = Fault(spec, rank)
    if spec.kind == "plain":
        size = int(spec.ms) if spec.fault == "images" else 64
        folder = f"{os.environ['DOCTOR_FOLDER']}/images-{size}"
        return fault, Plain(fault, folder), Collate(fault)
    return fault, Named(fault), Collate(fault)


def loader_of(
    spec: Spec, dataset: Dataset, collate: Collate, batch: int, sampler: object = None
) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=batch,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=spec.loaders,
        collate_fn=collate,
    )


def ahead(loader: DataLoader, stop: threading.Event) -> Iterator[object]:
    """Epoch after epoch, received in a thread, one batch ahead; as torch itself does where it pins
    memory, and ronde everywhere.
    """
    found: queue.Queue[object] = queue.Queue(1)

    def receive() -> None:
        while True:
            for batch in loader:
                while not stop.is_set():
                    with contextlib.suppress(queue.Full):
                        found.put(batch, timeout=0.1)
                        break
                if stop.is_set():
                    return

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        while True:
            yield found.get()
    finally:
        stop.set()
        thread.join()


def plain(spec: Spec, seconds: float) -> None:
    """A plain loop, on one process or as many as torch starts."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        torch.distributed.init_process_group("gloo")
        torch.set_num_threads(1)
        # The bucket is shared by the loaders of all workers, which are not children of one another
        # here: each gets its part.
    plant_exchange(spec)
    fault, dataset, collate = made(spec, rank)
    model: nn.Module = Accelerator(spec, rank)
    way = Way(fault)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = torch.utils.data.DistributedSampler(dataset) if size > 1 else None
    loader = loader_of(spec, dataset, collate, spec.batch, sampler)

    def endless() -> Iterator[object]:
        if spec.loaders:
            yield from ahead(loader, threading.Event())
        while True:
            yield from loader

    def step(batch: object) -> None:
        optimizer.zero_grad()
        output, target = way(wrapped, batch)
        nn.functional.mse_loss(output, target).backward()
        optimizer.step()

    def timed(batches: object, warm: int) -> float:
        for _ in range(warm):
            step(next(batches))
        began, count = time.perf_counter(), 0
        steps = 0
        while True:
            step(next(batches))
            count += 1
            if count % 4 == 0:
                done = torch.tensor(float(time.perf_counter() - began > seconds))
                if size > 1:
                    torch.distributed.all_reduce(done)
                if done > 0:
                    break
            steps = count
        return (steps + 1) * spec.batch * size / (time.perf_counter() - began)

    reader = endless()
    real = timed(reader, 14)
    held = [next(reader) for _ in range(4)]
    reader.close()
    synthetic = timed(itertools.cycle(held), 4)
    if rank == 0:
        print(json.dumps({"real": real, "synthetic": synthetic}), flush=True)
    if size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def with_ronde(spec: Spec) -> None:
    import ronde

    rank = ronde.world().rank
    plant_exchange(spec)
    fault, dataset, collate = made(spec, rank)
    model = Accelerator(spec, rank)
    run = ronde.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        loader_of(spec, dataset, collate, spec.batch * spec.workers),
        loss=nn.functional.mse_loss,
        forward=Way(fault),
    )
    for batch in run.batches():
        run.step(batch)


if __name__ == "__main__":
    given = Spec(**json.loads(sys.argv[2]))
    # on a machine that others use too: in a scheduling group of its own
    if os.environ.get("DOCTOR_FAVOURED"):
        with open("/proc/self/autogroup", "w") as group:
            group.write("-15")
        os.nice(-15)
    plain(given, float(os.environ.get("DOCTOR_SECONDS", "3"))) if sys.argv[
        1
    ] == "plain" else with_ronde(given)
