"""What all commands share: plain names of types in the help, near names for mistyped words."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from lab.cli.messages import refuse
from tasks.near_names import ask, find_near, suggest

HOME = Path(__file__).parents[2]
"""The folder of the packages."""
NONE_OF = re.compile(r"'([^']*)' is not one of (.*)\.$")
"""What typer says of a value that is none of an option's choices."""
TYPE_NAMES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def list_keys(file: str, variable: str) -> str:
    """List the keys of a dictionary in a file of the lab, without importing the file."""
    tree = ast.parse((HOME / file).read_text(encoding="utf-8"))
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys)):
                if name == variable:
                    return ", ".join(ast.literal_eval(key) for key in keys if key)
    raise ValueError(f"{file} defines no dictionary {variable}")


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
            command: Any = self.get_command(ctx, name)
            summary = (command.help or "").partition("\n\n")[0]
            sections.setdefault(command.rich_help_panel or "Commands", []).append(
                (name, " ".join(summary.split()))
            )
        write_sections(formatter, sections)

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
