"""The reducers a plan can name: what each is called, which numbers it takes, and whether it is
exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean

__all__ = ["REDUCERS", "ReducerChoice", "ReducerKind", "Setting", "parse_reducer"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A number that a reducer takes.

    Attributes:
        name: what it is.
        default: its value if none is given.
        least, most: its limits.
        whole: whether it must be a whole number.
    """

    name: str
    default: float
    least: float
    most: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class ReducerKind:
    """What is known of a reducer without building it.

    Attributes:
        exact: whether it averages all gradients in each step, up to rounding.
        settings: the numbers that follow its name, separated by colons.
        feedback: whether it adds what it did not send to the next step's gradient.
        effect: what a lossy one does to the training, for messages.
    """

    exact: bool
    settings: tuple[Setting, ...] = ()
    feedback: bool = False
    effect: str = ""

    @property
    def local(self) -> bool:
        """Whether workers take steps of their own between exchanges."""
        return any(s.name == "steps" for s in self.settings)


_BUCKET = (Setting("bucket MiB", 25, 0.001, 4096),)
_STEPS = Setting("steps", 8, 1, 1e6, whole=True)

REDUCERS: dict[str, ReducerKind] = {
    "ring": ReducerKind(True, _BUCKET),
    "hierarchical": ReducerKind(True, _BUCKET),
    "servers": ReducerKind(True, _BUCKET),
    "auto": ReducerKind(True),
    "fp16": ReducerKind(False, _BUCKET, effect="gradients are rounded to 11 bits"),
    "bf16": ReducerKind(False, _BUCKET, effect="gradients are rounded to 8 bits"),
    "topk": ReducerKind(
        False,
        (Setting("fraction", 0.01, 1e-6, 1),),
        True,
        "each step applies the largest gradients only",
    ),
    "powersgd": ReducerKind(
        False,
        (Setting("rank", 4, 1, 1024, whole=True),),
        True,
        "gradients are approximated by matrices of low rank",
    ),
    "local": ReducerKind(
        False, (_STEPS,), effect="workers train alone and average their weights now and then"
    ),
    "post-local": ReducerKind(
        False,
        (_STEPS, Setting("first step", 100, 0, 1e12, whole=True)),
        effect="after some steps, workers train alone and average their weights now and then",
    ),
    "diloco": ReducerKind(
        False,
        (
            Setting("steps", 64, 1, 1e6, whole=True),
            Setting("outer learning rate", 0.7, 1e-6, 10),
            Setting("outer momentum", 0.9, 0, 0.9999),
        ),
        effect="workers train alone, and an outer optimizer takes the mean of how far they went",
    ),
}
"""Name -> what a reducer is."""

_WITHOUT = "no-feedback"


@dataclass(frozen=True, slots=True)
class ReducerChoice:
    """A reducer and its numbers.

    Example:
        >>> parse_reducer("topk:0.05").values
        (0.05,)
        >>> parse_reducer("local"), parse_reducer("topk:no-feedback").feedback
        (ReducerChoice(name='local', values=(8,), feedback=False), False)
    """

    name: str
    values: tuple[float, ...]
    feedback: bool

    @property
    def kind(self) -> ReducerKind:
        """What is known of it."""
        return REDUCERS[self.name]

    def __str__(self) -> str:
        defaults = tuple(s.default for s in self.kind.settings)
        shown = [] if self.values == defaults else [f"{v:g}" for v in self.values]
        without = [_WITHOUT] if self.kind.feedback and not self.feedback else []
        return ":".join([self.name, *shown, *without])


def parse_reducer(text: str) -> ReducerChoice:
    """Parse ``"ring"``, ``"topk:0.01"``, ``"local:16"``, ``"topk:no-feedback"``.

    Raises:
        ArgumentError: the name is not known, or a number is not allowed.
    """
    name, *rest = str(text).split(":")
    where = f"reducer={text!r}"
    if name not in REDUCERS:
        hint = did_you_mean(name, REDUCERS)
        raise ArgumentError(
            f"{where}: {name!r} is not known.{hint} Expected one of {', '.join(REDUCERS)}."
        )
    kind = REDUCERS[name]
    feedback = kind.feedback
    if feedback and _WITHOUT in rest:
        rest.remove(_WITHOUT)
        feedback = False
    if len(rest) > len(kind.settings):
        takes = ":".join(s.name for s in kind.settings) or "nothing"
        raise ArgumentError(f"{where}: {name} takes {takes} after its name.")
    values = [s.default for s in kind.settings]
    for i, (word, setting) in enumerate(zip(rest, kind.settings, strict=False)):
        try:
            value = float(word)
        except ValueError:
            value = float("nan")  # within no limits
        if not setting.least <= value <= setting.most or (setting.whole and value % 1):
            number = "a whole number" if setting.whole else "a number"
            raise ArgumentError(
                f"{where}: {setting.name} must be {number} from {setting.least:g} to "
                f"{setting.most:g}, found {word!r}."
            )
        values[i] = int(value) if setting.whole else value
    return ReducerChoice(name, tuple(values), feedback)
