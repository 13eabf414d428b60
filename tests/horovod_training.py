"""Run by each of two ranks under ``ronde horovodrun``: optimizers against one process, in float64.

The oracle is a plain loop over both ranks' batches in this process.
"""

from __future__ import annotations

import copy
import time
import warnings

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
N, R = hvd.size(), hvd.rank()
assert N == 2
torch.set_default_dtype(torch.float64)
X = [torch.randn(12, 6, 4, generator=torch.Generator().manual_seed(r)) for r in range(N)]


def net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1))


def loss_of(model, rank, step):
    return model(X[rank][step]).pow(2).mean()


def plain(steps=4, passes=1, optimizer=lambda m: sgd(m), loss=loss_of, model=net, total=1.0 / N):
    """Mean (or ``total`` times the sum) of the ranks' gradients, as one process computes it."""
    one = model()
    opt = optimizer(one)
    for step in range(steps):
        opt.zero_grad()
        for k in range(passes):
            for rank in range(N):
                (loss(one, rank, step * passes + k) * total).backward()
        for p in one.parameters():
            if p.grad is None:  # unused on all ranks: Horovod sends zeros
                p.grad = torch.zeros_like(p)
        opt.step()
    return one


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def train(steps=4, passes=1, optimizer=lambda m: sgd(m), loss=loss_of, model=net, **options):
    mine = model(1 if R == 0 else 2)
    hvd.broadcast_parameters(mine.state_dict(), root_rank=0)
    opt = optimizer(mine)
    opt = hvd.DistributedOptimizer(
        opt, mine.named_parameters(), backward_passes_per_step=passes, **options
    )
    for step in range(steps):
        opt.zero_grad()
        for k in range(passes):
            loss(mine, R, step * passes + k).backward()
        opt.step()
    return mine


def apart(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def same(a, b, within=1e-12):
    assert apart(a, b) <= within, apart(a, b)


class Doubling(hvd.Compression.none):
    """A compressor of the script's own."""

    @staticmethod
    def compress(tensor):
        return tensor.double() * 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor / 2).to(ctx)


one = plain()
same(train(), one)
same(train(groups=2), one)
same(train(num_groups=3), one)
same(train(gradient_predivide_factor=2.0), one)
same(train(compression=Doubling), one)
same(
    train(optimizer=lambda m: torch.optim.AdamW(m.parameters())),
    plain(optimizer=lambda m: torch.optim.AdamW(m.parameters())),
)
same(train(op=hvd.Sum), plain(total=1.0))


class Nested(torch.optim.SGD):
    """Its own step calls its parent's, to which torch gives hooks as well."""

    def step(self, closure=None):
        return super().step(closure)


def nested(model):
    return Nested(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


same(train(op=hvd.Sum, optimizer=nested), plain(total=1.0))
same(train(passes=3), plain(passes=3))
close = apart(train(compression=hvd.Compression.fp16), one)
assert 0.0 < close < 1e-2, close


def branch(model, rank, step):
    """Other layers on each rank, in another order: no gradient for some of them."""
    hidden = model[1](model[0](X[rank][step]))
    return (hidden if (rank + step) % 2 else model[2](hidden)).pow(2).mean()


same(train(loss=branch), plain(loss=branch))

# a scheduler that was made before, clipping, a closure, the ragged end of an accumulation
mine, single = net(), net()
opt, other = sgd(mine), sgd(single)
schedule, plan = (torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (opt, other))
opt = hvd.DistributedOptimizer(opt, mine.named_parameters())
for step in range(3):
    opt.zero_grad()
    loss_of(mine, R, step).backward()
    opt.synchronize()
    nn.utils.clip_grad_norm_(mine.parameters(), 0.01)
    with opt.skip_synchronize():
        opt.step()
    schedule.step()
    other.zero_grad()
    sum(loss_of(single, r, step) / N for r in range(N)).backward()
    nn.utils.clip_grad_norm_(single.parameters(), 0.01)
    other.step()
    plan.step()


def closure():
    opt.zero_grad()
    loss = loss_of(mine, R, 3)
    loss.backward()
    return loss


opt.step(closure)
other.zero_grad()
sum(loss_of(single, r, 3) / N for r in range(N)).backward()
other.step()
same(mine, single)

loss_of(mine, R, 4).backward()
opt.synchronize()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    opt.step()
    hvd.allreduce(torch.ones(1), average=True)
    hvd.allreduce_(torch.ones(1), average=True)
assert [w.filename for w in caught] == [__file__] * 3, caught
assert "without optimizer.skip_synchronize()" in str(caught[0].message)
loss_of(mine, R, 5).backward()
for call, text in (
    (opt.zero_grad, "zero_grad"),
    (lambda: loss_of(mine, R, 5).backward(), "backward_passes"),
):
    try:
        call()
    except AssertionError as error:
        assert text in str(error)
    else:
        raise AssertionError(text)
opt.step()

# gradients that are dropped while they are under way
mine, single = net(), net()
opt, other = hvd.DistributedOptimizer(sgd(mine)), sgd(single)
for step in range(2):
    opt.zero_grad()
    if step == 1:
        if R == 1:
            time.sleep(0.3)  # rank 0's stay under way
        loss_of(mine, R, 7).backward()
        opt.set_backward_passes_per_step(1)
        opt.zero_grad()
    loss_of(mine, R, step).backward()
    opt.step()
    other.zero_grad()
    sum(loss_of(single, r, step) / N for r in range(N)).backward()
    other.step()
same(mine, single)

mine = net()
opt = hvd.DistributedOptimizer(sgd(mine), backward_passes_per_step=4)
for step in range(6):  # the last accumulation has two passes
    loss_of(mine, R, step).backward()
    if step in (3, 5):
        opt.step()
        opt.zero_grad()
single = net()
other = sgd(single)
for steps in (range(4), range(4, 6)):
    other.zero_grad()
    sum(loss_of(single, r, s) / N for r in range(N) for s in steps).backward()
    other.step()
same(mine, single)

mine, single = net(), net()
opt, other = hvd.DistributedOptimizer(nested(mine), op=hvd.Sum), sgd(single)
for step in range(2):

    def both_hooks(step=step):
        opt.zero_grad()
        loss = loss_of(mine, R, step)
        loss.backward()
        return loss

    opt.step(both_hooks)
    other.zero_grad()
    sum(loss_of(single, r, step) for r in range(N)).backward()
    other.step()
same(mine, single)

# layers that are unfrozen, and frozen again
mine, single = net(), net()
for each in (mine, single):
    each[0].requires_grad_(False)
opt, other = hvd.DistributedOptimizer(sgd(mine), mine.named_parameters()), sgd(single)
for step in range(6):
    for each in (mine, single):
        each[0].requires_grad_(2 <= step < 4)
    opt.zero_grad()
    loss_of(mine, R, step).backward()
    opt.step()
    other.zero_grad()
    sum(loss_of(single, r, step) / N for r in range(N)).backward()
    other.step()
same(mine, single)

# two optimizers of one backward pass, stepped in turn; sparse gradients
a, b = net(1), net(3)
first, second = (hvd.DistributedOptimizer(sgd(m), m.named_parameters()) for m in (a, b))
c, d = net(1), net(3)
third, fourth = sgd(c), sgd(d)
for step in range(4):
    for o in (first, second, third, fourth):
        o.zero_grad()
    (loss_of(a, R, step) * b(X[R][step]).mean()).backward()
    sum(loss_of(c, r, step) * d(X[r][step]).mean() / N for r in range(N)).backward()
    for o in (second, first, third, fourth):
        o.step()
same(a, c)
same(b, d)


def words(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(10, 3, sparse=True))


def look_up(model, rank, step):
    return model(torch.tensor([rank, step, 5])).pow(2).sum()


def sparse_sgd(m):
    return torch.optim.SGD(m.parameters(), lr=0.1)


for options in ({}, {"sparse_as_dense": True}):
    same(
        train(model=words, loss=look_up, optimizer=sparse_sgd, **options),
        plain(model=words, loss=look_up, optimizer=sparse_sgd),
    )

# batch normalization over both ranks' batches
torch.manual_seed(5)
normed = nn.Sequential(nn.Linear(4, 3), hvd.SyncBatchNorm(3), nn.Tanh())
whole = nn.Sequential(copy.deepcopy(normed[0]), nn.BatchNorm1d(3), nn.Tanh())
opt, other = hvd.DistributedOptimizer(sgd(normed), normed.named_parameters()), sgd(whole)
for step in range(3):
    opt.zero_grad()
    normed(X[R][step]).pow(2).mean().backward()
    opt.step()
    other.zero_grad()
    whole(torch.cat([X[r][step] for r in range(N)])).pow(2).mean().backward()
    other.step()
same(normed, whole)

# the state of rank 0, in an optimizer that has none; joined ranks contribute zeros
mine = net()
opt = torch.optim.Adam(mine.parameters(), lr=0.1 if R == 0 else 0.2, betas=(0.5, 0.6 + R / 10))
if R == 0:
    loss_of(mine, 0, 0).backward()
    opt.step()
hvd.broadcast_optimizer_state(opt, root_rank=0)
assert opt.param_groups[0]["lr"] == 0.1 and opt.param_groups[0]["betas"] == (0.5, 0.6)
momenta = torch.cat([s["exp_avg"].flatten() for s in opt.state_dict()["state"].values()])
both = hvd.allgather(momenta[None])
assert torch.equal(both[0], both[1]) and both.abs().sum() > 0

hvd.shutdown()
hvd.init()
mine, single = net(), net()
opt, other = hvd.DistributedOptimizer(sgd(mine), mine.named_parameters()), sgd(single)
for epoch in range(2):
    count = 3 if epoch == R else 1  # the other rank has fewer batches
    for step in range(count):
        opt.zero_grad()
        loss_of(mine, R, step).backward()
        opt.step()
    assert hvd.join() == epoch
    hvd.broadcast_parameters(mine.state_dict(), root_rank=epoch)
    hvd.broadcast_optimizer_state(opt, root_rank=epoch)
    for step in range(3):
        other.zero_grad()
        ranks = [r for r in range(N) if step < (3 if r == epoch else 1)]
        sum(loss_of(single, r, step) / N for r in ranks).backward()
        other.step()
same(mine, single)
for step in range(2):
    opt.zero_grad()
    loss_of(mine, R, step).backward()
    opt.step()

# an error in the middle of a step: both start anew
opt.zero_grad()
loss_of(mine, R, 0).backward()
hvd.shutdown()
hvd.init()
opt.load_state_dict(opt.state_dict())
same(train(), one)
print(f"rank {R}: training is the same", flush=True)
