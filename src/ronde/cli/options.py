"""Offers ``option``, and commands whose options may have a value or none."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ronde.world import ArgumentError

F = TypeVar("F", bound=Callable[..., None])


def option(flags: str, help: str, metavar: str = "", **more: Any) -> Any:
    """An option: its flags with spaces between them, its help, the name of its value, and what
    else ``typer.Option`` takes.

    Example:
        >>> option("--workers -n", "How many.", "N").param_decls
        ('--workers', '-n')
    """
    return typer.Option(*flags.split(), metavar=metavar or None, help=help, **more)


def setting(default: Any, flags: str, help: str, metavar: str = "", **more: Any) -> Any:
    """A field of a dataclass of options: its default, and what :func:`option` takes."""
    metadata = {"option": option(flags, help, metavar, **more)}
    return dataclasses.field(default=default, metadata=metadata)


host_setting = functools.partial(setting, rich_help_panel="Several hosts")
"""A :func:`setting` in a panel of its own in the help."""
REQUIRED = dataclasses.MISSING
"""The default of an option that must be given."""


def argument(metavar: str, help: str = "", default: Any = REQUIRED) -> Any:
    """A field of a dataclass of options that is a word, not an option; without a default it must be
    given.
    """
    word = typer.Argument(metavar=metavar, help=help or None, show_default=False)
    return dataclasses.field(default=default, metadata={"option": word})


RunsOption = Annotated[
    Path, option("--runs", "Folder that holds the runs.", "DIR", envvar="RONDE_RUNS")
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The run, or a path to its directory.", show_default=False),
]
JsonFlag = Annotated[bool, option("--json", "Print the result as JSON.")]


TIME = "a time, as 27d, 1d12h, 90m, or 45s"


def parsed(flag: str, text: str, parse: Callable[[str], float | None], expected: str) -> float:
    """The value of an option.

    Raises:
        ArgumentError: it has none, or is zero.

    Example:
        >>> parsed("--memory", "1kB", parse_bytes, "a size such as 32GiB")
        1000.0
    """
    if not (value := parse(text)):
        raise ArgumentError(f"{flag} {text}: expected {expected}.")
    return value


_own_options: list[str] = []


def own_options() -> list[str]:
    """Options of the verb that runs, as they are written: ``--workers``, ``-n``."""
    return _own_options


def _flags_alone(params: list[Any]) -> list[Any]:
    """Hide the ``<bool>`` that typer writes for flags."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


_VALUE = re.compile(r"auto|local|yarn|[^\s/:]+:\S+|local\S*\[.*\]")
_KIND = re.compile(r"[^-./][^./]*")  # a word that is no script: a wrong one gets an error
_VALUES = {"[KIND]": _KIND, "[ps=N]": re.compile(r"ps=.*")}


def filled_in(params: list[Any], args: list[str]) -> list[str]:
    """Arguments in which every option with a value in brackets, ``[ADDRESS]``, has one: ``auto`` if
    neither an address nor a kind follows it.
    """
    options = {name: p for p in params if p.param_type_name == "option" for name in p.opts}
    words: list[str] = []
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        words.append(word := rest.pop(0))
        param = options.get(word)
        if param is None or param.is_flag:
            continue
        value = _VALUES.get(param.metavar or "", _VALUE)
        if (param.metavar or "").startswith("[") and not (rest and value.fullmatch(rest[0])):
            words.append("auto")
        else:
            words += rest[:1]
            del rest[:1]
    return words + rest


@contextlib.contextmanager
def _telling_refusals(verb: str | None) -> Iterator[None]:
    """Where a service runs this command, it gets the reason why ``ronde run`` was refused."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if verb in ("run", "map"):
            from ronde.launch.container import tell_service

            tell_service(getattr(error, "format_message", error.__str__)())
        raise


class Verb(TyperCommand):
    """A command whose flags show no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options, ``--help`` among them."""
        return _flags_alone(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is written, with the values that may be left out."""
        with _telling_refusals(self.name):
            return list(super().parse_args(ctx, filled_in(self.params, args)))

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        # For hints about an option that is mistyped, or stands after the script.
        _own_options[:] = [
            name for p in self.params if p.param_type_name == "option" for name in p.opts
        ]
        with _telling_refusals(self.name):
            return super().invoke(ctx)


class Group(TyperGroup):
    """A group of commands whose flags show no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options, ``--help`` among them."""
        return _flags_alone(super().get_params(ctx))


class GroupWithDefault(Group):
    """A group whose first command needs no name: ``ronde ship RUN`` exports. Its examples are those
    of the group.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        first = next(iter(self.commands.values())).help or ""
        self.help = "\n\n".join([self.help or "", *first.split("\n\n")[1:]])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is written, with the name that may be left out."""
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = [next(iter(self.commands)), *args]
        return list(super().parse_args(ctx, args))


def verb(app: typer.Typer, name: str, **context: Any) -> Callable[[F], F]:
    """Make a function a verb. Its docstring is the help. What it takes is a dataclass, whose fields
    are the verb's options; those of its bases are shown last. A field without an option is none of
    the verb's, and keeps its default.

    Args:
        context: settings of click's context. A verb with ``arguments``, those of a script or
            command, leaves all that follows the script to it.
    """

    def add(function: F) -> F:
        options = get_type_hints(function)["options"]

        def call(**values: Any) -> None:
            function(options(**values))

        hints = get_type_hints(options, include_extras=True)  # of the bases, in their modules
        for field in dataclasses.fields(options):
            if "option" in field.metadata:
                hints[field.name] = Annotated[hints[field.name], field.metadata["option"]]
        known = inspect.signature(options).parameters
        # The class before its bases: what is special to a verb comes first in its help.
        own = [f for each in options.__mro__ for f in vars(each).get("__annotations__", ())]
        offered = [f for f in dict.fromkeys(own) if get_origin(hints[f]) is Annotated]
        fields = [known[f].replace(annotation=hints[f]) for f in offered]
        call.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
        script = "arguments" in known
        apart = {"allow_interspersed_args": False, "ignore_unknown_options": True}
        app.command(
            name,
            cls=Verb,
            help=inspect.getdoc(function),
            context_settings=(apart if script else {}) | context,
            no_args_is_help=script or any(f.default is f.empty for f in fields),
        )(call)
        return function

    return add


app = typer.Typer(
    name="ronde",
    cls=Group,
    help="One training script, on one device or on many.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
