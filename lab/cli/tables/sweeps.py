"""The table of a sweep's settings, for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from analysis.sweeps.settings import SettingResult


def build_settings_table(settings: Sequence[SettingResult]) -> Table:
    """Return a line for each setting: its factors, accuracy and interval, and what it took."""
    table = Table(box=None, title="mean test accuracy over seeds", title_justify="left")
    factors = list(settings[0].factors) if settings else []
    for name in (*factors, "accuracy", "95 %", "seeds", "solved", "steps", "seconds"):
        table.add_column(name, justify="right")
    for setting in settings:
        values = [
            f"{value:g}" if isinstance(value, float) else str(value)
            for value in setting.factors.values()
        ]
        if not setting.seeds:
            table.add_row(*values, "no result", "", f"0 of {setting.unended}", "", "", "")
            continue
        count = len(setting.seeds)
        low, high = setting.interval
        table.add_row(
            *values,
            f"{setting.mean:.4f}",
            f"{low:.4f} … {high:.4f}",
            str(count) if not setting.unended else f"{count} of {count + setting.unended}",
            f"{sum(setting.solved)} of {count}",
            f"{sum(setting.steps) / count:,.0f}",
            f"{sum(setting.seconds) / count:,.0f}",
        )
    return table
