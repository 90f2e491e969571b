"""What analyses measure with: numbers and readings of a model, without a figure."""
