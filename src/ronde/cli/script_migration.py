"""Rewrite a Horovod, Accelerate, or plain DDP script for ``ronde.distribute``, line by line.

Only patterns whose meaning is known are changed. Everything else stays, and lines that still need
the old library are listed.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from ronde.cli.script_edits import ScriptEdits

__all__ = ["Migration", "migrate_script"]

_DDP = "torch.nn.parallel.DistributedDataParallel"
_SAMPLER = "torch.utils.data.distributed.DistributedSampler"
_CLIP = "torch.nn.utils.clip_grad_norm_"
_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": _DDP,
    "torch.utils.data.DistributedSampler": _SAMPLER,
    "horovod.horovod.torch": "horovod.torch",
}
_LIBRARIES = {"horovod": "Horovod", "accelerate": "Accelerate", _DDP: "DistributedDataParallel"}
_ME = "ronde.world()"
_VALUES = {
    "accelerator.device": "device",
    "accelerator.num_processes": "size",
    "accelerator.process_index": "rank",
    "accelerator.local_process_index": "local_rank",
    "accelerator.is_main_process": "is_main",
}
_CALLS = {
    "horovod.torch.rank": "rank",
    "horovod.torch.size": "size",
    "horovod.torch.local_rank": "local_rank",
    "horovod.torch.local_size": "local_size",
    "torch.distributed.get_rank": "rank",
    "torch.distributed.get_world_size": "size",
}
_VARIABLES = {"RANK": "rank", "WORLD_SIZE": "size", "LOCAL_RANK": "local_rank"}
_NOT_NEEDED = {
    "horovod.torch.init",
    "horovod.torch.shutdown",
    "horovod.torch.broadcast_parameters",
    "horovod.torch.broadcast_optimizer_state",
    "torch.distributed.init_process_group",
    "torch.distributed.destroy_process_group",
    "torch.cuda.set_device",
    "accelerator.end_training",
}
_OF_RUN = {
    "accelerator.print": "print",
    "accelerator.wait_for_everyone": "barrier",
    "torch.distributed.barrier": "barrier",
    "horovod.torch.barrier": "barrier",
}


@dataclass(frozen=True)
class Migration:
    """A translated script.

    Attributes:
        library: what it was written for.
        source: the new script.
        left: line of the old script -> what a person must look at.
    """

    library: str
    source: str
    left: dict[int, str]


def migrate_script(source: str, file: str = "script") -> Migration:
    """Translate a training script.

    Raises:
        ArgumentError: it is no Python, uses none of the libraries, or its training loop has a form
            that is not known.
    """
    script = _Script(source, file, _SAME)
    used = [*script.imported.values(), *(script.dotted(n) for n in script.nodes)]
    found = [v for k, v in _LIBRARIES.items() if any(n.split(".")[0] == k or n == k for n in used)]
    if not found:
        raise script.refuse(None, f"uses none of {', '.join(_LIBRARIES.values())}.")
    script.translate()
    return Migration(found[0], script.apply(), dict(sorted(script.left.items())))


class _Script(ScriptEdits):
    def translate(self) -> None:
        self.gone: set[str] = set()  # names that nothing assigns any more
        self.options: dict[str, str] = {}
        self.passes: Any = None  # of Accelerate's accumulation
        self.assigns = [n for n in self.nodes if self.target(n)]
        for node in self.assigns:
            if self.dotted(node.value) == "accelerate.Accelerator":
                self.imported[self.target(node)] = "accelerator"
                self.accelerator(node)
        self.calls: list[Any] = [n for n in self.nodes if isinstance(n, ast.Call)]
        self.find_loops()
        self.find_parts()
        for node in self.nodes:
            if isinstance(node, ast.Expr) and self.dotted(node.value) in _NOT_NEEDED:
                self.remove(node)
        self.samplers()
        self.wrappers()
        self.training_loop()
        self.distribute()
        for node in self.nodes:
            self.expression(node)
        self.imports()
        for node in self.nodes:
            if isinstance(node, ast.Name) and not self.edited(node):
                library = self.imported.get(node.id, "").split(".")[0]
                if library in ("horovod", "accelerate", "accelerator") or node.id in self.gone:
                    self.note(node, f"not translated: {self.lines[node.lineno - 1].strip()}")

    # ------------------------------------------------------------------ what is where

    def find_loops(self) -> None:
        self.backward: dict[Any, Any] = {}  # statement -> loss
        for call in self.calls:
            if getattr(call.func, "attr", "") == "backward" and self.outer(call, ast.For):
                ours = self.dotted(call) == "accelerator.backward"
                self.backward[self.parent[call]] = call.args[0] if ours else call.func.value
        loops = list(dict.fromkeys(self.outer(node, ast.For) for node in self.backward))
        if len(loops) != 1:
            where = ", ".join(str(n.lineno) for n in loops) or "none"
            raise self.refuse(None, f"expected one loop with backward(), found at lines: {where}.")
        self.loop, self.call = loops[0], None
        self.epochs = self.outer(self.loop, ast.For)
        self.inner = self.function(self.loop)
        if self.epochs is None and self.inner is not self.tree:
            calls = [c for c in self.calls if self.segment(c.func) == self.inner.name]
            if len(calls) == 1:
                self.call, self.epochs = calls[0], self.outer(calls[0], ast.For)
        limits = getattr(self.epochs and self.epochs.iter, "args", [])
        known = self.epochs and self.segment(self.epochs.iter).startswith("range(")
        if not known or len(limits) > 2:
            raise self.refuse(self.loop, "no loop 'for epoch in range(…)' around this one.")
        self.place = self.function(self.epochs)
        self.arguments: dict[str, str] = {}  # of the loop's function -> of its caller
        if self.call is not None:
            names = [a.arg for a in self.inner.args.args]
            self.arguments = dict(zip(names, map(self.segment, self.call.args), strict=False))
            self.arguments |= {k.arg: self.segment(k.value) for k in self.call.keywords if k.arg}

    def within(self, node: Any, block: Any) -> bool:
        while node is not None and node is not block:
            node = self.parent.get(node)
        return node is block

    def find_parts(self) -> None:
        inside = [c for c in self.calls if self.within(c, self.loop)]
        steps = [c for c in inside if getattr(c.func, "attr", "") == "step"]
        models = {
            self.segment(c.args[0].func.value)
            for c in self.calls
            if c.args and self.segment(c.args[0]).endswith(".parameters()")
        }
        local = {c.func.id for c in inside if isinstance(c.func, ast.Name)}
        self.model = next((m for m in local if self.arguments.get(m, m) in models), "")
        schedulers = [s for s in steps if "sched" in self.segment(s.func).lower()]
        others = [s for s in steps if s not in schedulers and not s.args and not s.keywords]
        iterated = [n for n in ast.walk(self.loop.iter) if isinstance(n, ast.Name)]
        loaders = [n for n in iterated if "load" in n.id.lower() or n is self.loop.iter]
        if not self.model or len(others) != 1 or len(loaders) != 1 or len(schedulers) > 1:
            raise self.refuse(
                self.loop,
                "this loop is not known: expected one loader, a call of the model whose parameters "
                "an optimizer has, one optimizer.step(), and at most one scheduler.step().",
            )
        self.own_schedulers = [  # that the script steps, once per epoch
            self.segment(c.func.value)
            for c in self.calls
            if self.within(c, self.epochs) and c not in inside
            if getattr(c.func, "attr", "") == "step" and "sched" in self.segment(c.func).lower()
        ][:1]
        self.step, self.loader = others[0], loaders[0]
        self.optimizer = self.segment(self.step.func.value)
        self.scheduler = schedulers[0] if schedulers else None

    def outside(self, name: str) -> str:
        return self.arguments.get(name, name)

    def has_run(self, node: Any) -> bool:
        """Whether the name ``run`` is known where a node is."""
        before = self.function(node) is self.place and node.lineno < self.epochs.lineno
        passed = self.call is not None and self.within(node, self.inner)
        return not before and (passed or self.within(node, self.place))

    # ------------------------------------------------------------------ setup

    def accelerator(self, node: Any) -> None:
        for k in node.value.keywords:
            value = self.segment(k.value)
            if k.arg == "mixed_precision":
                if value.strip("'\"") != "no":
                    self.options["precision"] = value
            elif k.arg == "split_batches" and value == "True":
                self.options["batch"] = '"keep"'
            elif k.arg == "gradient_accumulation_steps":
                self.passes = k.value
            elif k.arg != "cpu":
                self.note(k.value, f"not translated: Accelerator({k.arg}={value})")
        self.remove(node)

    def loader_names(self) -> set[str]:
        return {self.loader.id, self.outside(self.loader.id)}

    def loader_calls(self) -> list[Any]:
        """Where the training's DataLoader is made."""
        loader = [a for a in self.assigns if self.target(a) == self.outside(self.loader.id)]
        return [a.value for a in loader if self.dotted(a.value).endswith(".DataLoader")]

    def samplers(self) -> None:
        made = self.loader_calls()
        for node in [n for n in self.calls if self.dotted(n) == _SAMPLER]:
            statement, given = self.parent[node], {k.arg: k.value for k in node.keywords}
            name = self.target(statement)
            uses = [
                (call, k)
                for call in made
                for k in call.keywords
                if k.arg == "sampler" and (k.value is node or self.segment(k.value) == name)
            ]
            if not uses:  # of an evaluation: it stays
                if len(node.args) < 2 and "num_replicas" not in given:
                    end = self.span(node)[1] - 1
                    self.edits[end, end] = f", num_replicas={_ME}.size, rank={_ME}.rank"
                continue
            if extra := set(map(str, given)) - {"num_replicas", "rank", "shuffle"}:
                self.note(node, f"not translated: DistributedSampler({', '.join(sorted(extra))})")
            shuffle = self.segment(given["shuffle"]) if "shuffle" in given else "True"
            for call, keyword in uses:
                for k in call.keywords:
                    if k.arg == "shuffle":
                        self.remove_argument(call, k)
                self.replace(keyword, f"shuffle={shuffle}")
                for each in self.calls:  # its length was a worker's share
                    if self.segment(each) in (f"len({n})" for n in self.loader_names()):
                        self.replace(each, f"-(-{self.segment(each)} // {_ME}.size)")
            if name:
                self.remove(statement)
                self.gone.add(name)
                self.without_sampler(name, self.segment(node.args[0]))

    def without_sampler(self, name: str, data: str) -> None:
        for call in self.calls:
            if self.segment(call.func) == f"{name}.set_epoch":
                self.remove(self.parent[call])
            elif self.segment(call) == f"len({name})":
                self.replace(call, f"-(-len({data}) // {_ME}.size)")

    def wrappers(self) -> None:
        for node in self.assigns:
            call, name = node.value, self.dotted(node.value)
            if name == "accelerator.prepare":
                self.remove(node)
            elif name in (_DDP, "horovod.torch.DistributedOptimizer") and call.args:
                harmless = {"device_ids", "output_device", "find_unused_parameters"}
                harmless |= {"gradient_as_bucket_view", "named_parameters"}
                for k in call.keywords:
                    plain = self.segment(k.value).endswith((".Average", "Compression.none"))
                    if k.arg not in harmless and not plain:
                        self.note(k.value, f"not translated: {k.arg}={self.segment(k.value)}")
                if self.segment(call.args[0]) == self.target(node):
                    self.remove(node)
                else:
                    self.replace(call, self.segment(call.args[0]))

    def learning_rate(self) -> str:
        """``linear`` if the optimizer's rate was multiplied by the number of ranks, and nothing
        else of the script sets it.
        """
        if self.own_schedulers or "param_groups" in self.text:
            return "none"
        for node in [a for a in self.assigns if self.target(a) == self.outside(self.optimizer)]:
            for k in [k for k in ast.walk(node) if isinstance(k, ast.keyword) and k.arg == "lr"]:
                if isinstance(k.value, ast.BinOp) and isinstance(k.value.op, ast.Mult):
                    sides = (k.value.left, k.value.right)
                    for one, other in (sides, sides[::-1]):
                        if _CALLS.get(self.dotted(one)) == "size" and isinstance(one, ast.Call):
                            self.replace(k.value, self.segment(other))
                            return "linear"
        return "none"

    # ------------------------------------------------------------------ the loop

    def training_loop(self) -> None:
        self.replace(self.loader, "run.batches()")
        for call in [c for c in self.calls if self.within(c, self.loop)]:
            statement, words = self.parent[call], self.segment(call.func)
            if words == self.model:
                self.replace(call.func, "run.model")
            elif words in (f"{self.optimizer}.zero_grad", f"{self.optimizer}.synchronize"):
                self.remove(statement)
            elif self.dotted(call) in (_CLIP, "accelerator.clip_grad_norm_"):
                if len(call.args) == 2 and not call.keywords:
                    self.options["clip_norm"] = self.segment(call.args[1])
                    self.remove(statement)
            elif call is self.scheduler:
                self.remove(statement)
        for statement, loss in self.backward.items():
            if isinstance(loss, ast.Call) and getattr(loss.func, "attr", "") == "scale":
                self.note(loss, "not translated: GradScaler; give distribute precision='fp16'")
            self.replace(statement, f"run.backward({self.segment(loss)})")
        self.replace(self.parent[self.step], "run.update()")
        for node in [n for n in ast.walk(self.loop) if isinstance(n, ast.With)]:
            if "skip_synchronize" in self.segment(node.items[0]):
                self.edits.pop(self.span(self.parent[self.step]), None)
                self.replace(node, "run.update()")
            elif self.dotted(node.items[0].context_expr) == "accelerator.accumulate":
                self.accumulate(node)
        if self.passes is not None and self.segment(self.passes) != "1":
            self.note(self.passes, "not translated: gradient_accumulation_steps")
        limits = [self.segment(a) for a in self.epochs.iter.args]
        if len(limits) == 1:
            self.replace(self.epochs.iter, f"run.epochs({limits[0]})")
        else:
            first, last = limits
            count = re.sub(rf" \+ {first}$", "", last)
            count = count if count != last else f"{last} - {first}"
            name = self.segment(self.epochs.target)
            self.replace(self.epochs.iter, f"({name} + {first} for {name} in run.epochs({count}))")

    def accumulate(self, node: ast.With) -> None:
        """A loop over micro-batches, and an update after it."""
        sizes = [k.value for c in self.loader_calls() for k in c.keywords if k.arg == "batch_size"]
        if self.passes is None or len(sizes) != 1 or not self.within(self.step, node):
            return
        last = self.loop.target
        if self.segment(self.loop.iter).startswith("enumerate(") and isinstance(last, ast.Tuple):
            last = last.elts[1]
        taken = self.segment(last).strip("()")
        start, end = self.span(node)[0], self.span(node.items[0].context_expr)[1]
        self.edits[start, end] = f"for {taken} in micro_batches"
        self.replace(last, "micro_batches")
        self.edits.pop(self.span(self.parent[self.step]))
        self.remove(self.parent[self.step])
        place = self.text.index("\n", self.span(node)[1]) + 1
        self.edits[place, place] = " " * node.col_offset + "run.update()\n"
        self.options["micro_batch"] = self.segment(sizes[0])
        self.replace(sizes[0], f"{self.segment(sizes[0])} * {self.segment(self.passes)}")
        self.passes = None

    def loss(self) -> str:
        """What computes the loss from output and target."""
        (loss,) = list(self.backward.values())[:1]
        if isinstance(loss, ast.Name):
            told = [a for a in self.assigns if self.target(a) == loss.id]
            told = [a for a in told if self.within(a, self.loop)]
            loss = told[0].value if len(told) == 1 else loss
        if isinstance(loss, ast.Call) and len(loss.args) == 2 and not loss.keywords:
            name = self.segment(loss.func)
            if name.startswith(("self.", "run.")) is False and ".scale" not in name:
                return self.outside(name)
        self.note(loss, "write the loss as loss(output, target) and give it to ronde.distribute")
        return "None"

    def distribute(self) -> None:
        rule = self.learning_rate()
        words = [self.outside(n) for n in (self.model, self.optimizer, self.loader.id)]
        words.append(f"loss={self.loss()}")
        grow = {"batch": '"grow"', "lr_rule": f'"{rule}"', "warmup_steps": "0"}
        given = self.options if "batch" in self.options else {**grow, **self.options}
        words += [f"{k}={v}" for k, v in given.items() if v != '"keep"']
        after = "".join(f"run.register({name}={name})\n" for name in self.own_schedulers)
        if self.scheduler is not None:
            words.append(f"scheduler={self.outside(self.segment(self.scheduler.func.value))}")
            if "accelerator" in self.imported.values():
                self.note(self.scheduler, "Accelerate steps it once per worker, Ronde once")
        start = self.span(self.epochs)[0]
        indent = " " * self.epochs.col_offset
        text = f"run = ronde.distribute({', '.join(words)})\n"
        if len(indent) + len(text) > 100:
            lines = "".join(f"{indent}    {word},\n" for word in words)
            text = f"run = ronde.distribute(\n{lines}{indent})\n"
        text += indent * bool(after) + after
        self.edits[start, start] = f"{text}{indent}"
        if self.call is not None and not self.within(self.inner, self.place):
            for where in (
                self.span(self.call.func)[1] + 1,
                self.text.index("(", self.span(self.inner)[0]),
            ):
                place = where if self.text[where - 1] == "(" else where + 1
                empty = self.text[place:].lstrip().startswith(")")
                self.edits[place, place] = "run" if empty else "run, "

    # ------------------------------------------------------------------ expressions

    def expression(self, node: Any) -> None:
        if not isinstance(node, ast.expr) or self.edited(node):
            return
        name = self.dotted(node)
        if isinstance(node, ast.Attribute) and name in _VALUES:
            self.replace(node, f"{_ME}.{_VALUES[name]}")
        elif isinstance(node, ast.Attribute) and node.attr == "module":
            wrapped = [a for a in self.assigns if self.dotted(a.value) == _DDP]
            if self.segment(node.value) in map(self.target, wrapped):
                self.replace(node, self.segment(node.value))
        elif isinstance(node, ast.Call):
            self.call_of(node, name)

    def call_of(self, node: ast.Call, name: str) -> None:
        options = {k.arg: self.segment(k.value) for k in node.keywords}
        first = self.segment(node.args[0]) if node.args else ""
        variable = re.fullmatch(
            r"int\(os\.(?:environ\[|getenv\(|environ\.get\()['\"](\w+)",
            self.segment(node).split(",")[0].rstrip(")]'\""),
        )
        if name in _CALLS:
            self.replace(node, f"{_ME}.{_CALLS[name]}")
        elif variable and variable[1] in _VARIABLES:
            self.replace(node, f"{_ME}.{_VARIABLES[variable[1]]}")
        elif name in ("accelerator.unwrap_model", "accelerator.gather_for_metrics"):
            if not self.within(node, self.loop):
                self.replace(node, first)
        elif name in _OF_RUN and self.has_run(node):
            self.replace(node.func, f"run.{_OF_RUN[name]}")
        elif name == "horovod.torch.allreduce" and self.has_run(node):
            op = options.get("op", "Average").rpartition(".")[2]
            if set(options) <= {"name", "op"} and len(node.args) == 1 and op in ("Average", "Sum"):
                self.replace(
                    node,
                    f"run.reduce({first})" if op == "Average" else f'run.reduce({first}, "sum")',
                )

    def imports(self) -> None:
        kept = {n.id for n in self.nodes if isinstance(n, ast.Name) and not self.edited(n)}
        put = False
        for node in [n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom)]:
            names = [a.asname or a.name.split(".")[0] for a in node.names]
            full = [self.imported.get(n, "") for n in names]
            old = [f.split(".")[0] in ("horovod", "accelerate") for f in full]
            ours = ("torch.distributed", "torch.nn.parallel", "torch.utils.data")
            unused = all(
                n not in kept and f.startswith(ours) for n, f in zip(names, full, strict=True)
            )
            if all(old) or unused:
                self.replace(node, "" if put else "import ronde")
                put = True
        if not put:
            first = next(n for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom))
            start = self.span(first)[0]
            self.edits[start, start] = "import ronde\n"
