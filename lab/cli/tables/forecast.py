"""How long a training will take: the usual time where there is a record, and the limits."""

import time

from lab.cli.tables.durations import LONG_TEST, format_duration
from lab.lengthening import list_stages
from lab.training.records import StepTimes, find_record
from lab.training.runs import Run


class Forecast:
    """What is known of the time that a run will take.

    Args:
        run: what is trained.
        max_minutes: minutes after which it stops; None: no such limit.
        slowing: how many times as long a step takes at the longest rows as at the shortest.
    """

    def __init__(self, run: Run, max_minutes: float | None, slowing: float):
        stages = list_stages(run.task, run.train)
        self.first, self.last = (stage.task.seq_len for stage in (stages[0], stages[-1]))
        self.max_steps, self.max_minutes, self.slowing = run.train.max_steps, max_minutes, slowing
        self.test_rows, self.batch_size = run.train.test_rows, run.train.batch_size
        record = find_record(run) if run.train.early_stop else None
        self.record = record if record and record.total < self.max_steps else None
        self.began = time.monotonic()

    def describe(self, step: int, seq_len: int, seconds: float) -> str:
        """Say how long the run usually takes, and how long up to each limit.

        Args:
            step: steps taken.
            seq_len: row length of the steps that were timed.
            seconds: time of one.
        """
        times = self._scale(seq_len, seconds)
        slower = "" if times.longest == seconds else f", {_milliseconds(times.longest)} at the end"
        text = f"A step takes {_milliseconds(seconds)} here{slower}. "
        steps, usual = self._find_rest(step, times)
        if steps:
            text += (
                f"With these settings, a run is usually solved after {step + steps:,} steps: "
                f"about {format_duration(usual)}. "
            )
        most = (self.max_steps - step) * times.longest
        limit = f"the limit of {self.max_steps:,} steps"
        text += f"Going on to {limit} would take about {format_duration(most)} at this speed. "
        # An upper bound: tests need no gradients.
        test = self.test_rows / self.batch_size * times.longest
        if test >= LONG_TEST:
            text += f"Each test of {self.test_rows:,} rows takes up to {format_duration(test)}. "
        if self.max_minutes is not None and 60 * self.max_minutes < most:
            limit = format_duration(60 * self.max_minutes)
            text += f"--max-minutes stops training after {limit}. "
        return f"{text}Ctrl-C stops; the same command resumes."

    def describe_rest(self, step: int, seq_len: int, seconds: float) -> str:
        """Say in a few words how long the run still takes; nothing after the last step.

        Without a record, that is the time to the limit that the run reaches first.
        """
        if step >= self.max_steps:
            return ""
        times = self._scale(seq_len, seconds)
        steps, usual = self._find_rest(step, times)
        most, limit = (self.max_steps - step) * times.longest, "step limit"
        if self.max_minutes is not None:
            minutes_left = 60 * self.max_minutes - (time.monotonic() - self.began)
            if minutes_left < most:
                most, limit = max(0.0, minutes_left), "time limit"
        if steps and usual < most:
            return f"about {format_duration(usual)} left"
        about = "about " if limit == "step limit" else ""  # the time limit is exact
        return f"{about}{format_duration(most)} to the {limit}"

    def find_total(self, step: int) -> int:
        """Return the steps that a full bar stands for: the usual ones, or after them the limit."""
        usual = self.record.total if self.record else 0
        return usual if step <= usual else self.max_steps

    def _find_rest(self, step: int, times: StepTimes) -> tuple[int, float]:
        return self.record.estimate_rest(step, times) if self.record else (0, 0.0)

    def _scale(self, seq_len: int, seconds: float) -> StepTimes:
        return StepTimes(seconds, seq_len, self.first, self.last, self.slowing)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
