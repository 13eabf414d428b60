"""Cutting models that nobody here wrote: stage after stage in one process, the same numbers as the
plain pass.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import foreign_models as foreign
from foreign_models import Built, build
from ronde.capture.follow import follow
from ronde.capture.intercept import stay
from ronde.capture.trace import Point, Trace, bounds_of
from ronde.parallel.stage_ownership import _hollow
from ronde.parallel.stage_run import Diverged, Program, StageRun, program
from ronde.world import ArgumentError, RondeError
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


def near(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.shape == wanted.shape, what
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), what
        return
    scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-12)
    worst = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert worst <= TOLERANCE * scale or worst <= 1e-14, f"{what}: off by {worst / scale:.1e}"


def check(built: Built, made: Program, batch=None) -> None:
    """The staged pass against the plain one: loss, gradients, who has none, buffers."""
    batch = built.batch if batch is None else batch
    state = torch.get_rng_state()
    kept = {n: b.detach().clone() for n, b in built.model.named_buffers()}
    built.model.zero_grad(set_to_none=True)
    loss = stage_by_stage(made, lambda: built.call(built.model, copied(batch)))
    found = {n: p.grad for n, p in built.model.named_parameters()}
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
            assert found[name] is not None, f"{name} got no gradient"
            near(found[name], p.grad, f"gradient of {name}")
        else:
            assert p.grad is None or id(p) in made.reached, f"{name} is reached after all"
            assert found[name] is None or not found[name].any(), f"{name} got a gradient"
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
                found = stage_by_stage(
                    made, lambda: built.call(built.model, copied(built.batch)), backward=False
                )
                torch.set_rng_state(state)
                near(found, built.call(built.model, copied(built.batch)), "evaluation")
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

SAMPLE = {
    "transformers": [
        "gpt2",
        "llama_cache",
        "mixtral",
        "albert",
        "deberta",
        "t5",
        "mamba",
        "swin",
        "clip",
        "wav2vec2",
    ],
    "diffusers": ["unet_2d_condition", "autoencoder_kl", "vq", "dit"],
    "monai": ["unet", "dynunet", "densenet", "highresnet", "varautoencoder"],
}


def loaded(package: str) -> dict:
    pytest.importorskip(package)
    builders = getattr(foreign, package.upper())
    if not builders:
        getattr(foreign, f"load_{package}")()
    return builders


def foreign_names() -> list[tuple[str, str]]:
    if not ALL:
        return [(package, name) for package, names in SAMPLE.items() for name in list(names)[::2]]
    found = []
    for package in SAMPLE:
        try:
            found += [(package, name) for name in loaded(package)]
        except pytest.skip.Exception:
            continue
    return found


@pytest.mark.parametrize("name", some(sorted(foreign.OWN), 2))
def test_own(name):
    check_everything(build(foreign.OWN, name), seeds=(0, 1, 2) if ALL else (0,))


@pytest.mark.parametrize(("package", "name"), some(foreign_names(), 2))
def test_foreign(package, name):
    built = build(loaded(package), name)
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


def test_views_changed_later():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            h = self.a(x)
            part = h[:, :2]
            y = self.b(x)
            part.mul_(2)
            return self.c(h) + y + part.sum()

    built = Built(Views().double(), foreign.rows(4), foreign.square)
    trace = followed(built)
    why = {p.name: p.why_not for p in trace.points()}
    assert "shares memory" in why["b"], why
    assert "changed in place through another tensor" in why["c"] or why["c"] == ""
    for point in usable(trace):
        check(built, program(trace, [point.at]))


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


def test_an_object_that_holds_tensors_out_of_sight():
    class Box:
        def __init__(self, x):
            self.hidden = x

    class Boxed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.first = nn.Sequential(self.a)
            self.first.forward = lambda x: Box(nn.Sequential.forward(self.first, x))

        def forward(self, x):
            return self.b(torch.tanh(self.first(x).hidden))

    built = Built(Boxed().double(), foreign.rows(4), foreign.square)
    trace = followed(built)
    assert [p.name for p in usable(trace)] == ["b"]
    check(built, program(trace, [usable(trace)[0].at]))


def test_layouts_that_cannot_be_sent():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            s = self.a(x).to_sparse()
            return self.c(self.b(x)) + s.to_dense()

    why = reasons(Sparse(), foreign.rows(4))
    assert "layout" in why["b"] or "cannot be sent" in why["b"] or "depends on" in why["b"], why


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


def test_a_path_that_ends_early():
    class Early(Erratic):
        def forward(self, x):
            for layer in self.layers[: 2 if self.skip else 4]:
                x = layer(x)
            return x

    built = Built(Early().double(), foreign.rows(4), lambda m, x: m(x))
    trace = followed(built)
    made = program(trace, [next(p.at for p in trace.points() if p.name == "layers.3")])
    built.model.skip = True
    with pytest.raises(Diverged, match=r"ended where layers\.2 was expected"):
        StageRun(made, 0, {}).run(lambda: built.call(built.model, built.batch))


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


def test_another_batch_other_sizes():
    """A later stage is told the sizes that an activation decides, and nothing else stands for
    them.
    """
    built = build(foreign.OWN, "sizes_by_activations")
    for real in (False, True):
        trace = followed(built, real=real)
        made = program(trace, [next(p.at for p in usable(trace) if p.name == "c")])
        for scale in (1.0, -1.0, 3.0):
            check(built, made, built.batch * scale)


def test_a_path_that_follows_sizes():
    class Few(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            h = self.a(x)
            if len(h[h > 0]) > 2:
                h = h.sin()
            h = self.b(h)
            return self.c(h)

    built = Built(Few().double(), foreign.rows(4), foreign.square)
    trace = followed(built)
    made = program(trace, [next(p.at for p in usable(trace) if p.name == "c")])
    check(built, made)
    with torch.no_grad():
        built.model.a.bias.fill_(-100)
    with pytest.raises(Diverged, match=r"calls linear where sin.* was expected"):
        stage_by_stage(made, lambda: built.call(built.model, built.batch))


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


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_equal_blocks_are_cut_alike_each_time(kind):
    """In the middle, whatever the machine does besides: no clock is read."""
    from ronde.parallel import choose_cut
    from ronde.plan import Plan

    assert not hasattr(choose_cut, "time")

    def block() -> nn.Module:
        if kind == "transformer":
            return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))

    for blocks, stages, wanted in [(4, 2, ["2"]), (8, 2, ["4"]), (4, 4, ["1", "2", "3"])]:
        model = nn.Sequential(*(block() for _ in range(blocks)))
        built = Built(model.double(), torch.randn(2, 5, 16).double(), foreign.square)
        before = snapshot(model)
        plan = Plan(workers=stages, pipeline=stages, batch_size=8, micro_batch=2, accumulation=4)
        optimizer = torch.optim.AdamW(model.parameters())
        cuts = [
            choose_cut.choose_cut(
                plan, model, optimizer, followed(built), 2, lambda: built.call(model, built.batch)
            )
            for _ in range(2)
        ]
        assert cuts == [wanted, wanted]
        untouched(model, before)


def test_converting_a_module_is_not_differentiating():
    """Module.to reads gradients: the first time there are none."""

    class Converting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            h = self.b(torch.tanh(self.a(x)))
            self.c = self.c.to(x.dtype)
            return self.c(h)

    built = Built(Converting().double(), foreign.rows(4), foreign.square)
    trace = followed(built)
    assert [p.name for p in usable(trace)] == ["b", "c"]
    made = program(trace, [usable(trace)[0].at])
    check(built, made)
    built.call(built.model, built.batch).backward()  # now there are some
    stage_by_stage(made, lambda: built.call(built.model, built.batch))


def test_a_shape_that_follows_numbers_in_the_batch():
    class Crop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, batch):
            x, n = batch
            return self.b(self.a(x)[: int(n.max())])

    built = Built(Crop().double(), (foreign.rows(4), torch.tensor([2, 3])), foreign.square)
    trace = followed(built)
    made = program(trace, [usable(trace)[0].at])
    check(built, made)
    with pytest.raises(Diverged, match=r"makes a tensor of shape \(2, 6\).*\(3, 6\)"):
        StageRun(made, 0, {}).run(
            lambda: built.call(built.model, (built.batch[0], torch.tensor([1, 2])))
        )


def test_a_point_that_another_pass_lacks():
    built = Built(Erratic().double(), foreign.rows(4), foreign.square)
    cut = [p for p in followed(built).points() if p.name == "layers.1"]
    built.model.skip = True
    with pytest.raises(
        ArgumentError, match=r"begins at layers\.1, which this forward pass does not call"
    ):
        bounds_of(followed(built), cut)


@pytest.mark.parametrize("skipped", [{1}, {3}, {1, 2}, {2, 3}, {1, 2, 3}])
def test_a_stage_that_begins_where_another_pass_does_not_come_by(skipped):
    """It begins as late as the stage before it may go on, and may be left with nothing to do."""

    class Skipping(Erratic):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = x.cos() if self.skip and i in skipped else layer(x)
            return x

    built = Built(Skipping().double(), foreign.rows(4), foreign.square)
    cut = [p for p in followed(built).points() if p.name in ("layers.1", "layers.2", "layers.3")]
    built.model.skip = True
    lacking = followed(built)
    stage_of = {id(p): i for i, layer in enumerate(built.model.layers) for p in layer.parameters()}
    bounds = bounds_of(
        lacking, cut, lambda stage, event: all(stage_of[id(p)] == stage for p in event.parameters)
    )
    made = program(lacking, bounds)
    for stage, layer in enumerate(built.model.layers):
        assert {id(p) for p in made.parameters(stage)} == (
            set() if stage in skipped else {id(p) for p in layer.parameters()}
        )
    check(built, made)
    with pytest.raises(ArgumentError, match="which this forward pass does not call"):
        bounds_of(lacking, cut, lambda stage, event: not event.parameters)


def test_weights_of_other_workers_lie_in_memory_as_they_did():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.pairs = nn.Parameter(torch.randn(6, 6, 2))
            self.columns = nn.Parameter(torch.randn(6, 6).t())

        def forward(self, x):
            x = self.first(x) * self.columns.t().view(-1)[:6]
            return self.last(
                torch.view_as_real(x.to(torch.complex128) @ torch.view_as_complex(self.pairs))[
                    ..., 0
                ]
            )

    built = Built(Pairs().double(), foreign.rows(4), foreign.square)
    wanted = followed(built)
    for p in (built.model.pairs, built.model.columns):
        _hollow(p)
    trace = followed(built)
    assert trace.faked
    assert [(v.shape, v.dtype, v.like[1:]) for v in trace.values if v.like] == [
        (v.shape, v.dtype, v.like[1:]) for v in wanted.values if v.like
    ]
    assert {id(p) for p in built.model.parameters()} == trace.reached


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


def test_errors_are_of_ronde():
    assert issubclass(Diverged, RondeError)


def test_what_is_put_in_place_stays_as_long_as_its_owner():
    class Owner:
        pass

    owner, apply = Owner(), torch.autograd.Function.__dict__["apply"]
    stay(owner)
    assert nn.Module.__call__ is not nn.Module._wrapped_call_impl
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    expected = torch.relu(nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.compile(model, backend="eager")(x), expected)
    # looked at in between, as before and after
    assert len(followed(Built(model, x, foreign.square)).events) > 1
    assert nn.Module.__call__ is not nn.Module._wrapped_call_impl
    del owner
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert torch.autograd.Function.__dict__["apply"] is apply
