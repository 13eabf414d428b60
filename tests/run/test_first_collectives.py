"""Collectives that the script calls itself: until the first steps are done, calls that do not fit
together are an error on every rank, and calls that do give torch's numbers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_gather as imported
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked, ronde_run
from ronde.run import first_collectives

TORCHS_OWN = dict(vars(dist))


def refused(call) -> list:
    start = time.monotonic()
    try:
        call()
    except ronde.WorldError as error:
        return [str(error), time.monotonic() - start < 20]
    return ["nothing", True]


def begin(plan: str = "replicate"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8))
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=g), torch.randn(48, 8, generator=g))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ronde.distribute(model, optimizer, data, loss=F.mse_loss, plan=plan, batch_size=12)


def fitting(rank: int, size: int, pair) -> list:
    """What each collective gives, called as torch means it: also where the ranks differ lawfully."""
    found = []
    g = torch.Generator().manual_seed(rank)

    def some(*shape):
        return torch.randn(shape, generator=g)

    a = some(5)
    dist.all_reduce(a)
    found.append(a)
    a = some(5)
    work = dist.all_reduce(a, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    found.append(a)
    # one element is one element, the operation has a default, and the place is each rank's own
    if rank:
        a = some()
        dist.all_reduce(a, op=dist.ReduceOp.SUM)
    else:
        a = some(1)
        dist.all_reduce(a)
    found.append(a.reshape(1))
    for root in range(size):
        a = some(2, 3)
        if rank == root:
            dist.broadcast(a, src=root)
        else:
            dist.broadcast(a, group_src=root)
        found.append(a)
    a = some(3)
    dist.reduce(a, 1)
    found.append(a if rank == 1 else torch.zeros(0))
    parts = [torch.empty(4) for _ in range(size)]
    imported(parts, some(4))
    found += parts
    whole = torch.empty(size * 4)
    dist.all_gather_into_tensor(whole, some(4))
    found.append(whole)
    a = torch.empty(4)
    dist.reduce_scatter_tensor(a, some(size * 4))
    found.append(a)
    dist.reduce_scatter(a, [some(4) for _ in range(size)])
    found.append(a)
    parts = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(some(2), parts, dst=0)
    found += parts or []
    a = torch.empty(2)
    dist.scatter(a, [some(2) for _ in range(size)] if rank == 1 else None, src=1)
    found.append(a)
    a = torch.empty(size * 2, 3)
    dist.all_to_all_single(a, some(size * 2, 3))
    found.append(a)
    # rank r sends r + s rows to rank s, and gets as many
    rows = [rank + other for other in range(size)]
    a = torch.empty(sum(rows), 2)
    dist.all_to_all_single(a, some(sum(rows), 2), rows, rows)
    found.append(a)
    objects = [None] * size
    dist.all_gather_object(objects, "r" * rank)
    found.append(torch.tensor([len(each) for each in objects]))
    objects = [rank, some(2)] if rank == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1)
    found.append(torch.tensor([objects[0], len(objects[1])]))
    objects = [None] * size if rank == 0 else None
    dist.gather_object(rank, objects, dst=0)
    found.append(torch.tensor(objects or [0]))
    mine = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, src=0)
    found.append(torch.tensor(mine))
    if pair is not None and rank < 2:
        a = some(3)
        dist.all_reduce(a, group=pair)
        found.append(a)
    if rank < 2:  # a rank outside of it passes, as torch lets it
        dist.barrier(pair)
    dist.barrier()
    # not called by the script's code, and not by its main thread
    found.append(torch.distributed.nn.functional.all_reduce(some(3)))
    a = some(2)
    thread = threading.Thread(target=lambda: dist.all_reduce(a))
    thread.start()
    thread.join()
    found.append(a)
    return found


def either(rank: int, here, there):
    return here() if rank == 0 else there()


def mismatches(rank: int, size: int, pair) -> dict[str, list]:
    """Name of a case -> what the call raised, here."""
    last = int(rank == size - 1)
    ones, empty = torch.ones, torch.empty
    calls = {
        "shape": lambda: dist.all_reduce(ones(4 + last)),
        "type": lambda: dist.all_reduce(ones(4, dtype=torch.float64 if last else torch.float32)),
        "operation": lambda: dist.all_reduce(
            ones(4), dist.ReduceOp.MAX if last else dist.ReduceOp.SUM
        ),
        "async": lambda: dist.all_reduce(ones(4 + last), async_op=True),
        "root": lambda: dist.broadcast(ones(2), src=last),
        "order": lambda: either(
            last, lambda: dist.all_reduce(ones(3)), lambda: dist.broadcast(ones(3), 0)
        ),
        "barrier": lambda: either(last, dist.barrier, lambda: dist.all_reduce(ones(3))),
        "imported": lambda: imported([empty(3 + last) for _ in range(size)], ones(3 + last)),
        "strides": lambda: dist.all_reduce(
            torch.arange(6.0).view(3, 2).t() if last else torch.zeros(2, 3)
        ),
        "all-to-all": lambda: dist.all_to_all_single(
            empty(size), ones(size + last), [1] * size, [1] * (size - 1) + [1 + last]
        ),
        "objects": lambda: dist.broadcast_object_list([None] * (1 + last), src=0),
        "run.barrier": lambda: either(last, begun.barrier, dist.barrier),
    }
    if pair is not None:
        calls["group"] = lambda: rank < 2 and dist.all_reduce(ones(2 + rank), group=pair)
        calls["other group"] = lambda: (
            rank < 2 and dist.all_reduce(ones(2), group=pair if rank else other_pair)
        )
    told = {name: refused(call) for name, call in calls.items()}
    told["afterwards"] = fits(ones(2), rank)
    return told


def fits(a: torch.Tensor, rank: int) -> list:
    dist.all_reduce(a)
    return a.tolist()


def patient(rank: int) -> str:
    """What a rank does while its exchange is under way may be what the others wait for."""
    first_collectives._ASYNC_SECONDS = 1.0
    a, b = torch.ones(2), torch.full((2,), 7.0)
    if rank == 0:
        work = dist.all_reduce(a, async_op=True)
        dist.send(b, 1)
    else:
        dist.recv(b, 0) if rank == 1 else None
        work = dist.all_reduce(a, async_op=True)
    work.wait()
    return f"{a.tolist()} {b.tolist()}"


class Between:
    """A store where the last key comes between the questions for all keys and for each."""

    def __init__(self, store) -> None:
        self._real, self._all, self._asked = store, [], False

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def check(self, keys: list[str]) -> bool:
        if len(keys) > 1:
            self._all = keys
            return self._asked and self._real.check(keys)
        limit = time.monotonic() + 30
        while not self._real.check(self._all) and time.monotonic() < limit:
            time.sleep(0.01)
        self._asked = True
        return self._real.check(keys)


def met_between(meeting, rank: int) -> list:
    real, meeting._store = meeting._store, Between(meeting._store)
    try:
        return meeting.meet("a call", rank, at_most_seconds=0.2)
    finally:
        meeting._store = real


def restored() -> bool:
    names = first_collectives._NAMES
    return (
        all(getattr(dist, n, None) is TORCHS_OWN.get(n) for n in names)
        and dist.distributed_c10d.all_reduce is TORCHS_OWN["all_reduce"]
        and imported is TORCHS_OWN["all_gather"]
    )


def worker(folder: Path) -> None:
    global begun, other_pair
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plain_scatter = dist.scatter  # another tool's function: it is called, and not compared
    dist.scatter = TORCHS_OWN["scatter"] = lambda *args, **kwargs: plain_scatter(*args, **kwargs)
    dist.init_process_group("gloo")
    pair, other_pair = (dist.new_group([0, 1]) for _ in range(2))
    plain = fitting(rank, size, pair)
    found: dict = {"untouched": restored()}
    begun = run = begin("shard=parameters" if size == 2 else "replicate")
    found["checked"] = not restored()
    found["equal"] = [
        torch.equal(*both) for both in zip(plain, fitting(rank, size, pair), strict=True)
    ]
    found["refused"] = mismatches(rank, size, pair if size > 2 else None)
    found["patient"] = patient(rank)
    found["between"] = met_between(run._rendezvous, rank)
    after = []
    for batch in run.batches():
        run.step(batch)
        after.append(restored())
    found["restored"] = after
    found["equal later"] = [
        torch.equal(*both) for both in zip(plain, fitting(rank, size, pair), strict=True)
    ]
    begun = begin()  # another training in this process
    found["again"] = [not restored()]
    for batch in begun.batches():
        begun.step(batch)
        found["again"].append(restored())
    run._ended = begun._ended = True
    (folder / f"{size}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    size, folder = request.param, tmp_path_factory.mktemp("collectives")
    done = zygote.run(
        forked(TESTS / "run" / "test_first_collectives.py", size, folder),
        env={**os.environ, "PYTHONPATH": PATHS, "RONDE_RUNS": "none"},
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return [json.loads((folder / f"{size}.{r}.json").read_text()) for r in range(size)]


def test_calls_that_fit_give_the_same_numbers(ranks):
    for each in ranks:
        assert each["checked"] and all(each["equal"]) and all(each["equal later"]), each
        assert each["patient"] == f"{[float(len(ranks))] * 2} [7.0, 7.0]"
        assert each["refused"]["afterwards"] == [float(len(ranks))] * 2


def test_a_rank_that_comes_between_two_looks_has_come(ranks):
    assert [each["between"] for each in ranks] == [list(range(len(ranks)))] * len(ranks)


def test_functions_are_torchs_own_after_the_first_steps(ranks):
    for each in ranks:
        assert each["untouched"] and each["restored"] == [False, True, True, True]
        assert each["again"] == [True, False, True, True, True]


def test_calls_that_do_not_fit_are_refused_on_every_rank(ranks):
    size = len(ranks)
    others = "rank 0" if size == 2 else "ranks 0, 1"
    last = f"rank {size - 1}"
    said = {
        "shape": ["dist.all_reduce(float32 [4], SUM)", "dist.all_reduce(float32 [5], SUM)"],
        "type": ["dist.all_reduce(float32 [4], SUM)", "dist.all_reduce(float64 [4], SUM)"],
        "operation": ["dist.all_reduce(float32 [4], SUM)", "dist.all_reduce(float32 [4], MAX)"],
        "async": ["dist.all_reduce(float32 [4], SUM)", "dist.all_reduce(float32 [5], SUM)"],
        "root": ["dist.broadcast(float32 [2], src=0)", "dist.broadcast(float32 [2], src=1)"],
        "order": ["dist.all_reduce(float32 [3], SUM)", "dist.broadcast(float32 [3], src=0)"],
        "barrier": ["dist.barrier()", "dist.all_reduce(float32 [3], SUM)"],
        "imported": [
            f"dist.all_gather({size} × float32 [3], float32 [3])",
            f"dist.all_gather({size} × float32 [4], float32 [4])",
        ],
        "strides": [
            "dist.all_reduce(float32 [2, 3], SUM)",
            "dist.all_reduce(float32 [2, 3] with strides (1, 2), SUM)",
        ],
        "objects": [
            "dist.broadcast_object_list(1 × object, src=0)",
            "dist.broadcast_object_list(2 × object, src=0)",
        ],
        "run.barrier": ["run.barrier()", "dist.barrier()"],
    }
    for name, (here, there) in said.items():
        for each in ranks:
            text, soon = each["refused"][name]
            assert soon and text == ranks[0]["refused"][name][0]
            there_text = text.partition(f"; {last} called ")[2]
            assert text.startswith(f"{others} called {here}"), (name, text)
            assert there_text.startswith(there), (name, text)
            assert f"{there} at test_first_collectives.py:" in text
            assert "Every rank must make the same calls, in the same order" in text
    first, second = "float32 [1]", "float32 [2]"
    for each in ranks:
        text, _ = each["refused"]["all-to-all"]
        assert f"rank {size - 1} sends {second} to rank {size - 1} at test_first" in text, text
        assert f"awaits {first} at test_first_collectives.py:" in text
    if size > 2:
        for each in ranks[:2]:
            text, _ = each["refused"]["group"]
            assert "rank 0 called dist.all_reduce(float32 [2], SUM, group '" in text
            assert "of ranks 0, 1)" in text and "float32 [3]" in text
            assert "; rank 1 called dist.all_reduce(" in each["refused"]["other group"][0]
        assert ranks[2]["refused"]["group"] == ["nothing", True]


SCRIPT = """
import time, torch, ronde, torch.distributed as dist
from ronde.run import first_collectives
own = dist.all_reduce, [dist.all_reduce]
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(12, 2), torch.ones(12, 1))
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), data,
    loss=torch.nn.functional.mse_loss, batch_size=4)
{}
for _ in run.epochs(1 + (run.state.step > 0)):
    for batch in run.batches():
        run.step(batch)
        run.print("step", run.state.step, dist.all_reduce is own[1][0])
"""


def trained(folder: Path, line: str, *options: str):
    (folder / "train.py").write_text(SCRIPT.format(line))
    done = ronde_run(["run", "-n", "2", *options, "train.py"], folder)
    return done.returncode, done.stdout + done.stderr


def test_a_call_of_one_rank_alone_is_refused(tmp_path):
    status, said = trained(tmp_path, "if run.is_main: dist.barrier()", "--runs", "none")
    assert status != 0
    assert "rank 0 called dist.barrier() at train.py:9, and rank 1 went on to run." in said, said


def test_a_rank_that_comes_late_finds_what_an_async_call_asked_for(tmp_path):
    line = (
        "first_collectives._ASYNC_SECONDS = 0.5; time.sleep(3 * run.rank); "
        "dist.all_reduce(torch.ones(4 + run.rank), async_op=True).wait()"
    )
    status, said = trained(tmp_path, line, "--runs", "none")
    assert status != 0
    assert "rank 0 called dist.all_reduce(float32 [4], SUM) at train.py:9; rank 1 called" in said


@pytest.mark.parametrize("call", ["add", "helper.add"])
def test_forked_workers_compare_calls_of_any_name(tmp_path, call):
    (tmp_path / "helper.py").write_text("from torch.distributed import all_reduce as add")
    before = "import helper\nfrom torch.distributed import all_reduce as add\nown ="
    script = SCRIPT.replace("own =", before).replace("own[1][0]", "helper.add is add")
    for line, status in ((f"{call}(torch.ones(4 + run.rank))", 1), (f"{call}(torch.ones(4))", 0)):
        (tmp_path / "train.py").write_text(script.format(line))
        words = ["run", "-n", "2", "--restarts", "1", "--name", f"it-{status}", "train.py"]
        done = ronde_run(words, tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == status, said
        assert ("float32 [4], SUM) at train.py:11; rank 1 called dist" in said) == bool(status), (
            said
        )
    assert "step 3 True" in said  # torch's own again, everywhere


def test_a_resumed_run_compares_again(tmp_path):
    line = 'run.print("start", run.state.step, dist.all_reduce is own[1][0])'
    for options, first in ((("--name", "it"), 0), (("--name", "it", "--resume"), 3)):
        status, said = trained(tmp_path, line, *options)
        assert status == 0, said
        expected = [f"start {first} False", f"step {first + 1} False"]
        expected += [f"step {first + 2} True", f"step {first + 3} True"]
        assert [s for s in said.splitlines() if s.startswith(("start ", "step "))] == expected


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
