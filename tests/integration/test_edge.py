"""What no command expects ends in one line, with the traceback in a file that it names."""

from pathlib import Path

import pytest
import typer

from lab.cli import edge


def run(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line whose only command raises an error."""
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr("sys.argv", ["lab"])
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
