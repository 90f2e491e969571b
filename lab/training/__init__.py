"""Train a model, keep what it did in a run folder, resume it exactly."""
