"""A script's own ``batch_sampler``: each of its batches is a global batch, on any number of workers,
and after a resume.
"""

from __future__ import annotations

import json
import random
import textwrap

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import ronde
from feeding import take
from processes import python, ronde_run
from ronde.plan import shares
from ronde.world import ArgumentError

SCRIPT = textwrap.dedent(
    """
    import json, os, random, sys, torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader
    import ronde

    NAME, STOP, MICRO = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None
    LENGTHS = [1 + (7 * i) % 5 for i in range(41)]

    class Lines(torch.utils.data.Dataset):  # sequences of different lengths
        def __len__(self): return 41
        def __getitem__(self, i):
            g = torch.Generator().manual_seed(i)
            return torch.randn(LENGTHS[i], 3, generator=g, dtype=torch.float64), i

    class Buckets:  # of one length, at most 13 tokens: shuffled in place, epochs differ in length
        def __init__(self):
            self.buckets = [[i for i in range(41) if LENGTHS[i] == n] for n in range(1, 6)]
        def __iter__(self):
            batches = []
            for bucket in self.buckets:
                random.shuffle(bucket)
                most = max(1, random.choice([7, 13]) // LENGTHS[bucket[0]])
                batches += [bucket[k:k + most] for k in range(0, len(bucket), most)]
            random.shuffle(batches)
            return iter(batches)

    def collate(samples):
        assert len({len(x) for x, _ in samples}) == 1, "a batch of several lengths"
        return torch.stack([x for x, _ in samples]), torch.tensor([i for _, i in samples])

    torch.manual_seed(2)
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = open(f"{NAME}.{os.environ.get('RANK', 0)}", "a", buffering=1)

    def loss(output, i):
        return F.cross_entropy(output.mean(1), i % 2)

    def forward(model, batch):
        if model.training:
            seen.write(json.dumps([run.state.epoch, run.state.step, batch[1].tolist()]) + "\\n")
        return model(batch[0]), batch[1]

    run = ronde.distribute(model, optimizer, DataLoader(Lines(), batch_sampler=Buckets(), collate_fn=collate),
                           loss=loss, forward=forward, seed=4, save_every=2, async_save=False, micro_batch=MICRO)
    for epoch in run.epochs(3):
        for batch in run.batches():
            value = run.step(batch)
            run.log({"loss": float(value), "steps": run.steps_per_epoch})
            if run.state.step == STOP:
                run.port.parts.watcher.flush()
                os._exit(9)
        result = run.evaluate(DataLoader(Lines(), batch_sampler=Buckets(), collate_fn=collate))
        run.log({"evaluated": result["loss"]})
    """
)


def losses(folder, name) -> dict[int, float]:
    record = [json.loads(line) for line in (folder / "runs" / name / "record.jsonl").open()]
    return {e["step"]: e["values"]["loss"] for e in record if "loss" in e.get("values", {})}


def logged(folder, name, key) -> list:
    record = [json.loads(line) for line in (folder / "runs" / name / "record.jsonl").open()]
    return [e["values"][key] for e in record if key in e.get("values", {})]


def batches(folder, name, ranks) -> dict[tuple[int, int], list[int]]:
    """Samples of each (epoch, step), over all ranks; stand-ins are counted once."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(ranks):
        for line in (folder / f"{name}.{rank}").open():
            epoch, step, ids = json.loads(line)
            found.setdefault((epoch, step), []).extend(ids)
    return {k: sorted(set(v)) for k, v in found.items()}


def test_the_same_training_on_any_number_of_workers_and_after_a_resume(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def train(workers, name, stop=-1, micro=0, *options):
        done = ronde_run(
            ["run", "-q", "-n", str(workers), "--name", name, *options]
            + ["train.py", name, str(stop), str(micro)],
            tmp_path,
        )
        assert (done.returncode == 0) == (stop < 0), done.stderr
        return losses(tmp_path, name)

    one = train(1, "one")
    seen = batches(tmp_path, "one", 1)
    per_epoch = [[b for (epoch, _), b in seen.items() if epoch == e] for e in range(3)]
    assert len({len(b) for b in seen.values()}) > 2, "one size of batches only"
    assert len({len(p) for p in per_epoch}) > 1, "each epoch has as many batches"
    assert logged(tmp_path, "one", "steps") == [len(p) for p in per_epoch for _ in p]

    stop = len(per_epoch[0]) + 3  # in the middle of the second epoch
    train(3, "again", stop, 2, "--plan", "shard")
    found = train(2, "again", -1, 0, "--resume")
    assert found.keys() == one.keys()
    assert all(abs(found[s] - one[s]) < 1e-12 for s in one)
    assert batches(tmp_path, "again", 3) == seen
    evaluated = [logged(tmp_path, name, "evaluated") for name in ("again", "one")]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-12)

    # an independent loop over the same batches
    script = SCRIPT.partition("run = ronde.distribute")[0].replace("import ronde", "")
    script += textwrap.dedent(
        f"""
        data = Lines()
        for ids in {[b for _, b in sorted(seen.items())]}:
            x, i = collate([data[k] for k in ids])
            optimizer.zero_grad()
            value = loss(model(x), i)
            value.backward()
            optimizer.step()
            print(float(value))
        """
    )
    (tmp_path / "plain.py").write_text(script)
    plain = python(["plain.py", "plain", "-1", "0"], tmp_path).stdout.split()
    assert all(abs(float(p) - one[s]) < 1e-12 for s, p in enumerate(plain, 1))
    assert len(plain) == len(one)


DATA = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))


class Own:
    """Every variety of own randomness."""

    def __init__(self, way):
        self.way = way
        self.epoch = self.passes = 0
        self.generator = torch.Generator()
        self.numpy = np.random.default_rng(1)
        self.random = random.Random(2)
        self.ids = list(range(10))

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if self.way == "torch":
            ids = torch.randperm(10).tolist()
        elif self.way == "generator":
            ids = torch.randperm(10, generator=self.generator).tolist()
        elif self.way == "numpy":
            ids = self.numpy.permutation(10)
        elif self.way == "in place":
            self.random.shuffle(self.ids)
            ids = self.ids
        elif self.way == "epoch":
            ids = np.random.default_rng(self.epoch).permutation(10)
        elif self.way == "counter":
            self.passes += 1
            ids = np.random.default_rng(self.passes).permutation(10)
        else:
            ids = np.random.default_rng().permutation(10)
        for k in range(0, 10, 3):
            yield list(ids[k : k + 3])


def orders(loader, epochs=(0, 1, 2, 3)):
    taken = take(loader, seed=3)
    return taken, [taken.order.ids(e, 0, 10).tolist() for e in epochs]


@pytest.mark.parametrize("way", ["torch", "generator", "numpy", "in place", "epoch", "counter"])
def test_own_randomness_follows_from_seed_and_epoch(way):
    sampler = Own(way)
    before = torch.get_rng_state()
    taken, found = orders(DataLoader(DATA, batch_sampler=sampler))
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(f) for f in found}) == 4, "two epochs have one order"
    assert all(sorted(f) == list(range(10)) for f in found)
    # as a resumed process draws them, whatever was read before
    _, backwards = orders(DataLoader(DATA, batch_sampler=Own(way)), (3, 1, 2, 0))
    assert [backwards[i] for i in (3, 1, 2, 0)] == found
    assert (taken.batch_size, taken.order.sizes(0), taken.drop_last) == (3, [3, 3, 3, 1], False)
    assert sampler.passes == 0, "the script's own sampler was used up"


class Gives:
    def __init__(self, *batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Endless:
    def __iter__(self):
        while True:
            yield [1, 2]


class Ranked(BatchSampler):
    num_replicas = 2


def distribute(loader, **options):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ronde.distribute(
        model, optimizer, loader, loss=lambda output, i: output.mean(), **options
    )


REFUSED = [
    (Own("unseeded"), {}, "gives other batches each time it is asked for epoch 0"),
    (Gives([0, 1], []), {}, "as batch 1 of epoch 0, no samples"),
    (Gives([0, 10]), {}, "the indices 0 to 10, but the data set has 10 samples"),
    (Gives([0, -1]), {}, "the indices -1 to 0, but the data set has 10"),
    (Gives([0, (1, 2)]), {}, "expected a list of whole numbers"),
    (Gives(3), {}, "expected a list of whole numbers"),
    (Gives(), {}, "gave no batches in epoch 0"),
    (Endless(), {}, "does not end"),
    (Ranked(RandomSampler(DATA), 2, False), {}, "num_replicas=1 and rank=0"),
    (Own("torch"), {"batch_size": 4}, "batch_size=4 contradicts the batch_sampler"),
    (Own("torch"), {"drop_last": True}, "drop_last=True contradicts the batch_sampler"),
    (Own("torch"), {"shuffle": False}, "shuffle=False contradicts the batch_sampler"),
    (Own("torch"), {"batch": "grow"}, "batch='grow' needs global batches of one size"),
]


@pytest.mark.parametrize(("sampler", "options", "text"), REFUSED)
def test_refused_by_name(sampler, options, text, monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    with pytest.raises(ArgumentError, match=text):
        distribute(DataLoader(DATA, batch_sampler=sampler), **options)


def test_changed_by_the_script(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    sampler = Own("torch")
    run = distribute(DataLoader(DATA, batch_sampler=sampler))
    with pytest.raises(ArgumentError, match=r"changed by the script: Own\.way is not what it was"):
        for _ in run.epochs(2):
            sampler.set_epoch(run.state.epoch)  # this is fine
            for batch in run.batches():
                run.step(batch)
            sampler.way = "numpy"
    assert run.state.step == 4
    with pytest.raises(ArgumentError, match="DataLoader\\(dataset, batch_sampler"):
        distribute(DataLoader(DATA, batch_size=None, sampler=Gives([0, 1])), batch_size=2)


def test_shares_follow_the_ends():
    ends = [3, 4, 10]
    for size in (1, 2, 3):
        found = [list(shares(0, 0, 10, 6, r, size, 2, ends=ends)) for r in range(size)]
        for step in zip(*found, strict=True):
            assert len({(s.start, s.stop, len(s.micro)) for s in step}) == 1
            positions = [p for s in step for low, high in s.micro for p in range(low, high)]
            assert positions == list(range(step[0].start, step[0].stop))
        assert [s.stop for s in found[0]] == ends
        assert list(shares(0, 3, 10, 6, 0, size, 2, ends=ends)) == found[0][1:]
