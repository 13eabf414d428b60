"""Run by every rank: trains under each reducer and compares with one plain process."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

os.environ["RONDE_RUNS"] = "none"
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if SIZE == 4:  # two nodes with two workers each
    os.environ |= {"GROUP_RANK": str(RANK // 2), "LOCAL_RANK": str(RANK % 2)}
    os.environ["LOCAL_WORLD_SIZE"] = "2"

import ronde  # noqa: E402
from ronde.exchange import (  # noqa: E402
    Exchange,
    Members,
    build_reducer,
    collective,
    compressed,
    servers,
    worker_servers,
)
from ronde.plan import Plan, parse_reducer  # noqa: E402
from ronde.world import WorldError  # noqa: E402
from ronde.world.connect import connect  # noqa: E402

collective.SHARD_BYTES = servers.SHARD_BYTES = (
    0  # so that servers have several buckets in flight too
)
# and so do reducers with error feedback
compressed.TopK.bucket_mib = compressed.LowRank.bucket_mib = 0.001

SAMPLES, BATCH, EPOCHS = 37, 6, 2  # the last batch has one sample: shares are uneven and empty


def model(dtype=torch.float64):
    torch.manual_seed(1)
    made = nn.Sequential(
        nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)
    )
    return made.to(dtype)


def rows(n=SAMPLES, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=g, dtype=torch.float64)
    return TensorDataset(x.to(dtype), (x @ torch.randn(5, 3, generator=g).double()).argmax(1))


def weighted(output, target):
    """A sum and its weight, which differ from batch to batch."""
    weight = target.to(output.dtype) + 1
    return (F.cross_entropy(output, target, reduction="none") * weight).sum(), weight.sum()


def optimizer_of(one):
    return torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)


def plain(loss=F.cross_entropy):
    one, data = model(), rows()
    optimizer, losses = optimizer_of(one), []
    for _ in range(EPOCHS):
        for i in range(0, SAMPLES, BATCH):
            x, y = data[i : i + BATCH]
            value = loss(one(x), y)
            value = value[0] / value[1] if isinstance(value, tuple) else value
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(float(value))
    return one, losses


def train(
    reducer,
    loss=F.cross_entropy,
    epochs=EPOCHS,
    shard="none",
    dtype=torch.float64,
    n=SAMPLES,
    lr=None,
    exact_loss=False,
    thaw=False,
):
    """``thaw``: in the midst of an epoch the first layer is thawed, and the last one frozen."""
    one = model(dtype)
    one[0].requires_grad_(not thaw)
    optimizer = optimizer_of(one)
    if lr:
        optimizer.param_groups[0]["lr"] = lr
    plan = Plan(workers=SIZE, reducer=reducer, shard=shard)
    run = ronde.distribute(
        one, optimizer, rows(n, dtype), loss=loss, batch_size=BATCH, shuffle=False, plan=plan
    )
    losses, whole = [], rows(n, dtype)
    for _ in run.epochs(epochs):
        for batch in run.batches():
            if thaw and run.state.step == 4:
                one[0].requires_grad_(True)
                one[4].requires_grad_(False)
                frozen = one[4].weight.detach() / SIZE
            at = run.state.epoch_samples
            if exact_loss:  # of the global batch with the weights that all workers have
                with torch.no_grad():
                    x, y = whole[at : at + BATCH]
                    value = loss(one(x), y)
                    expected = value[0] / value[1] if isinstance(value, tuple) else value
            losses.append(float(run.step(batch)))
            if exact_loss:
                assert abs(losses[-1] - float(expected)) <= 1e-12, (reducer, len(losses))
    if thaw and "local" in reducer:
        torch.distributed.all_reduce(frozen)
        assert torch.allclose(one[4].weight, frozen, rtol=1e-12), reducer  # no worker's own
    return one, losses, run


def apart(a, b):
    return max(
        float((p - q).abs().max()) / max(1.0, float(q.abs().max()))
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def same_everywhere(one, what):
    flat = torch.cat([p.detach().reshape(-1) for p in one.parameters()])
    other = flat.clone()
    torch.distributed.broadcast(other, 0)
    assert torch.equal(flat, other), f"{what}: rank {RANK} has other weights than rank 0"


def falls(losses):
    half = len(losses) // 2
    return sum(losses[half:]) < 0.95 * sum(losses[:half])


def exact():
    # small buckets, so that several are in flight
    names = ["ring:0.001", "hierarchical:0.001", "servers:0.001", "auto"]
    for loss in (F.cross_entropy, weighted):
        reference, expected = plain(loss)
        for name in names:
            one, losses, run = train(name, loss)
            gap = apart(one, reference)
            assert gap <= 1e-10, f"{name}: {gap}"
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-10, name
            same_everywhere(one, name)
            if name == "auto":
                assert run.port.strategy.note.startswith("reducer auto: "), run.port.strategy.note
    one, losses, _ = train("servers:0.001", shard="optimizer")
    assert apart(one, plain()[0]) <= 1e-10


def lossy():
    """The loss and its weight, which ride with the gradients, are exact in every step."""
    first = plain()[1][0]
    for name in ("fp16:0.001", "bf16:0.001", "topk:0.05", "powersgd:2"):
        train(name, weighted, epochs=1, exact_loss=True)
        one, losses, _ = train(name, exact_loss=True)
        assert abs(losses[0] - first) <= 1e-12, (name, losses[0], first)
        same_everywhere(one, name)
        assert falls(losses), (name, losses)
        if name.startswith(("fp16", "bf16")):
            bound = 2e-3 if name.startswith("fp16") else 2e-2
            assert apart(one, plain()[0]) <= bound, (name, apart(one, plain()[0]))
        one, _, _ = train(name, dtype=torch.bfloat16)  # sums are in float32
        same_everywhere(one, f"{name} in bfloat16")
    for name in ("local:3", "post-local:3:4", "diloco:3"):
        one, losses, _run = train(name)
        same_everywhere(one, name)  # at the end of an epoch
        assert falls(losses), (name, losses)
        one, _, _ = train(name, thaw=True)
        same_everywhere(one, f"{name}, thawed")
        assert not torch.equal(one[0].weight, model()[0].weight)
    # one step alone, then the mean: the mean of gradients under SGD without momentum
    one, _, _ = train("local:1")
    same_everywhere(one, "local:1")


def types():
    """Means are right in every type; those of 16 bits are sums in float32, rounded once."""
    members = Members.of(connect())
    kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    complex64 = [torch.complex64]
    for name in ("servers", "hierarchical", "ring"):
        exchange = Exchange(build_reducer(parse_reducer(name), members))
        flats, means = [], []
        for dtype in kinds + complex64 * (name == "servers"):
            for n in (1, 3, 1000, 100_003):
                g = torch.Generator().manual_seed(n)
                everyone = torch.randn(SIZE, n, generator=g, dtype=torch.float64).to(dtype)
                if dtype == torch.float16:
                    everyone *= 60_000 / everyone.abs().max()  # a sum would be infinite
                wide = torch.complex128 if dtype.is_complex else torch.float64
                means.append(everyone.to(wide).mean(0).to(dtype))
                flats.append(everyone[RANK].clone())
        for future in [exchange.average(flat, i) for i, flat in enumerate(flats)]:
            future.wait()
        exchange.check()
        for flat, mean in zip(flats, means, strict=True):
            if flat.itemsize > 2:
                torch.testing.assert_close(flat, mean)
            elif name != "ring" or SIZE == 2:  # gloo itself adds in 16 bits
                assert torch.equal(flat, mean), (name, flat.dtype, flat.numel())
        exchange.reducer.close()


def _in_flight(mib):
    """Buckets of one whole number each, on servers of the workers, and the first bucket's mean."""
    exchange = Exchange(build_reducer(parse_reducer("servers"), Members.of(connect())))
    assert isinstance(exchange.reducer, worker_servers.WorkerServers)
    flats = [torch.full((mib << 18,), RANK + 1.0) for _ in range(3)]
    return exchange, flats, [exchange.average(flat, i) for i, flat in enumerate(flats)]


def leave():
    """Who has its means has left nothing that others wait for, however slowly one receives."""
    servers.CHUNKS_OUT = 10_000
    receive = servers.receive_into

    def slowly(connection, view):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        time.sleep(0.01)
        receive(connection, view)

    if RANK == 3:
        servers.receive_into = slowly
    exchange, flats, futures = _in_flight(16)
    for future in futures:
        future.wait()
    exchange.check()
    assert all((flat == (SIZE + 1) / 2).all() for flat in flats)
    os._exit(0)


def lost():
    """Who dies in the middle is named; then threads and port end."""
    before = threading.active_count()
    exchange, _, futures = _in_flight(32)
    if RANK == 1:
        os._exit(0)
    for future in futures:
        future.wait()
    try:
        raise AssertionError(exchange.check())
    except WorldError as error:
        assert str(error) == "worker 1 is gone: Connection closed by peer.", error
    time.sleep(2)  # so that no other finds this one gone
    reducer = exchange.reducer
    host, port = reducer.place
    reducer.close()
    limit = time.monotonic() + 60
    while threading.active_count() > before + len(futures):  # the lanes
        assert time.monotonic() < limit, threading.enumerate()
        time.sleep(0.01)
    with socket.socket() as late:
        assert late.connect_ex((host, port)) == errno.ECONNREFUSED
    os._exit(0)


def feedback():
    """Error feedback makes a lossy reducer train as the exact one; without it, it trails."""

    def final(name, lr):
        _one, losses, _ = train(name, epochs=60, n=36, lr=lr)
        return sum(losses[-6:]) / 6

    target = final("ring", 0.02)
    for name in ("topk:0.02", "powersgd:1"):
        on, off = final(name, 0.02), final(f"{name}:no-feedback", 0.02)
        print(f"{name}: ring {target:.4f}, with feedback {on:.4f}, without {off:.4f}", flush=True)
        assert target < off and on - target < 0.25 * (off - target), (name, target, on, off)


if __name__ == "__main__":
    for part in sys.argv[1:]:
        globals()[part]()
    if RANK == 0:
        print("DONE", flush=True)
