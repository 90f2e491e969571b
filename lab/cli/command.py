"""What all commands share: plain names of types in the help, near names for mistyped words."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from lab.cli.messages import refuse, report_usage_errors
from tasks.bounds import find_kind, varies
from tasks.near_names import ask, find_near, suggest

NONE_OF = re.compile(r"'([^']*)' is not one of (.*)\.$")
"""What typer says of a value that is none of an option's choices."""
TYPE_NAMES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def unwrap(docstring: str | None) -> str:
    """Join the lines of each paragraph, which a terminal breaks anew."""
    paragraphs = (docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def name_type(param: TyperOption | TyperArgument) -> str:
    """Return the name of a parameter's type, e.g. INT, or its choices; "" for a flag."""
    if isinstance(param, TyperOption) and param.is_flag:
        return ""
    kind = param.type_descriptor
    if kind.choices:
        return "|".join(str(getattr(choice, "value", choice)) for choice in kind.choices)
    single = get_args(kind.annotation)[0] if kind.is_list else kind.annotation
    return TYPE_NAMES.get(single, "TEXT")


def _name_types(params: list[Any]) -> list[Any]:
    """Have typer's help show `name_type` of each parameter."""
    for param in params:
        label = name_type(param)
        param.display_type = lambda ctx, label=label: label
    return params


def write_sections(formatter: Any, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Write lists of terms and what each is, below the title of each list."""
    for title, entries in sections.items():
        with formatter.section(title):
            formatter.write_dl(entries)


def describe_parameters(params: Sequence[Any], ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the names and help of parameters, by the section of the help that they belong to."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(ctx)
        if record is not None:
            usual = "Arguments" if isinstance(param, TyperArgument) else "Options"
            sections.setdefault(param.rich_help_panel or usual, []).append(record)
    return sections


def set_parameters(
    command: Callable[..., None], annotations: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Give a command parameters that its code does not list; those without a default get None."""
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=annotation,
        )
        for name, annotation in annotations.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = dict(annotations)


def make_command(
    function: Callable[..., None],
    options: type[Any],
    *,
    json: str = "",
    others: bool = False,
    report: Callable[[Mapping[str, Any], bool], AbstractContextManager[None]] | None = None,
) -> Callable[..., None]:
    """Return a command whose parameters are the fields of a dataclass (see `annotate`).

    Args:
        function: gets the options that were given as an instance of the dataclass; and, if there
            is an option --json, whether it was given, as `as_json`. Its docstring is the help.
        options: the dataclass; it validates its values.
        json: help of an option --json; "": there is none.
        others: the function also gets all words that are no option of the dataclass, as `words`.
        report: what reports values that the dataclass refuses; it gets the values as typed, and
            whether --json was given. None: in one line, with exit code 2.
    """
    hints = get_type_hints(options)
    own = options.__annotations__
    taken = (f for f in fields(options) if f.init and f.metadata.get("flag") != "")
    known = {f.name: f for f in sorted(taken, key=lambda f: f.name not in own)}
    annotations = {name: annotate(f, hints[name]) for name, f in known.items()}
    defaults = {
        name: inspect.Parameter.empty
        if f.default is MISSING
        # Typed text takes the place of a value that is read from it.
        else None
        if f.metadata.get("read") or f.default == ()
        else f.default
        for name, f in known.items()
    }
    if json:
        annotations["as_json"] = Annotated[bool, typer.Option("--json", help=json)]
        defaults["as_json"] = False

    if others:
        annotations["context"] = typer.Context

    def command(**given: Any) -> None:
        also = {"as_json": given.pop("as_json")} if json else {}
        if others:
            also["words"] = given.pop("context").args
        typed = {name: value for name, value in given.items() if value not in (None, [])}
        with report(typed, also.get("as_json", False)) if report else report_usage_errors():
            chosen = options(**{name: _read(known[name], value) for name, value in typed.items()})
        function(chosen, **also)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    set_parameters(command, annotations, defaults)
    return command


def takes(options: type[Any], **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of the function below: `make_command` as a decorator."""
    return lambda function: make_command(function, options, **more)


def _read(of: Field[Any], value: Any) -> Any:
    read = of.metadata.get("read")
    if read is not None:
        return read(value)
    return tuple(value) if isinstance(value, list) else value


def annotate(
    of: Field[Any],
    hint: Any,
    *,
    panel: str | None = None,
    shown: str | None = None,
    optional: bool = False,
    several: bool = False,
) -> Any:
    """Return typer's annotation of a dataclass's field: a type, and an option or an argument.

    A field of several values, tuple[X, ...], is an option that may be repeated, and so is a
    mapping, from texts; a flag that is off by default has no opposite. The field's metadata, which
    `tasks.bounds.option` makes, may hold:

        help      what the option is for
        shown     its default in words
        flag      its name, such as "--format" or "--relative/--absolute"; "": it is no option
        metavar   what stands for its value
        panel     the section of the help that it belongs to
        argument  True: it is an argument
        read      a function that makes its value of the text that is typed, or, for a mapping, of
                  the texts

    Args:
        of: the field.
        hint: its type.
        panel: the section of the help, if the field does not say it.
        shown: the default in words, likewise.
        optional: None stands for "not given", whatever the field's default.
        several: numbers and named choices are read from text, which may name several values.
    """
    about, kind, flag, metavar = of.metadata, find_kind(hint), None, of.metadata.get("metavar")
    flag, reads = about.get("flag"), about.get("read") is not None
    if several and varies(hint):
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        metavar = "|".join(choices) if choices else f"{TYPE_NAMES[kind]},…"
        kind = str
    elif get_origin(kind) in (tuple, list, Sequence):
        kind = str if reads else list[get_args(kind)[0]]
    elif get_origin(kind) in (dict, Mapping):
        kind = list[str]
    elif reads:
        kind = str
    if kind is bool and of.default is False and flag is None and not optional:
        flag = f"--{of.name.replace('_', '-')}"
    default = None if of.default in (MISSING, ()) else of.default
    shown = about.get("shown") or shown
    settings: dict[str, Any] = {
        "help": about.get("help", ""),
        "metavar": metavar,
        "rich_help_panel": about.get("panel", panel),
    }
    if optional and shown is None and default is not None:
        shown = str(default)
    if shown is not None or default is None or default is False:
        settings["show_default"] = shown or False
    if about.get("argument"):
        return Annotated[kind | None if of.default is None else kind, typer.Argument(**settings)]
    optional |= of.default is None or of.default == () or reads
    made = typer.Option(*([flag] if flag else []), **settings)
    return Annotated[kind | None if optional else kind, made]


@contextmanager
def _report_in_one_line(params: Sequence[Any]) -> Iterator[None]:
    """Report what the parser refuses in one line, with near names of an unknown option."""
    try:
        yield
    except typer.TyperException as error:
        asked = getattr(error, "option_name", None)
        # An unknown option; typer's class for it is private.
        if asked is not None and hasattr(error, "possibilities"):
            known = [name for param in params for name in (*param.opts, *param.secondary_opts)]
            options = [name for name in known if name.startswith("--")]
            near = ask(find_near(asked, options))
            raise refuse(f"{error.message}. {near}".removesuffix(" "), 2) from error
        message = error.format_message().replace("Value error, ", "")
        none_of = NONE_OF.search(message)
        near = none_of and ask(find_near(none_of[1], none_of[2].strip("'").split("', '")))
        raise refuse(f"{message} {near or ''}".rstrip(), 2) from error


class Command(TyperCommand):
    """A command of `lab`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _name_types(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the parameters, section by section."""
        write_sections(formatter, describe_parameters(self.get_params(ctx), ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name."""
        with _report_in_one_line(self.get_params(ctx)):
            return super().parse_args(ctx, args)


class Group(TyperGroup):
    """`lab` itself, which all commands belong to."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _name_types(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then what each command does."""
        sections = describe_parameters(self.get_params(ctx), ctx)
        for name in self.list_commands(ctx):
            title, summary = self.describe(ctx, name)
            sections.setdefault(title, []).append((name, unwrap(summary.partition("\n\n")[0])))
        write_sections(formatter, sections)

    def describe(self, ctx: Any, name: str) -> tuple[str, str]:
        """Return the section of a command in the help, and its own help."""
        return "Commands", getattr(self.get_command(ctx, name), "help", None) or ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command's name."""
        with _report_in_one_line(self.get_params(ctx)):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; that code which it calls ends the process is a failure."""
        try:
            return super().invoke(ctx)
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # rich's: nobody reads any more
                raise
            how = f"sys.exit({error.code!r})"
            raise refuse(f"code that was called ended the process ({how})", 1) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names; suggest one if there is none."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            if find_near(name, ["train"]):
                how = "To train a model, name its task: `lab mqar`; `lab tasks` lists them"
                raise refuse(f"No such command: {name}. {how}", 2)
            raise refuse(f"No such command: {name}. {suggest(name, known)}", 2)
        return super().resolve_command(ctx, args)
