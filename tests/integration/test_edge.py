"""What no command expects ends in one line, with the traceback in a file that it names."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lab.cli import edge
from lab.cli.command import Group


def run(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line whose only command raises an error."""
    app = typer.Typer(cls=Group)
    app.callback()(lambda: None)

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr("sys.argv", ["lab", "fail"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return edge.run(app)


# A file that ends too early raises EOFError, which typer takes for the end of typed input.
@pytest.mark.parametrize("error", [EOFError("marshal data too short"), KeyError("x")])
def test_an_unexpected_error_is_one_line_that_names_its_traceback(
    error, tmp_path, monkeypatch, capsys
):
    assert run(error, tmp_path, monkeypatch) == 1
    (details,) = tmp_path.glob("lab-*.txt")
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"Error: unexpected: {type(error).__name__}: {error} (details: {details})"
    assert f"{type(error).__name__}: " in details.read_text()


def test_an_interrupt_has_its_exit_code_and_leaves_no_traceback(tmp_path, monkeypatch):
    assert run(KeyboardInterrupt(), tmp_path, monkeypatch) == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [0, "enough"])
def test_code_that_ends_the_process_is_no_success(code, tmp_path, monkeypatch, capsys):
    assert run(SystemExit(code), tmp_path, monkeypatch) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"Error: code that was called ended the process (sys.exit({code!r}))"


ARGUMENTS = "_arguments '*: :(({}))'\n"


@pytest.mark.parametrize(
    ("variables", "completions"),
    [
        ({"_LAB_COMPLETE": "complete_bash", "COMP_WORDS": "lab mq", "COMP_CWORD": "1"}, "mqar\n"),
        (
            {"_LAB_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "lab certify --qu"},
            ARGUMENTS.format('"--quick":"Test less thoroughly; takes seconds."'),
        ),
    ],
)
def test_a_shell_gets_completions_and_nothing_else(variables, completions):
    lab = Path(sys.executable).with_name("lab")
    done = subprocess.run(
        [lab], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (completions, "")


def test_bash_completes_a_tasks_options_with_the_printed_script():
    """The script is the one that `lab --install-completion` writes."""
    folder = Path(sys.executable).parent
    script = """
    source <(lab --show-completion)
    COMP_WORDS=(lab mqar --se); COMP_CWORD=2
    _lab_completion lab
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == {"--seq-len", "--seed", "--seeds"}
    assert done.stderr == ""


INTERRUPT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "lab.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from lab.cli import main
main()
"""


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("$LAB tasks >&-", 1, "Error: standard output is closed; /dev/null discards what is pr"),
        ("$LAB tasks 2>&- >&-", 1, ""),
        ("rmdir $PWD; $LAB mqar", 1, "Error: the working directory no longer exists; go to ano"),
        ("rmdir $PWD; $PYTHON -m lab mqar", 1, "Error: the working directory no longer exists; "),
        (f"$PYTHON -c '{INTERRUPT}'", 130, "Error: interrupted"),
        ("trap '' INT; $PYTHON -c '{INTERRUPT}' >/dev/null", 0, ""),
    ],
)
def test_what_no_command_can_work_without_is_one_line(command, code, said, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    lab = Path(sys.executable).with_name("lab")
    names = {**os.environ, "LAB": str(lab), "PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", "-c", command.replace("{INTERRUPT}", INTERRUPT)],
        # Tests that run in the background ignore interrupts, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        cwd=folder,
        env=names,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said)
