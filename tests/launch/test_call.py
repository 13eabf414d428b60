"""``ronde.launch``: results by rank, the first error with its rank, nothing left behind."""

from __future__ import annotations

from pathlib import Path

from processes import python

CALL = """
import importlib.util, os, signal, subprocess, sys, threading, time
import torch
import ronde

assert ronde.launch is not None


def train(rate, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(
        torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = torch.nn.functional.mse_loss
    run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=4, shuffle=False)
    run.fit(epochs=1)
    print("said by", run.rank)
    assert importlib.util.find_spec("hang_watch") is None  # Ronde's own, in its folder
    return run.rank, run.world_size, model.weight.detach().clone()


def fails(rank):
    if ronde.world().rank == rank:
        raise KeyError("on purpose")
    time.sleep(30)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def waits(path):
    open(path, "w").close()
    time.sleep(60)


alone = train(0.1, 3)
other = subprocess.Popen(["sleep", "100"])
found = ronde.launch(train, (0.1,), {"seed": 3}, workers=2)
assert [f[:2] for f in found] == [(0, 2), (1, 2)]
for _, _, weight in found:
    torch.testing.assert_close(weight, alone[2], rtol=0, atol=1e-12)
assert other.poll() is None  # the script's own
other.kill()
try:
    ronde.launch(fails, (1,), workers=2)
except KeyError as error:
    assert "rank 1 failed first" in error.__notes__[0] and "on purpose" in error.__notes__[0]
else:
    raise AssertionError("no error")
try:
    ronde.launch(dies, workers=1)
except ronde.WorldError as error:
    assert "rank 0 failed first: killed by signal 9" in str(error), error
for wrong, said in (((train, (threading.Lock(),)), "cannot be sent"), ((3,), "expected a function")):
    try:
        ronde.launch(*wrong, workers=1)
    except ronde.ArgumentError as error:
        assert said in str(error), error
    else:
        raise AssertionError("no error")


def press():
    while not os.path.exists("there"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=press).start()
try:
    ronde.launch(waits, ("there",), workers=1)
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("no interrupt")
sys.modules["cloudpickle"] = None
try:
    ronde.launch(train, (0.1,), workers=1)
except ronde.ArgumentError as error:
    assert "[notebook]" in str(error), error
print("all is well")
"""


def test_a_function_on_several_workers(tmp_path: Path):
    (tmp_path / "call.py").write_text(CALL)
    done = python(["call.py"], tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all is well"
    assert done.stdout.count("said by 0") == 2 and "said by 1" not in done.stdout
