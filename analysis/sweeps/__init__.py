"""What a sweep's table shows: settings with intervals, curves over widths, pairs, rates, steps."""
