"""A Plan says what to do with a model and a batch; it is read from and written to YAML."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean

ShardLevel = Literal["none", "optimizer", "gradients", "parameters"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "looped"]

LR_RULES = ("linear", "sqrt", "none")
"""How the learning rate may follow a grown batch."""

# What other libraries call these plans.
_ALIASES = {
    "data": "replicate",
    "ddp": "replicate",
    "single": "replicate",
    "zero1": "shard=optimizer",
    "zero2": "shard=gradients",
    "zero3": "shard=parameters",
    "fsdp": "shard=parameters",
    "shard": "shard=parameters",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in a layout.

    Attributes:
        pipeline: its place along the pipeline, from 0 (with several stages a worker, the place of
            its first one).
        replica: which share of each global batch it has.
        tensor: its place among the workers that hold one layer together.
    """

    pipeline: int
    replica: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How workers are arranged: tensor parallel innermost (neighbors in a node), then replicas,
    pipeline outermost.

    Example:
        >>> Layout(pipeline=2, replicas=2, tensor=2).place(5)
        Place(pipeline=1, replica=0, tensor=1)
        >>> Layout(pipeline=2, replicas=2, tensor=1).along_pipeline(1)
        [1, 3]
    """

    pipeline: int = 1
    replicas: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """World size."""
        return self.pipeline * self.replicas * self.tensor

    def place(self, rank: int) -> Place:
        """The place of ``rank``."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, replica = divmod(rest, self.replicas)
        return Place(pipeline, replica, tensor)

    def rank(self, place: Place) -> int:
        """The rank at a place."""
        return (place.pipeline * self.replicas + place.replica) * self.tensor + place.tensor

    def along_pipeline(self, rank: int) -> list[int]:
        """Ranks of ``rank``'s pipeline, first stage first."""
        me = self.place(rank)
        return [self.rank(Place(p, me.replica, me.tensor)) for p in range(self.pipeline)]


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        workers: world size.
        batch_size: global samples per optimizer step, as trained (after ``batch="grow"`` has
            multiplied it).
        batch: the contract, ``"keep"`` or ``"grow"``.
        micro_batch: most samples a worker holds at once, None for its whole share.
        accumulation: micro-batches per step and worker; under a pipeline, those that are in it.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (``"fp32"`` leaves the script's own types
            alone).
        clip_norm: largest norm of all gradients together, or None.
        seed: key of the order of samples and of augmentation.
        randomness: whether a step's random numbers are those of the samples' places in the global
            batch (``"global"``), or each worker's own (``"worker"``).
        drop_last: whether a last, shorter batch is left out.
        sync_batchnorm: whether batch normalisation sees the whole global batch.
        lr_rule: how the learning rate follows a grown batch.
        lr_factor: what it was multiplied by.
        warmup_steps: optimizer steps over which it gets there.
        shard: what is split over the replicas instead of held by each: ``"none"`` (replicate),
            ``"optimizer"`` (ZeRO-1), ``"gradients"`` (ZeRO-2) or ``"parameters"`` (ZeRO-3, FSDP),
            each with what comes before it.
        shard_within: how many neighbouring replicas share one sharded copy (hybrid sharding, within
            nodes); None for all.
        pipeline: workers that one copy of the model is cut over, layer after layer.
        virtual: stages per worker of the pipeline.
        schedule: the order of the micro-batches through the pipeline.
        split_at: names of the modules that begin a pipeline's later stages; empty: chosen when the
            run starts, which then has them here.
        optimize: whether the cut evens out time (``"speed"``) or memory (``"memory"``).
        tensor: workers that hold each layer together.
        recompute: activations that the backward pass computes again: ``"none"``, ``"selective"`` or
            ``"full"``.
        offload: what waits in the host's memory: ``"none"``, ``"optimizer"`` (its state) or
            ``"parameters"`` (both).
        reducer: how gradients are averaged over the replicas of ``"replicate"`` and
            ``shard="optimizer"``: ``"ring"``, ``"hierarchical"``, ``"servers"``, ``"auto"``,
            ``"topk:0.01"``, … (see :func:`parse_reducer`).

    Example:
        >>> plan = Plan(workers=4, batch_size=64, pipeline=2, shard="parameters")
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
        >>> plan.spec
        'pipeline=2,shard=parameters'
        >>> plan.layout
        Layout(pipeline=2, replicas=2, tensor=1)
    """

    workers: int = 1
    batch_size: int = 1
    batch: Literal["keep", "grow"] = "keep"
    micro_batch: int | None = None
    accumulation: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip_norm: float | None = None
    seed: int = 0
    randomness: Literal["global", "worker"] = "worker"
    drop_last: bool = False
    sync_batchnorm: bool = False
    lr_rule: str = "none"
    lr_factor: float = 1.0
    warmup_steps: int = 0
    shard: ShardLevel = "none"
    shard_within: int | None = None
    pipeline: int = 1
    virtual: int = 1
    schedule: Schedule = "1f1b"
    split_at: tuple[str, ...] = ()
    optimize: Literal["speed", "memory"] = "speed"
    tensor: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    offload: Literal["none", "optimizer", "parameters"] = "none"
    reducer: str = "ring"

    @property
    def replicas(self) -> int:
        """Number of shares of each global batch."""
        return max(1, self.workers // (self.pipeline * self.tensor))

    @property
    def layout(self) -> Layout:
        """Where each worker sits."""
        return Layout(self.pipeline, self.replicas, self.tensor)

    @property
    def spec(self) -> str:
        """The plan as one word that :meth:`parse` reads."""
        parts = []
        if self.pipeline > 1:
            parts.append(f"pipeline={self.pipeline}")
            if self.virtual > 1:
                parts.append(f"virtual={self.virtual}")
            if self.schedule != "1f1b":
                parts.append(f"schedule={self.schedule}")
            if self.optimize != "speed":
                parts.append(f"optimize={self.optimize}")
        if self.tensor > 1:
            parts.append(f"tensor={self.tensor}")
        if self.shard != "none":
            parts.append(f"shard={self.shard}")
            if self.shard_within:
                parts.append(f"shard_within={self.shard_within}")
        for name in ("recompute", "offload"):
            if getattr(self, name) != "none":
                parts.append(f"{name}={getattr(self, name)}")
        # These alone would not say how the model is held.
        if self.reducer != "ring":
            parts = [*(parts or ["replicate"]), f"reducer={self.reducer}"]
        if self.micro_batch:
            parts = [*(parts or ["replicate"]), f"micro_batch={self.micro_batch}"]
        if self.pipeline > 1 and self.split_at:
            parts.append("split_at=" + "+".join(self.split_at))
        return ",".join(parts) or "replicate"

    @property
    def family(self) -> str:
        """``"replicate"``, ``"shard"``, ``"pipeline"``, ``"tensor"``, or several of them as
        ``"pipeline × shard"``.
        """
        parts = [name for name in ("pipeline", "tensor") if getattr(self, name) > 1]
        if self.shard != "none":
            parts.append("shard")
        elif self.replicas > 1 or not parts:
            parts.append("replicate")
        return " × ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parse a short text: ``"replicate"``, ``"shard"``,
        ``"pipeline=2,shard=gradients,recompute=full"``.

        Raises:
            ArgumentError: a word is not known.

        Example:
            >>> Plan.parse("pipeline=2,schedule=gpipe").schedule
            'gpipe'
            >>> Plan.parse("zero3").shard
            'parameters'
        """
        values: dict[str, Any] = {}
        for raw in text.split(","):
            word = _ALIASES.get(raw.strip(), raw.strip())
            if word == "replicate":
                continue
            name, equals, value = word.partition("=")
            if not equals or name not in _WORDS:
                hint = did_you_mean(name, [*_ALIASES, "replicate", *_WORDS])
                if name in {f.name for f in dataclasses.fields(cls)} - {*_WORDS}:
                    hint = " It does not split the work: give it to ronde.distribute or ronde run."
                raise ArgumentError(
                    f"plan={text!r}: {word!r} is not known.{hint} Expected 'auto', a "
                    "plan's file, or words joined by commas: replicate, "
                    "shard=optimizer|gradients|parameters, shard_within=N, pipeline=N, "
                    f"virtual=N, schedule={'|'.join(get_args(Schedule))}, "
                    "tensor=N, recompute=selective|full, "
                    "offload=optimizer|parameters, reducer=NAME, micro_batch=N."
                )
            if name in values:
                raise ArgumentError(f"plan={text!r}: {name} is given twice.")
            if name == "split_at":
                values[name] = tuple(v for v in value.split("+") if v)
            elif name in _COUNTS:
                try:
                    values[name] = int(value)
                except ValueError:
                    raise ArgumentError(
                        f"plan={text!r}: {name} must be a whole number, found {value!r}."
                    ) from None
            else:
                values[name] = value
        plan = cls(**values)
        plan.check()
        # Without a pipeline they would be ignored without a word.
        alone = [name for name in ("schedule", "virtual", "split_at") if name in values]
        if plan.pipeline == 1 and alone:
            raise ArgumentError(
                f"plan={text!r}: {alone[0]} applies to pipelines only: add pipeline=N."
            )
        return plan

    def check(self) -> None:
        """Raise ArgumentError for a value that is not allowed."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"plan: {name}={getattr(self, name)!r} is not known: choose one of "
                    f"{', '.join(map(repr, allowed))}."
                )
        for name in (*_COUNTS, "workers", "accumulation"):
            value = getattr(self, name)
            if value is None and name in ("shard_within", "micro_batch"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"plan: {name}={value!r} must be a whole number, 1 or more.")
        self._check_reducer()

    def _check_reducer(self) -> None:
        if self.reducer == "ring":
            return
        from ronde.plan.reducers import parse_reducer

        choice = parse_reducer(self.reducer)
        # "ring:25" is the ring, too
        if choice.name == "ring" and choice == parse_reducer("ring"):
            return
        if self.pipeline > 1 or self.tensor > 1 or self.shard in ("gradients", "parameters"):
            raise ArgumentError(
                f"plan={self.spec!r}: a reducer averages whole gradients, and this plan divides "
                "them. Use it with replicate or shard=optimizer."
            )
        if choice.kind.local and self.shard != "none":
            raise ArgumentError(
                f"plan={self.spec!r}: with shard=optimizer, each parameter is updated by one "
                f"worker, so workers cannot train alone as {choice.name} does. Use replicate."
            )
        if self.precision == "fp16" and (choice.feedback or choice.kind.local):
            raise ArgumentError(
                f"plan={self.spec!r}: precision='fp16' changes the scale of gradients from step "
                f"to step, which the state of {choice.name} does not follow. Use "
                "precision='bf16'."
            )

    def check_workers(self, workers: int) -> None:
        """Raise ArgumentError if so many workers do not fit the plan."""
        together = self.pipeline * self.tensor
        if workers % together:
            raise ArgumentError(
                f"plan={self.spec!r} needs workers in multiples of {together} (pipeline "
                f"{self.pipeline} × tensor {self.tensor}), here "
                f"{'is' if workers == 1 else 'are'} {workers}: start it with ronde run "
                f"--workers {-(-workers // together) * together}."
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Build from plain values; unknown names are refused."""
        known = {f.name for f in dataclasses.fields(cls)}
        # of plans written before 0.2; with another value they are no plan of this version
        old = (("strategy", "data"), ("sequence_parallel", False))
        values = {k: v for k, v in values.items() if (k, v) not in old}
        unknown = sorted(str(name) for name in set(values) - known)
        if unknown:
            raise ArgumentError(
                f"a plan has no {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        made: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**made)

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @staticmethod
    def file_of(text: str) -> Path | None:
        """The file a plan argument means; None if ``text`` is words for :meth:`parse`.

        A name with a plan file's suffix is a file even if it does not exist; the caller reports
        that.

        Example:
            >>> Plan.file_of("pipeline=2"), str(Plan.file_of("my.yaml"))
            (None, 'my.yaml')
        """
        if text == "replicate" or text in _ALIASES:  # also where a file has that name
            return None
        try:
            there = Path(text).is_file()
        except (OSError, ValueError):  # many words are too long for a file's name
            there = False
        return Path(text) if there or text.endswith((".yaml", ".yml", ".json")) else None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Load a plan file of any name: YAML or JSON from :meth:`save`, or the winner of ``ronde
        plan --json``.

        Raises:
            ArgumentError: it cannot be read, or holds no plan.
        """
        from ronde.plan.fields import read_file  # few runs read a file

        values = read_file(path, "plan", "'ronde plan --save'")
        if "plan" not in values and "plans" in values:
            values = _winner(values, path)
        try:
            plan = cls.from_dict(values)
            plan.check()
        except ArgumentError as error:
            raise ArgumentError(f"{path} holds no plan that can be used: {error}") from None
        return plan

    def sentence(self, differs: bool = False, proof: str = "", smallest: int | None = None) -> str:
        """The batch contract in one line, and what is known beyond it.

        Args:
            differs: a run was warned that its training is not the one of one process.
            proof: what was proved about the script under this plan; empty if nothing.
            smallest: the smallest global batch, if their sizes differ.
        """
        per_worker = -(-self.batch_size // self.replicas)
        text = f"global batch {self.batch_size}"
        if smallest is not None:
            text = f"global batches of {smallest} to {self.batch_size} samples"
        elif self.replicas > 1:
            approx = "" if self.batch_size % self.replicas == 0 else "at most "
            text += (
                f" = {self.replicas} "
                f"{'workers' if self.replicas == self.workers else 'replicas'} × "
                f"{approx}{per_worker}"
            )
        if self.accumulation > 1:
            text += f", in {self.accumulation} micro-batches of at most {self.micro_batch}"
        if self.batch == "grow" and self.workers > 1:
            text += (
                f"; grown with the workers, learning rate × {self.lr_factor:g} "
                f"({self.lr_rule}, warm-up {self.warmup_steps} steps)"
            )
        else:
            known = "the same samples, order, and rate on any number of workers"
            if differs:
                text += f"; {known}, but not the same training: see the warnings"
            else:
                text += f"; {proof or f'{known}. `ronde prove` checks the rest'}"
        return text


def _winner(answer: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """An answer's best plan, with its predicted cut."""
    try:
        best = answer["plans"][0]
        # The cut was chosen by prediction and stands beside the plan, which asked for none.
        cut = best["split_at"] if best["plan"]["pipeline"] > 1 else []
        return {**best["plan"], "split_at": cut or best["plan"]["split_at"]}
    except (KeyError, IndexError, TypeError):
        raise ArgumentError(
            f"{path} holds no plan: expected what 'ronde plan --save' writes, or the "
            "answer of 'ronde plan --json'"
        ) from None


_CHOICES: dict[str, tuple[str, ...]] = {
    "shard": get_args(ShardLevel),
    "schedule": get_args(Schedule),
    "optimize": ("speed", "memory"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "parameters"),
}

SPLIT_FIELDS = (
    "shard",
    "shard_within",
    "pipeline",
    "virtual",
    "schedule",
    "split_at",
    "optimize",
    "tensor",
    "recompute",
    "offload",
    "reducer",
)
"""What of a plan says how the work is split; the rest is the batch contract."""

_WORDS = (*SPLIT_FIELDS, "micro_batch")  # what Plan.parse reads
_COUNTS = ("shard_within", "pipeline", "virtual", "tensor", "micro_batch")
