"""Lengths of time, as people read them."""


def format_duration(seconds: float) -> str:
    """Return a length of time in the two units that matter: "3 d 4 h", "2 min 5 s"."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    if seconds < 1:
        return f"{seconds:.1f} s"
    for i, (name, size) in enumerate(units[:-1]):
        if seconds >= size:
            finer, unit = units[i + 1]
            rest = f" {seconds % size // unit:.0f} {finer}"
            return f"{seconds // size:.0f} {name}{rest if rest[1] != '0' else ''}"
    return f"{seconds:.0f} s"
