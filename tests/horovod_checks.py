"""Run by every rank of three under ``ronde run --horovod -m pytest``: each operation, each refusal.

Results are compared with what the inputs of all ranks, which every rank can compute, must give.
"""

from __future__ import annotations

import json
import os
import time

import horovod.torch as hvd  # the bridge: --horovod
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.sampler import ElasticSampler

hvd.init()
N, R = hvd.size(), hvd.rank()
ALL_DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


def of(rank: int, shape=(5, 3), dtype=torch.float32) -> torch.Tensor:
    """The tensor that a rank contributes."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 8, shape, generator=generator).abs().to(dtype)


def everyone(shape=(5, 3), dtype=torch.float32) -> torch.Tensor:
    return torch.stack([of(r, shape, dtype) for r in range(N)])


def test_who():
    assert (int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])) == (R, N) and N == 3
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (R, 3, 0, 1)
    assert hvd.gloo_built() and not hvd.mpi_built() and not hvd.ccl_built() and not hvd.ddl_built()
    assert hvd.is_homogeneous() and not hvd.mpi_enabled() and not hvd.mpi_threads_supported()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_type(dtype):
    exact = everyone(dtype=dtype).double()
    mine = of(R, dtype=dtype)
    got = {
        hvd.Sum: exact.sum(0),
        hvd.Min: exact.min(0).values,
        hvd.Max: exact.max(0).values,
    }
    handles = [hvd.allreduce_async(mine, op=op, name=f"{dtype}{op}") for op in got]
    for handle, expected in zip(handles, got.values(), strict=True):
        assert torch.equal(hvd.synchronize(handle), expected.to(dtype))
    mean = exact.sum(0) / N
    whole = mean if dtype.is_floating_point else mean.trunc()
    assert torch.equal(hvd.allreduce(mine), whole.to(dtype))
    assert torch.equal(hvd.allgather(mine), everyone(dtype=dtype).flatten(0, 1))
    assert torch.equal(hvd.broadcast(mine, 2), of(2, dtype=dtype))
    rows = slice(2 * R, min(2 * R + 2, 5))
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), exact.sum(0)[rows].to(dtype))
    sent, splits = hvd.alltoall(of(R, (6,), dtype), torch.tensor([1, 2, 3], dtype=torch.int32))
    cuts = [0, 1, 3, 6]
    expected = torch.cat([of(r, (6,), dtype)[cuts[R] : cuts[R + 1]] for r in range(N)])
    assert torch.equal(sent, expected) and splits.tolist() == [R + 1] * N


def test_bool_and_complex():
    flags = everyone(dtype=torch.int64) > 3
    assert torch.equal(hvd.allgather(flags[R]), flags.flatten(0, 1))
    assert torch.equal(hvd.broadcast(flags[R], 1), flags[1])
    waves = torch.complex(everyone(), everyone() + 1)
    assert torch.equal(hvd.allreduce(waves[R], op=hvd.Sum), waves.sum(0))
    with pytest.raises(ValueError, match=r"Sum over tensors of type torch\.bool"):
        hvd.allreduce(flags[R], op=hvd.Sum)


def test_scales_groups_and_places():
    mine, exact = of(R), everyone()
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(scaled, exact.sum(0) * 2)
    whole = hvd.allreduce(of(R, dtype=torch.int32), op=hvd.Sum, prescale_factor=0.3)
    assert torch.equal(whole, (everyone(dtype=torch.float64) * 0.3).trunc().sum(0).int())
    assert torch.equal(hvd.allreduce(mine, op=hvd.Product), exact.prod(0))
    given = [mine, of(R, (2,), torch.int64), of(R, ()), of(R, (0, 4))]
    hvd.grouped_allreduce_(given, op=hvd.Sum)
    assert torch.equal(given[0], exact.sum(0)) and torch.equal(given[2], everyone(()).sum(0))
    assert torch.equal(given[1], everyone((2,), torch.int64).sum(0)) and given[3].numel() == 0
    column = torch.arange(12.0).view(3, 4).t()[1:]  # not contiguous
    expected = column * 3
    assert hvd.allreduce_(column, op=hvd.Sum) is column and torch.equal(column, expected)
    ragged = hvd.grouped_allgather([torch.full((r, 2), float(R)) for r in (R, 2 - R)])
    assert ragged[0][:, 0].tolist() == [1.0, 2.0, 2.0] and ragged[1].shape == (3, 2)
    assert hvd.allgather(torch.empty(0, 7)).shape == (0, 7)
    parts = hvd.grouped_reducescatter([of(R, (7, 2)), of(R, (2,))], op=hvd.Average)
    rows = [(0, 3), (3, 5), (5, 7)][R]
    assert torch.equal(parts[0], everyone((7, 2)).sum(0)[slice(*rows)] / 3)
    assert parts[1].shape == ((1,) if R < 2 else (0,))


def test_gradients():
    weights = torch.arange(15.0).view(5, 3) + R  # each rank's part of the total loss
    all_weights = torch.stack([torch.arange(15.0).view(5, 3) + r for r in range(N)])

    def gradient(call, weight):
        x = of(R).requires_grad_()
        (call(x) * weight).sum().backward()
        return x.grad

    assert torch.equal(
        gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), weights), all_weights.sum(0)
    )
    assert torch.equal(gradient(hvd.allreduce, weights), all_weights.sum(0) / 3)
    got = gradient(lambda x: hvd.broadcast(x, 1), weights)
    assert torch.equal(got, all_weights.sum(0) / 3 if R == 1 else torch.zeros(5, 3))
    long = torch.arange(45.0).view(15, 3)
    assert torch.equal(gradient(hvd.allgather, long), long[5 * R : 5 * R + 5])
    splits = torch.tensor([3, 1, 1], dtype=torch.int32)
    got = gradient(lambda x: hvd.alltoall(x, splits)[0], 2.0)
    assert torch.equal(got, torch.full((5, 3), 2.0))
    got = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 1.0)
    assert torch.equal(got, torch.full((5, 3), 3.0))
    few = torch.ones(4, requires_grad=True)  # the last rank keeps one row
    hvd.reducescatter(few, op=hvd.Sum).sum().backward()
    assert few.grad.tolist() == [3.0] * 4
    with pytest.raises(NotImplementedError, match=r"gradient of a reduction with hvd\.Max"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max), 1.0)


def test_order_of_calls_may_differ():
    x = torch.full((4,), float(R))
    names = ["a", "b", "c"]
    order = names[R:] + names[:R]
    handles = {name: hvd.allreduce_async(x, name=name, op=hvd.Sum) for name in order}
    if R == 0:
        hvd.barrier()
    extra = hvd.broadcast_async(x, 2)
    if R > 0:
        hvd.barrier()
    assert all(hvd.synchronize(handles[name]).tolist() == [3.0] * 4 for name in names)
    assert hvd.synchronize(extra).tolist() == [2.0] * 4


def test_async_is_not_done_before_the_others_come():
    if R == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="slow")
        assert not hvd.poll(handle)
        with pytest.raises(ValueError, match=r"allreduce 'slow' is still in flight on rank 0"):
            hvd.allreduce_async(torch.ones(3), name="slow")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(3), name="slow")
    assert hvd.synchronize(handle).tolist() == [1.0] * 3 and hvd.poll(handle)


ODD = R == 1
MISMATCHES = {
    "shape": (
        lambda: hvd.allreduce(torch.ones(2, 3 + ODD), name="x"),
        r"allreduce 'x': the ranks disagree on its shape: ranks 0, 2: \[2, 3\]; rank 1: \[2, 4\]",
    ),
    "dimensions": (lambda: hvd.allreduce(torch.ones(*([6] if ODD else [2, 3])), name="x"), "shape"),
    "type": (
        lambda: hvd.allgather(torch.ones(2).to(torch.int32 if ODD else torch.float32), name="y"),
        r'allgather \'y\': the ranks disagree on its data type: ranks 0, 2: "float32"; rank 1: "int32"',
    ),
    "root": (
        lambda: hvd.broadcast(torch.ones(2), R, name="z"),
        r"broadcast 'z': the ranks disagree on its root rank: rank 0: 0; rank 1: 1; rank 2: 2",
    ),
    "reduction": (
        lambda: hvd.reducescatter(torch.ones(3), op=hvd.Sum if ODD else hvd.Average, name="w"),
        'reduction: ranks 0, 2: "Average"; rank 1: "Sum"',
    ),
    "rows": (lambda: hvd.alltoall(torch.ones(3, 2 + ODD)), "disagree on its shape"),
    "group": (
        lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(3 + ODD)]),
        r"the tensor 1's shape: ranks 0, 2: \[3\]; rank 1: \[4\]",
    ),
    "parameters": (
        lambda: hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(2 + ODD)}, 0),
        r"the parameter 'b''s shape",
    ),
    "sets": (lambda: hvd.add_process_set([0, 1 + ODD]), "disagree on its ranks"),
    "optimizers": (
        lambda: hvd.broadcast_optimizer_state(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(2 + ODD))], lr=1.0), 0
        ),
        r"disagree on its shape: ranks 0, 2: \[\[2\]\]; rank 1: \[\[3\]\]",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_raises_on_all_ranks_and_names_them(what):
    call, text = MISMATCHES[what]
    with pytest.raises(HorovodInternalError, match=text):
        call()
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]  # the next one works


def test_wrong_arguments():
    cases = [
        (lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), "op or average"),
        (lambda: hvd.allreduce(torch.ones(2), op=9), "op=9"),
        (lambda: hvd.allreduce([1.0]), "expected a tensor"),
        (lambda: hvd.broadcast(torch.ones(2), 7), "root_rank=7"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "a scalar has none"),
        (lambda: hvd.alltoall(torch.ones(4)), "3 ranks divide, not 4"),
        (lambda: hvd.alltoall(torch.ones(4), torch.ones(3)), "whole numbers"),
        (lambda: hvd.alltoall(torch.ones(4), [2, 2, 2]), "add up to the first dimension"),
        (lambda: hvd.add_process_set([0, 9]), "from 0 to 2"),
        (lambda: hvd.add_process_set([0, 1, 2]), "exists already"),
        (lambda: hvd.init(comm=[0, 1]) or hvd.ProcessSet("ab"), "list of ranks"),
        (lambda: hvd.allreduce(torch.eye(3).to_sparse()), "sparse_allreduce_async"),
    ]
    for call, text in cases:
        with pytest.raises((ValueError, TypeError, AttributeError), match=text):
            call()
    with pytest.raises(NotImplementedError, match=r"op=hvd\.Adasum is not here"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match=r"reducescatter has no Max"):
        hvd.reducescatter(torch.ones(3), op=hvd.Max)


def test_process_sets():
    ends = hvd.add_process_set([0, 2])
    middle = hvd.add_process_set(hvd.ProcessSet([1]))
    mine = middle if R == 1 else ends
    assert mine.included() and mine.size() == (1 if R == 1 else 2) and mine.rank() == (R == 2)
    assert hvd.allreduce(torch.tensor([R + 1.0]), op=hvd.Sum, process_set=mine) == (
        2 if R == 1 else 4
    )
    root = 1 if R == 1 else 2
    assert hvd.broadcast(torch.tensor([R]), root, process_set=mine).item() == root
    assert hvd.broadcast_object({"r": R}, root, process_set=mine) == {"r": root}
    assert hvd.allgather(torch.tensor([R]), process_set=mine).tolist() == (
        [1] if R == 1 else [0, 2]
    )
    hvd.barrier(mine)
    if R == 1:
        with pytest.raises(ValueError, match="rank 1 is not in ProcessSet"):
            hvd.allreduce(torch.ones(1), process_set=ends)
    assert hvd.remove_process_set(ends) and hvd.remove_process_set(middle)
    assert not hvd.remove_process_set(ends) and not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match=r"call hvd\.add_process_set first"):
        hvd.allreduce(torch.ones(1), process_set=ends)


def test_join():
    for first in range(N):
        for step in range((R - first) % N + 1):  # one, two and three calls
            got = hvd.allreduce(torch.tensor([6.0]), op=hvd.Average).item()
            assert got == 6.0 * sum(step <= (r - first) % N for r in range(N)) / N
        last = hvd.join()
        assert hvd.allgather_object(last) == [last] * N  # unnamed, after other numbers of calls
    if R == 0:
        assert hvd.join() != 0
    else:
        for call, text in (
            (lambda: hvd.allgather(torch.ones(2)), r"rank 0 called hvd\.join\(\)"),
            (lambda: hvd.broadcast(torch.ones(2), 1), "only allreduce"),
            (lambda: hvd.allreduce(torch.ones(2), op=hvd.Max), "Max over zeros"),
        ):
            with pytest.raises(HorovodInternalError, match=text):
                call()
        assert hvd.join() != 0
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def test_sparse():
    def entries(rank):
        return torch.sparse_coo_tensor([[rank, 3]], [[1.0, 2.0]] * 2, (5, 2))

    got = hvd.sparse_allreduce_async(entries(R), name="s", op=hvd.Average)()
    expected = sum(entries(r).to_dense() for r in range(N)) / N
    assert torch.allclose(got.to_dense(), expected)


def test_objects():
    value = {"a": (1, 2.5, None), 3: [True, "x"], "t": of(R), "n": {"m": of(R).numpy()}}
    got = hvd.broadcast_object(value, root_rank=1)
    assert got["a"] == (1, 2.5, None) and got[3] == [True, "x"] and torch.equal(got["t"], of(1))
    assert hvd.allgather_object({R, 7}) == [{r, 7} for r in range(N)]
    for call in (
        lambda: hvd.broadcast_object(object() if R == 0 else 1),
        lambda: hvd.allgather_object(print if R == 2 else 1),
    ):
        with pytest.raises(ValueError, match=r"rank [02].*HOROVOD_PICKLE_OBJECTS=1"):
            call()


def test_timeline(tmp_path):
    file = tmp_path / "timeline.json"
    hvd.start_timeline(str(file), mark_cycles=True)
    hvd.barrier()
    hvd.allreduce(torch.ones(3), name="seen")
    hvd.barrier()
    hvd.stop_timeline()
    if R == 0:
        events = json.loads(file.read_text())
        names = {e["name"] for e in events}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= names
        assert any(e.get("args", {}).get("name") == "allreduce.seen" for e in events)
    else:
        assert not file.exists()


def test_elastic():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = ElasticSampler(range(12))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, calls=[])
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state):
        weights = hvd.allgather(model.weight.detach())
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[2])
        first = state.step
        while state.step < 4:
            model.weight.data += 1.0
            state.step += 1
            sampler.record_batch(0, 1)
            if state.step == 3 and first == 0:  # after the commit of step 2
                hvd.allreduce(torch.ones(2 + R), name="broken")
            if state.step == 2:
                state.commit()
        return first, sampler.processed_num, len(sampler)

    start = hvd.broadcast(model.weight.detach(), 0)
    assert train(state) == (2, 12, 2) and resets == [3]
    assert torch.allclose(model.weight, start + 4.0)
    assert sorted(hvd.allgather(torch.tensor(list(sampler))).tolist())[0] >= 0

    @hvd.elastic.run
    def hosts_come(state):
        if state.calls:
            return
        state.calls = [1]
        model.weight.data += R
        if R == 0:
            state.on_hosts_updated(0.0, 1)
        state.commit()  # raises on all ranks

    hosts_come(state)
    assert resets == [3, 3] and state.calls == [1]
    assert torch.allclose(model.weight, start + 4.0 + R)  # some only came: nothing is shared again

    @hvd.elastic.run
    def never(state):
        hvd.allreduce(torch.ones(2 + R), name="always")

    with pytest.raises(HorovodInternalError, match="always"):
        never(state)


def test_again():
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"call hvd\.init"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0


def test_stall_is_stopped_and_named(monkeypatch, capfd):
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.3")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.8")
    hvd.init()
    if R == 2:
        time.sleep(3.0)  # stalls are looked for once a second
    with pytest.raises(HorovodInternalError, match=r"allreduce 'late' waits for rank 2 since"):
        hvd.allreduce(torch.ones(1), name="late")
    if R == 0:
        assert "Stalled: allreduce 'late' waits for rank 2" in capfd.readouterr().err


def test_a_rank_that_shuts_down_is_named():
    hvd.shutdown()
    hvd.init()
    if R == 1:
        hvd.shutdown()
    else:
        with pytest.raises(HorovodInternalError, match="rank 1 has shut down"):
            hvd.allreduce(torch.ones(1), name="left")
