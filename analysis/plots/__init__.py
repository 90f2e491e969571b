"""The theme, and plots that several analyses share."""
