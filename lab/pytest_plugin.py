"""A pytest plugin: `pytest --lawful MODULE:FACTORY` adds a test for each law.

Registered under the name "lawful" wherever the lab is installed; it imports torch only if a module
is to be tested.
"""

from typing import TYPE_CHECKING, Any

import pytest

from lab.certify_settings import QUICK, THOROUGH, CertifySettings, parse_options

if TYPE_CHECKING:
    from lab.laws.certification import Certification

EFFORTS = {"quick": QUICK, "usual": CertifySettings(), "thorough": THOROUGH}
ALWAYS = ("deterministic", "causal", "batch-invariant")
"""Laws that every module can be tried on, so that leaving one undecided is no pass."""


class LawError(AssertionError):
    """A law fails, or it could not be tried; the message says how."""


class Target:
    """A module that is tested by its name, built when its first law is tried.

    Args:
        text: "MODULE:FACTORY", then any arguments of the factory as NAME=VALUE.
        settings: what to try it on.

    Raises:
        ValueError: for arguments of another form.
    """

    def __init__(self, text: str, settings: CertifySettings):
        self.name, *assignments = text.split() or [""]
        self._options, self._settings = parse_options(assignments), settings
        self._certification: Certification | None = None

    def judge(self, law: str) -> Any:
        """Return the verdict of a law.

        Raises:
            ValueError: for a module that cannot be imported, built or called.
        """
        from dataclasses import replace

        from lab.laws.certification import Certification

        if self._certification is None:
            settings = replace(self._settings, options=self._options)
            self._certification = Certification(self.name, settings)
        return self._certification.judge(law)


class LawItem(pytest.Item):
    """The test of one law on one module."""

    def __init__(self, *, target: Target, law: str, **given: Any):
        super().__init__(**given)
        self.target, self.law = target, law

    def runtest(self) -> None:
        """Try the law.

        Raises:
            LawError: when it fails, or when a law that applies to every module is not decided.
        """
        try:
            found = self.target.judge(self.law)
        except ValueError as error:
            raise LawError(str(error)) from error
        if found.verdict == "fails":
            words = [f"{self.law} fails: {found.counterexample}", f"({found.evidence})"]
            raise LawError("\n".join([*words, *([found.snippet] if found.snippet else [])]))
        if found.verdict == "not decided" and self.law in ALWAYS:
            raise LawError(f"{self.law} is not decided: {found.evidence}")
        if found.verdict != "holds":
            pytest.skip(f"{found.verdict}: {found.evidence}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the counter-example and the program, without the lab's own stack."""
        if isinstance(excinfo.value, LawError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return what heads the report of this test."""
        return self.path, None, f"{self.target.name}: {self.law}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("lawful", "laws of sequence models (wonderful-lab)")
    group.addoption(
        "--lawful",
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="test a module against every law; arguments of the factory follow it, all in quotes: "
        '"my_mixers:Average d_model=16"; may be repeated',
    )
    group.addoption(
        "--lawful-effort",
        choices=tuple(EFFORTS),
        default="quick",
        help="seconds for each module (quick, the default), more (usual) or minutes (thorough)",
    )
    parser.addini("lawful", "modules to test against every law, one a line", type="linelist")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the tests before -k and -m select from all."""
    wanted: list[str] = [*config.getini("lawful"), *config.option.lawful]
    if not wanted:
        return
    from lab.laws.certification import LAWS

    settings = EFFORTS[config.option.lawful_effort]
    for text in wanted:
        try:
            target = Target(text, settings)
        except ValueError as error:
            raise pytest.UsageError(f"--lawful {text!r}: {error}") from error
        for law in LAWS:
            items.append(
                LawItem.from_parent(
                    session, name=law, nodeid=f"{text}::{law}", target=target, law=law
                )
            )
