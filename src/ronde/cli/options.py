"""Offers ``option``, and commands whose options may have a value or none."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ronde.world import ArgumentError


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


RunsOption = Annotated[
    Path, option("--runs", "Folder that holds the runs.", "DIR", envvar="RONDE_RUNS")
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The run, or a path to its directory.", show_default=False),
]
JsonFlag = Annotated[bool, option("--json", "Print the result as JSON.")]


def add_verb(
    app: typer.Typer, name: str, options: type[Any], function: Callable[[Any], None], help: str
) -> None:
    """Add a verb that takes a script, or a command, and its arguments.

    Args:
        options: a dataclass, whose fields are the verb's options; those of its bases are shown
            last.
        function: called with one of them.
    """

    def verb(**values: Any) -> None:
        function(options(**values))

    hints = get_type_hints(options, include_extras=True)  # of the bases, in their modules
    # The class before its bases: what is special to a verb comes first in its help.
    own = [field for each in options.__mro__ for field in vars(each).get("__annotations__", ())]
    known = inspect.signature(options).parameters
    for field in dataclasses.fields(options):
        if "option" in field.metadata:
            hints[field.name] = Annotated[hints[field.name], field.metadata["option"]]
    fields = [known[name].replace(annotation=hints[name]) for name in dict.fromkeys(own)]
    verb.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
    app.command(
        name,
        help=help,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
        no_args_is_help=True,
    )(verb)


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
    """A group whose first command needs no name: ``ronde ship RUN`` exports."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is written, with the name that may be left out."""
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = [next(iter(self.commands)), *args]
        return list(super().parse_args(ctx, args))


def tidy(app: typer.Typer) -> None:
    """Make every registered command a :class:`Verb`."""
    for command in app.registered_commands:
        command.cls = Verb
    for group in app.registered_groups:
        if group.typer_instance is not None:
            tidy(group.typer_instance)
