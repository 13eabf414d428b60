"""Cutting models that nobody here wrote: stage after stage in one process, the same numbers as the
plain pass.
"""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from torch import nn

import foreign_models as foreign
import grid_models
from foreign_models import Built, build
from ronde.capture.follow import follow
from ronde.capture.trace import Point, Trace, bounds_of
from ronde.parallel.stage_run import Diverged, Program, StageRun, program
from ronde.world import ArgumentError
from ronde.world.tensors import tensors_in
from sampling import ALL, some

TOLERANCE = 1e-10


def usable(trace: Trace) -> list[Point]:
    return [p for p in trace.points() if not p.why_not]


def evenly(points: list[Point], stages: int) -> list[Point]:
    return [points[(i + 1) * len(points) // stages] for i in range(stages - 1)]


def stage_by_stage(made: Program, call, backward: bool = True):
    """All stages, one after the other, forwards and backwards."""
    stages = len(made.sends)
    received, runs, leaves = {}, [], []
    for stage in range(stages):
        takes = set(made.gradients[stage - 1]) if stage else set()
        mine = {
            v: t.detach().clone().requires_grad_(v in takes and backward)
            for v, t in received.items()
        }
        run = StageRun(
            made, stage, {v: t.clone() if v in made.cloned else t for v, t in mine.items()}
        )
        result = run.run(call)
        assert set(run.sent) == set(made.sends[stage]), f"stage {stage} sends something else"
        for t in run.sent.values():
            assert type(t) in (torch.Tensor, nn.Parameter), type(t)
        runs.append(run)
        leaves.append(mine)
        received = run.sent
    if backward:
        gradients: dict[int, torch.Tensor] = {}
        for stage in reversed(range(stages)):
            if stage == stages - 1:
                roots, starts = [result], [torch.ones_like(result)]
            else:
                values = [v for v in made.gradients[stage] if runs[stage].sent[v].requires_grad]
                roots, starts = (
                    [runs[stage].sent[v] for v in values],
                    [gradients[v] for v in values],
                )
            if roots and any(r.requires_grad for r in roots):
                torch.autograd.backward(roots, starts)
            gradients = {
                v: torch.zeros_like(t) if t.grad is None else t.grad
                for v, t in leaves[stage].items()
            }
    return result


def snapshot(model: nn.Module):
    """All that following is not to touch."""
    tensors = {
        n: (t, t.detach().clone(), t.grad)
        for n, t in [*model.named_parameters(), *model.named_buffers()]
    }
    modes = {
        n: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
        for n, m in model.named_modules()
    }
    kept = {
        n: {k: (v, len(v) if isinstance(v, list | dict) else 0) for k, v in m.__dict__.items()}
        for n, m in model.named_modules()
    }
    return tensors, modes, kept


def untouched(model: nn.Module, before) -> None:
    tensors, modes, kept = before
    now = snapshot(model)
    assert now[0].keys() == tensors.keys()
    for name, (tensor, value, grad) in tensors.items():
        assert now[0][name][0] is tensor, name
        assert now[0][name][2] is grad, name
        # Weights of other workers are NaN.
        assert torch.allclose(tensor.detach(), value, rtol=0, atol=0, equal_nan=True), name
    assert now[1] == modes
    for name, attributes in kept.items():
        assert now[2][name].keys() == attributes.keys(), name
        for key, (value, length) in attributes.items():
            assert now[2][name][key][0] is value and now[2][name][key][1] == length, f"{name}.{key}"


def followed(built: Built, batch=None, real: bool = False) -> Trace:
    batch = built.batch if batch is None else batch
    before = snapshot(built.model)
    state, called = torch.get_rng_state(), nn.Module.__call__
    contents = [t.clone() for t in tensors_in(batch)]
    trace = follow(built.model, lambda: built.call(built.model, batch), real=real)
    assert torch.equal(state, torch.get_rng_state())
    assert nn.Module.__call__ is called
    untouched(built.model, before)
    for t, was in zip(tensors_in(batch), contents, strict=True):
        assert torch.equal(t, was), "the batch was changed"
    return trace


def near(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert actual.shape == wanted.shape, what
    if not wanted.is_floating_point():
        assert torch.equal(actual, wanted), what
        return
    scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-12)
    worst = float((actual - wanted).abs().max()) if wanted.numel() else 0.0
    assert worst <= TOLERANCE * scale or worst <= 1e-14, f"{what}: off by {worst / scale:.1e}"


def check(built: Built, made: Program, batch=None) -> None:
    """The staged pass against the plain one: loss, gradients, who has none, buffers."""
    batch = built.batch if batch is None else batch
    state = torch.get_rng_state()
    kept = {n: b.detach().clone() for n, b in built.model.named_buffers()}
    built.model.zero_grad(set_to_none=True)
    loss = stage_by_stage(made, lambda: built.call(built.model, copied(batch)))
    actual = {n: p.grad for n, p in built.model.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in built.model.named_buffers()}
    with torch.no_grad():
        for name, buffer in built.model.named_buffers():
            assert type(buffer) is torch.Tensor, name
            buffer.copy_(kept[name])
    torch.set_rng_state(state)
    built.model.zero_grad(set_to_none=True)
    wanted = built.call(built.model, copied(batch))
    wanted.backward()
    near(loss, wanted, "loss")
    for name, p in built.model.named_parameters():
        if id(p) in made.reached and p.grad is not None:
            assert actual[name] is not None, f"{name} got no gradient"
            near(actual[name], p.grad, f"gradient of {name}")
        else:
            assert p.grad is None or id(p) in made.reached, f"{name} is reached after all"
            assert actual[name] is None or not actual[name].any(), f"{name} got a gradient"
    for name, buffer in built.model.named_buffers():
        near(buffers[name], buffer, f"buffer {name}")
    built.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in built.model.named_buffers():
            buffer.copy_(kept[name])


def copied(batch):
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, torch.clone, batch)


def check_everything(built: Built, seeds=(0, 1, 2), sizes=(2, 4), deep: bool = True) -> list[str]:
    """Cut evenly and at random, in evaluation, and with another batch. What was cut where."""
    trace = followed(built)
    points = usable(trace)
    done = [
        f"{'fake' if trace.faked else 'REAL'} {len(trace.events)} events "
        f"{len(points)}/{len(trace.points())} points"
    ]
    for stages in sizes:
        if len(points) < stages - 1:
            done.append(f"not {stages} stages")
            continue
        cuts = [evenly(points, stages)]
        for seed in seeds:
            at = sorted(random.Random(seed * 7 + stages).sample(range(len(points)), stages - 1))
            cuts.append([points[i] for i in at])
        for cut in cuts:
            try:
                check(built, program(trace, bounds_of(trace, cut)))
            except BaseException as error:
                error.add_note(f"cut at {[p.name for p in cut]}")
                raise
        cut = cuts[0]
        if not deep:
            continue
        try:
            # another batch
            if built.other is not None:
                check(built, program_for(built, cut, built.other), built.other)
            # in evaluation
            built.model.eval()
            with torch.no_grad():
                made = program_for(built, cut, built.batch)
                state = torch.get_rng_state()
                actual = stage_by_stage(
                    made, lambda: built.call(built.model, copied(built.batch)), backward=False
                )
                torch.set_rng_state(state)
                near(actual, built.call(built.model, copied(built.batch)), "evaluation")
        except BaseException as error:
            error.add_note(
                f"cut at {[p.name for p in cut]}, "
                f"{'training' if built.model.training else 'evaluation'}, another batch"
            )
            raise
        finally:
            built.model.train()
    return done


def program_for(built: Built, cut: list[Point], batch) -> Program:
    trace = followed(built, batch)
    return program(trace, bounds_of(trace, cut))


# -- models ----------------------------------------------------------------------------

SAMPLE = {"transformers": ["mbart", "deepseek_v3"], "diffusers": ["unet_2d_condition"]}


def foreign_names() -> list[tuple[str, str]]:
    if not ALL:
        return [(package, name) for package, names in SAMPLE.items() for name in names]
    names = []
    for package in grid_models.LOADERS:
        if importlib.util.find_spec(package) is not None:
            names += [(package, name) for name in grid_models.foreign(package)]
    return names


def few(package: str, name: str) -> Built:
    """Three samples of a model that nobody here wrote, and another batch of two."""
    pytest.importorskip(package)
    grid_models.foreign(package)
    case = grid_models.build(name)
    batch, other = ({k: v[:n] for k, v in case.samples.items()} for n in (3, 2))
    return Built(case.model, batch, case.loss, other)


@pytest.mark.parametrize("name", some(sorted(foreign.OWN), 2))
def test_own(name):
    check_everything(build(foreign.OWN, name), seeds=(0, 1, 2) if ALL else (0,))


@pytest.mark.parametrize(("package", "name"), foreign_names())
def test_foreign(package, name):
    built = few(package, name)
    if ALL:
        check_everything(built)
    else:
        check_everything(built, seeds=(), sizes=(4,))


# -- what cannot be cut, and what is said ----------------------------------------------


def reasons(model: nn.Module, batch, call=foreign.square) -> dict[str, str]:
    return {p.name: p.why_not for p in followed(Built(model.double(), batch, call)).points()}


def test_not_inside_a_checkpointed_function():
    why = reasons(foreign.Checkpointed(False), foreign.rows(4))
    assert why["blocks.1"] == "" and why["out"] == ""
    assert "checkpointed function" in why["blocks.0.2"]


def test_shape_from_the_batch():
    built = build(foreign.OWN, "packed_sequence")
    why = {p.name: p.why_not for p in followed(built).points()}
    assert (
        "whose shape depends on values" in why["second"]
        and "_pack_padded_sequence" in why["second"]
    )


def test_differentiating_inside_the_pass():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = x.detach().clone().requires_grad_()
            y = self.b(torch.tanh(self.a(x)))
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return self.c(y) + g.pow(2).sum()

    built = Built(Penalty().double(), foreign.rows(4), foreign.square)
    trace = followed(built)
    why = {p.name: p.why_not for p in trace.points()}
    assert "differentiates earlier events" in why["b"]
    assert why["c"] == ""
    check(built, program(trace, [next(p.at for p in trace.points() if p.name == "c")]))


class Erratic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.skip = False

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i == 1 and self.skip:
                x = x.cos()
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("stage", [0, 1])
def test_a_path_that_changes(stage):
    """As with randomness: another path than the one that was followed."""
    built = Built(Erratic().double(), foreign.rows(4), foreign.square)
    trace = followed(built)
    made = program(
        trace, [next(p.at for p in trace.points() if p.name == f"layers.{3 if stage == 0 else 1}")]
    )
    built.model.skip = True
    with pytest.raises(
        Diverged, match=r"calls cos where layers\.1.* was expected.*path depends on the batch alone"
    ):
        stage_by_stage(made, lambda: built.call(built.model, built.batch))
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_another_batch_another_number_decides():
    """What a pass takes out of an activation is sent; where it changes the path, that is said."""
    built = build(foreign.OWN, "branch_on_activation")
    trace = followed(built)
    cut = evenly(usable(trace), 2)
    made = program(trace, bounds_of(trace, cut))
    for scale in (1.0, -1.0, 3.0):
        batch = built.batch * scale
        check(built, made, batch)


@pytest.mark.parametrize("real", [False, True])
def test_another_batch_other_experts(real):
    """What a module uses inside of one stage may change: who has a gradient is seen as it comes."""
    built = build(foreign.OWN, "mixture_of_experts")
    built.batch = built.batch[:1]
    trace = followed(built, real=real)
    assert trace.faked is not real
    cut = [p for p in usable(trace) if p.name == "mixture.blocks.1"]
    made = program(trace, bounds_of(trace, cut))
    used = set()
    for seed in range(6):
        torch.manual_seed(seed)
        batch = foreign.rows(1)
        check(built, made, batch)
        built.call(built.model, batch).backward()
        used.add(frozenset(n for n, p in built.model.named_parameters() if p.grad is not None))
        built.model.zero_grad(set_to_none=True)
    assert len(used) > 1


def test_no_cut_where_the_path_may_change():
    """Inside of such a module only where there is no other place."""
    from ronde.parallel import choose_cut

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            h = self.a(x)
            return self.b(h * 2 if h.mean() > 0 else h)

    model = nn.Sequential(Branching(), nn.Linear(6, 6), Branching())
    trace = followed(Built(model.double(), foreign.rows(4), foreign.square))
    assert [p.name for p in choose_cut.usable(trace)] == ["0.b", "1", "2", "2.b"]
    assert [p.name for p in choose_cut.usable(trace, 2)] == ["1", "2"]
    assert [p.name for p in choose_cut.usable(trace, 3)] == ["0.b", "1", "2", "2.b"]


def test_a_point_that_another_pass_lacks():
    built = Built(Erratic().double(), foreign.rows(4), foreign.square)
    cut = [p for p in followed(built).points() if p.name == "layers.1"]
    built.model.skip = True
    with pytest.raises(
        ArgumentError, match=r"begins at layers\.1, which this forward pass does not call"
    ):
        bounds_of(followed(built), cut)


def test_a_pass_that_writes_into_its_weights():
    """It does not while it is followed; which stage would is known."""

    class Writing(Erratic):
        def forward(self, x):
            with torch.no_grad():
                self.layers[2].weight.mul_(0.5)
            return super().forward(x)

    built = Built(Writing().double(), foreign.rows(4), foreign.square)
    before = built.model.layers[2].weight.detach().clone()
    trace = followed(built)
    assert trace.faked and torch.equal(built.model.layers[2].weight, before)
    (written,) = program(trace, [usable(trace)[-1].at]).writes
    assert written[0] == 0 and written[1] is built.model.layers[2].weight


@pytest.mark.parametrize("real", [False, True])
def test_following_puts_everything_back(real):
    for name in ("state_in_self", "residual_cnn", "dropouts", "in_place", "checkpointed"):
        followed(build(foreign.OWN, name), real=real)

    class Breaks(foreign.Stateful):
        def forward(self, x):
            x.mul_(2)
            torch.rand(3)
            super().forward(x)
            raise KeyError("of its own")

    built = Built(Breaks().double(), foreign.rows(4), foreign.square)
    before, state, batch = snapshot(built.model), torch.get_rng_state(), built.batch.clone()
    with pytest.raises(KeyError, match="of its own"):
        follow(built.model, lambda: built.call(built.model, built.batch), real=real)
    untouched(built.model, before)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(built.batch, batch)
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert not torch._C._len_torch_function_stack()


@pytest.mark.parametrize("real", [False, True])
def test_reached(real):
    for name in (
        "auxiliary_and_frozen",
        "checkpointed_reentrant",
        "checkpointed",
        "custom_function",
        "gpt_tied",
    ):
        built = build(foreign.OWN, name)
        trace = followed(built, real=real)
        built.call(built.model, built.batch).backward()
        for n, p in built.model.named_parameters():
            assert (p.grad is not None) == (id(p) in trace.reached), n
