from lab.console import open_console


def test_a_console_prints_colons_as_they_stand(capsys):
    open_console(stderr=True).print("model=nomod:X: No module named 'nomod'")
    assert capsys.readouterr().err == "model=nomod:X: No module named 'nomod'\n"
